package caslock

import (
	"context"
	"sync"
)

// tasks are the goroutines of a driver. Close waits for them.
type tasks struct {
	closing context.Context // ends when Close begins
	end     context.CancelFunc

	// The method run holds mu while it starts a task, and stop while it ends closing. So no task
	// starts after stop has begun to wait.
	mu    sync.Mutex
	group sync.WaitGroup // the tasks that run
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
