package redisstore

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redistest"
)

type key struct{}

// watch is a hook that counts the pipelines and their commands, and keeps the value of the last
// context.
type watch struct {
	pipelines, commands atomic.Int64
	value               atomic.Value
}

func (*watch) DialHook(next redis.DialHook) redis.DialHook          { return next }
func (*watch) ProcessHook(next redis.ProcessHook) redis.ProcessHook { return next }
func (w *watch) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		if cmds[0].Name() != "client" { // of a new connection
			w.pipelines.Add(1)
			w.commands.Add(int64(len(cmds)))
			w.value.Store(fmt.Sprint(ctx.Value(key{}), " ", cmds[0].Args()))
		}
		return next(ctx, cmds)
	}
}

// A hook sees the values of a lone caller's context, and the texts of the commands. Commands of
// many callers travel together.
func TestHooksOfAPassedClient(t *testing.T) {
	srv := redistest.Start(t, &redistest.Options{Own: true})
	rdb := srv.Client()
	w := &watch{}
	rdb.AddHook(w)
	s := New(rdb)
	await.Value(s.Do(context.WithValue(t.Context(), key{}, "span"), "get", "k"))
	if got := w.value.Load(); got != "span [get k]" {
		t.Errorf("a hook saw %q", got)
	}

	before, commands := w.pipelines.Load(), w.commands.Load()
	srv.Pause()
	var calls sync.WaitGroup
	for _, key := range numbered("n", 200) {
		calls.Go(func() { wants(t, key, int64(1), reply(s.Do(t.Context(), "incr", key))) })
	}
	time.Sleep(50 * time.Millisecond)
	srv.Resume()
	calls.Wait()
	if n, c := w.pipelines.Load()-before, w.commands.Load()-commands; n > 24 || c != 200 {
		t.Errorf("%d commands in %d pipelines", c, n)
	}
}

// If a caller leaves before its command is in a pipeline, the command is not sent.
func TestACallerThatLeavesEarlySendsNothing(t *testing.T) {
	srv := redistest.Start(t, &redistest.Options{Own: true})
	s := opened(t, srv.URL(), nil)
	srv.Pause()
	var calls sync.WaitGroup
	until(t, "all flights are under way", func() bool {
		calls.Go(func() { s.Do(t.Context(), "get", "k") })
		return allFlights(s)
	})
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(10*time.Millisecond, cancel)
	if _, err := s.Do(ctx, "set", "left", "v"); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	srv.Resume()
	calls.Wait()
	if n := srv.Client().Exists(t.Context(), "left").Val(); n != 0 {
		t.Error("the command was sent")
	}
}
