package fairlock

import (
	"context"
	"errors"
	"time"

	"github.com/hasplock/hasp/backend"
)

const (
	leaving  = 10 * time.Millisecond // how long a Wait that has ended waits for its entry to be gone
	doubtFor = time.Minute           // how long a command may be on the way, at most
)

// doubt is a token that a call of unknown outcome may still put into the store,
// into the queue or even into the record.
type doubt struct {
	c     backend.Claim
	over  bool // nobody wants what it gets any more
	until time.Time
}

// doubtful notes a doubt about c.
func (d *Driver) doubtful(c backend.Claim, over bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	now, tries := time.Now(), 0
	for token, old := range d.doubts {
		if old.until.Before(now) {
			delete(d.doubts, token)
		}
		if tries++; tries == 8 {
			break // a few each time, and all in the end
		}
	}
	d.doubts[c.Token] = doubt{c, over, now.Add(doubtFor)}
}

// doubted reports whether there is a doubt about c, which has been released.
func (d *Driver) doubted(c backend.Claim) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	x, ok := d.doubts[c.Token]
	if ok {
		x.over = true
		d.doubts[c.Token] = x
	}
	return ok
}

// leave takes out of the store, in the background, what a Wait that has ended
// may have left there. It waits a moment for that.
func (d *Driver) leave(w *waiter) {
	times := 1
	if w.doubt {
		times = 2
		d.doubtful(w.c, true)
	}
	gone := make(chan struct{})
	d.wg.Go(func() { d.undo(w.c, times, 0, gone) }) // also if Close has begun, which waits for w
	t := time.NewTimer(leaving)
	defer t.Stop()
	select {
	case <-gone:
	case <-t.C:
	}
}

// undoLocked is undo in the background. The caller holds mu.
func (d *Driver) undoLocked(c backend.Claim, times int, after time.Duration) {
	if d.beginLocked() {
		go func() {
			defer d.wg.Done()
			d.undo(c, times, after, nil)
		}()
	}
}

// undo releases c after a while, so many times, a Timeout apart: what was on
// the way has landed by then, or never will. It closes gone when that was
// answered for the first time.
func (d *Driver) undo(c backend.Claim, times int, after time.Duration, gone chan<- struct{}) {
	until := time.Now().Add(after + d.window + c.TTL + c.Timeout)
	for try := 0; ; try++ {
		if after > 0 {
			select {
			case <-time.After(after):
			case <-d.open.Done():
				return // what is left ends by itself
			}
		}
		ctx, cancel := context.WithTimeout(d.calls, c.Timeout)
		err := d.release(ctx, c)
		cancel()
		after = pause(try)
		if err == nil || errors.Is(err, backend.ErrLost) {
			if gone != nil {
				close(gone)
				gone = nil
			}
			if times--; times == 0 {
				return
			}
			after, try = c.Timeout, 0
		} else if time.Now().After(until) {
			return
		}
	}
}

// beginLocked reports that something may begin that Close waits for, and that
// ends with wg.Done. The caller holds mu.
func (d *Driver) beginLocked() bool {
	if d.closed {
		return false
	}
	d.wg.Add(1)
	return true
}

func (d *Driver) begin() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.beginLocked()
}

// closing is how long Close waits for calls under way, and once more after it
// has broken them off.
const closing = time.Second

// Close ends what goes on in the background, and the connections of a Driver
// that was opened by URL.
func (d *Driver) Close() error {
	d.mu.Lock()
	d.closed = true
	for _, l := range d.lines {
		l.stop()
	}
	for token, t := range d.expected {
		t.Stop()
		delete(d.expected, token)
	}
	d.mu.Unlock()
	d.end()
	done := make(chan struct{})
	go func() {
		d.wg.Wait()
		close(done)
	}()
	within := func() {
		t := time.NewTimer(closing)
		defer t.Stop()
		select {
		case <-done:
		case <-t.C:
		}
	}
	within()
	d.cut()
	err := d.store.Close()
	within()
	return err
}
