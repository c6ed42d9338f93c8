package redlock_test

import (
	"context"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/redlock"
)

// prefixed is a hook of a client of the caller that puts a prefix before each key. A hook
// can change a command only by its slice of arguments.
type prefixed struct{}

func (prefixed) DialHook(next redis.DialHook) redis.DialHook {
	return func(ctx context.Context, network, addr string) (net.Conn, error) { return next(ctx, network, addr) }
}

func (prefixed) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		prefixKeys(cmd.Args())
		return next(ctx, cmd)
	}
}

func (prefixed) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		for _, cmd := range cmds {
			prefixKeys(cmd.Args())
		}
		return next(ctx, cmds)
	}
}

func prefixKeys(args []any) {
	first, n := 1, 0
	switch strings.ToLower(args[0].(string)) {
	case "set", "get":
		n = 1
	case "eval", "evalsha":
		first, n = 3, args[2].(int)
	}
	for i := first; i < first+n; i++ {
		args[i] = "app:" + args[i].(string)
	}
}

// Clients that the caller passes may have hooks that change the arguments of commands.
func TestHooksMayChangeArguments(t *testing.T) {
	nodes := redistest.StartNodes(t, 3, nil)
	clients := nodes.Clients()
	for _, rdb := range clients {
		rdb.AddHook(prefixed{})
	}
	c := hasp.New(redlock.New(clients, nil), nil)
	defer c.Close()
	for range 3 {
		l, err := c.TryLock(t.Context(), "k")
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(100 * time.Millisecond) // the third vote arrives
		for i, s := range nodes.Servers {
			if keys := s.Client().Keys(t.Context(), "app:app:*").Val(); len(keys) > 0 {
				t.Errorf("node %d has %q", i, keys)
			}
		}
		if err := l.Unlock(t.Context()); err != nil {
			t.Error(err)
		}
	}
}
