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

// pipelineHook is a hook of a client, which is called in place of each pipeline.
type pipelineHook func(ctx context.Context, cmds []redis.Cmder,
	next redis.ProcessPipelineHook) error

func (pipelineHook) DialHook(next redis.DialHook) redis.DialHook          { return next }
func (pipelineHook) ProcessHook(next redis.ProcessHook) redis.ProcessHook { return next }
func (h pipelineHook) ProcessPipelineHook(
	next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error { return h(ctx, cmds, next) }
}

// A hook sees the values of a lone caller's context, and the texts of the commands. Commands of
// many callers travel together.
func TestHooksOfAPassedClient(t *testing.T) {
	srv := redistest.Start(t, redistest.Own)
	rdb := srv.Client()
	var pipelines, commands atomic.Int64
	var seen atomic.Value
	rdb.AddHook(pipelineHook(func(ctx context.Context, cmds []redis.Cmder,
		next redis.ProcessPipelineHook) error {
		if cmds[0].Name() != "client" { // of a new connection
			pipelines.Add(1)
			commands.Add(int64(len(cmds)))
			seen.Store(fmt.Sprint(ctx.Value(key{}), " ", cmds[0].Args()))
		}
		return next(ctx, cmds)
	}))
	s := New(rdb)
	await.Value(s.Do(context.WithValue(t.Context(), key{}, "span"), "get", "k"))
	if got := seen.Load(); got != "span [get k]" {
		t.Errorf("a hook saw %q", got)
	}

	pipelines.Store(0)
	commands.Store(0)
	srv.Pause()
	var calls sync.WaitGroup
	for _, key := range numbered("n", 200) {
		calls.Go(func() { wants(t, key, int64(1), reply(s.Do(t.Context(), "incr", key))) })
	}
	time.Sleep(50 * time.Millisecond)
	srv.Resume()
	calls.Wait()
	if n, c := pipelines.Load(), commands.Load(); n > 24 || c != 200 {
		t.Errorf("%d commands in %d pipelines", c, n)
	}
}

// If a caller leaves before its command is in a pipeline, the command is not sent.
func TestACallerThatLeavesEarlySendsNothing(t *testing.T) {
	srv := redistest.Start(t, redistest.Own)
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
