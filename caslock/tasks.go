package caslock

import (
	"context"
	"sync"
)

// tasks are the goroutines of a driver. Close waits for them.
type tasks struct {
	closing context.Context // ends when Close begins
	end     context.CancelFunc

	mu    sync.Mutex // taken by run and stop, so that no task starts after Close
	group sync.WaitGroup
}

func newTasks() *tasks {
	closing, end := context.WithCancel(context.Background())
	return &tasks{closing: closing, end: end}
}

// run starts f in a goroutine. If Close has begun, run returns an error instead. The context of f
// has the values of ctx. It ends when Close begins, and not when ctx ends.
func (ts *tasks) run(ctx context.Context, f func(ctx context.Context)) error {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	if err := ts.closing.Err(); err != nil {
		return err
	}

	ts.group.Go(func() {
		ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
		defer cancel()
		defer context.AfterFunc(ts.closing, cancel)()
		f(ctx)
	})
	return nil
}

// stop ends the tasks, and waits for them.
func (ts *tasks) stop() {
	ts.mu.Lock()
	ts.end()
	ts.mu.Unlock()
	ts.group.Wait()
}
