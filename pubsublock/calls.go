package pubsublock

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/backend"
)

const (
	// grace is how long a call whose time is over is waited for, so that its
	// own account is heard.
	grace = 10 * time.Millisecond

	// firstRetry is how long after a release that was not answered the next
	// one is sent; that pause doubles each time.
	firstRetry = 50 * time.Millisecond

	// patience is how long Close waits for calls under way.
	patience = time.Second
)

var (
	errLeft   = errors.New("left")
	errClosed = errors.New("the driver is closed")
)

// calls are what waiters leave to goroutines: attempts that may outlast them,
// and the releases of what was left behind.
type calls struct {
	mu      sync.Mutex // guards ended; nothing starts after that
	ended   bool
	running sync.WaitGroup
	closing chan struct{} // closed with ended
}

func newCalls() *calls { return &calls{closing: make(chan struct{})} }

func (cs *calls) spawn(f func()) bool {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if cs.ended {
		return false
	}
	cs.running.Go(f)
	return true
}

// close has nothing begin any more, and waits a moment for what has.
func (cs *calls) close() {
	cs.mu.Lock()
	if !cs.ended {
		cs.ended = true
		close(cs.closing)
	}
	cs.mu.Unlock()
	done := make(chan struct{})
	go func() {
		cs.running.Wait()
		close(done)
	}()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-done:
	case <-timer.C:
	}
}

// attempt is Acquire of a caller who may leave: it returns errLeft soon after
// ctx has ended. The call itself is not broken off at once, for its answer
// tells whether there is anything to take back; what is of unknown outcome is
// taken back, too.
func (d *Driver) attempt(ctx context.Context, c backend.Claim, bound time.Duration) (backend.Grant, error) {
	within, cancel := context.WithTimeout(context.WithoutCancel(ctx), bound)
	if d.store.Ends() != backend.EndsPromptly {
		return d.attemptApart(ctx, within, cancel, c)
	}
	defer cancel()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(grace, cancel) })()
	g, err := d.Acquire(within, c)
	if err != nil && !definite(err) {
		d.calls.spawn(func() { d.takeBack(c, 2) })
		if ctx.Err() != nil {
			err = errLeft
		}
	}
	return g, err
}

// outcome is how an attempt came out.
type outcome struct {
	g   backend.Grant
	err error
}

// attemptApart makes an attempt on a goroutine of its own, which is left
// behind if need be.
func (d *Driver) attemptApart(ctx, within context.Context, cancel context.CancelFunc, c backend.Claim) (backend.Grant, error) {
	answer := make(chan outcome, 1)
	var met atomic.Bool // set by the answer and by the leaving: whichever is second knows what to do
	if !d.calls.spawn(func() {
		g, err := d.Acquire(within, c)
		left := met.Swap(true)
		if !left {
			answer <- outcome{g, err}
		}
		cancel()
		switch {
		case err == nil && left:
			d.takeBack(c, 1)
		case err != nil && !definite(err):
			d.takeBack(c, 2)
		}
	}) {
		cancel()
		return backend.Grant{}, errClosed
	}
	err := errLeft
	select {
	case o := <-answer:
		return o.g, o.err
	case <-ctx.Done():
	case <-within.Done():
		err = fmt.Errorf("no answer: %w", os.ErrDeadlineExceeded)
		timer := time.NewTimer(grace)
		defer timer.Stop()
		select {
		case o := <-answer:
			return o.g, o.err
		case <-timer.C:
		}
	}
	if met.Swap(true) {
		o := <-answer
		return o.g, o.err
	}
	return backend.Grant{}, err
}

// takeBack releases what an attempt may have left, until that was answered as
// often as times says: a command of unknown outcome may land after the first
// release, but not a Timeout later, when its connection is dead.
func (d *Driver) takeBack(c backend.Claim, times int) {
	end := time.Now().Add(c.TTL + c.Timeout) // the store has forgotten it by then
	retry := firstRetry
	for {
		within, cancel := context.WithTimeout(context.Background(), c.Timeout)
		err := d.Release(within, c)
		cancel()
		pause := c.Timeout
		if err != nil && !definite(err) {
			pause, retry = retry, min(2*retry, c.Timeout)
		} else if times--; times == 0 {
			return
		}
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-d.calls.closing:
			timer.Stop()
			return
		}
		if time.Now().After(end) {
			return
		}
	}
}

// definite reports whether err says what the store did, which is nothing.
func definite(err error) bool {
	return errors.Is(err, backend.ErrHeld) || errors.Is(err, backend.ErrLost) || errors.Is(err, backend.ErrInvalid) || errors.Is(err, errors.ErrUnsupported)
}
