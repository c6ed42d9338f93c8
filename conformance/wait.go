package conformance

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hasplock/hasp/backend"
)

// wanted is a Wait in flight.
type wanted struct {
	d     *driver
	c     backend.Claim
	done  chan error
	grant backend.Grant // after done
	ended chan struct{}
	stop  context.CancelFunc
}

// wait calls Wait of a driver that is a Waiter.
func (d *driver) wait(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	g, err := d.Driver.(backend.Waiter).Wait(ctx, c)
	if err == nil {
		d.mine(c)
		d.note(c, g)
	}
	return g, err
}

// want begins a Wait for c. The channel done gets its outcome.
func (d *driver) want(c backend.Claim) *wanted {
	ctx, stop := context.WithCancel(d.e.ctx)
	w := &wanted{d: d, c: c, done: make(chan error, 1), ended: make(chan struct{}), stop: stop}

	// The end of the try stops each Wait that is registered. So that comes first.
	d.e.beforeReleases(func(end context.Context) {
		stop()
		select {
		case <-w.ended:
		case <-end.Done():
		}
	})

	go func() {
		defer close(w.ended)
		g, err := d.wait(ctx, c)
		w.grant = g
		w.done <- err
	}()
	return w
}

// wants begins a Wait for key with a long term.
func (d *driver) wants(key string) *wanted { return d.want(d.e.claimOf(key, d.e.long)) }

// granted ends the try unless the Wait gets the key.
func (w *wanted) granted(what string) { mustf(w.d.e.arrives(what, w.done), "%s", what) }

// use renews and releases the hold that the Wait got.
func (w *wanted) use() {
	w.d.keep(w.c)
	w.d.give(w.c)
}

// served ends the try unless the Wait gets the key. It uses the hold.
func (w *wanted) served(what string) {
	w.granted(what)
	w.use()
}

// servedOrUnknown is served for a Wait that an outage may have ended. It returns
// the error of such a Wait.
func (w *wanted) servedOrUnknown(what string) error {
	err := w.d.e.arrives(what, w.done)
	if err == nil {
		w.use()
		return nil
	}
	must(unknown(what, err))
	return err
}

// cancel ends a Wait for a held key and returns its error.
func (w *wanted) cancel() error {
	w.stop()
	err := w.d.e.arrives("a cancelled Wait", w.done)
	require(err != nil, "a cancelled Wait for a held key: granted")
	return err
}

// abandon does what the engine does after a Wait that returned err. If the
// outcome is unknown, it releases the claim at once, and again after its Timeout.
func (w *wanted) abandon(err error) {
	cancelled := errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
	if err == nil || definite(err) && !cancelled {
		return
	}

	_ = w.d.release(w.c)
	again := time.AfterFunc(w.c.Timeout, func() { _ = w.d.release(w.c) })
	w.d.e.onEnd(func() { again.Stop() })
}

// queued waits until n waiters for key are in the queue. If Inspect does not report
// them, it only gives them time.
func (e *env) queued(d *driver, key string, n int) {
	if !e.inspector || !e.traits.Ordered {
		e.sleep(e.term / 8)
		return
	}
	e.until(fmt.Sprintf("%d waiters in the result of Inspect", n), func() bool { return len(d.inspect(key).Waiters) >= n })
}
