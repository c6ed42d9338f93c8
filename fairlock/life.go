package fairlock

import (
	"context"
	"sync"
	"time"
)

// life counts the activities of a driver, and ends them when the driver closes.
type life struct {
	open        context.Context // ends when Close begins; no call is repeated after that
	beginClose  context.CancelFunc
	calls       context.Context // ends when Close cancels the calls that are still in flight
	cancelCalls context.CancelFunc

	mu         sync.Mutex     // makes begin and close exclude each other
	background sync.WaitGroup // counts the activities that Close waits for
}

func newLife() *life {
	l := &life{}
	l.open, l.beginClose = context.WithCancel(context.Background())
	l.calls, l.cancelCalls = context.WithCancel(context.Background())
	return l
}

// begin counts a new activity. Close waits until the activity calls end. The result is false once
// Close has begun.
func (l *life) begin() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.open.Err() != nil {
		return false
	}
	l.background.Add(1)
	return true
}

// end ends an activity that begin has counted.
func (l *life) end() { l.background.Done() }

// isOver reports whether Close has begun.
func (l *life) isOver() bool { return l.open.Err() != nil }

// close ends l.open. After that no activity can begin, so background.Wait covers all activities.
func (l *life) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.beginClose()
}

// closing is how long Close waits for calls in flight. After Close has cancelled these calls, it
// waits for the same time again.
const closing = time.Second

// drain waits for the activities, at most twice the time closing. In between, it cancels the calls
// that are still in flight, and calls the function disconnect, whose error it returns.
func (l *life) drain(disconnect func() error) error {
	// If a call outlasts both waits below, this goroutine ends with that call.
	done, end := context.WithCancel(context.Background())
	go func() {
		l.background.Wait()
		end()
	}()

	wait := func() {
		select {
		case <-done.Done():
		case <-time.After(closing):
		}
	}

	// Give calls time to end by themselves, because a cancelled call has an unknown outcome.
	wait()
	l.cancelCalls()
	err := disconnect()
	wait()
	return err
}
