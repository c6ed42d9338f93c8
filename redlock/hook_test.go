package redlock_test

import (
	"context"
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

func (prefixed) DialHook(next redis.DialHook) redis.DialHook { return next }

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
	for i, arg := range args {
		if key, ok := arg.(string); ok && strings.HasSuffix(key, "a-key") {
			args[i] = "app:" + key
		}
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
		l, err := c.TryLock(t.Context(), "a-key")
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
