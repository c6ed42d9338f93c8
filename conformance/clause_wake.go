package conformance

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

var wakeClauses = given(wakes, []clause{
	{name: "wake-change", optional: true, says: saysWakes, check: pair(wakeChange),
		why: "A caller that listens and was refused is woken by a release, a Break, and a release with KeepUntil."},
	{name: "wake-shared", need: shares, optional: true, says: saysWakes, check: pairOn(wakeShared),
		why: "The release of the last shared hold wakes a caller that listens and was refused."},
	{name: "wake-writer-leaves", need: shares, says: saysReaped, check: pairOn(wakeWriterLeaves),
		why: "If a caller that shared holds have refused several times gives up, the release of " +
			"its last claim lets new shared claims in."},
	{name: "wake-missed", need: link, optional: true, says: saysMissed, check: wakeMissed,
		why: "If the link fails, and a release may have been missed, the caller is woken, or its channel is closed."},
	{name: "wake-down", need: link, says: saysCannotListen, check: wakeDown,
		why: "A Listen over a link that fails returns an error, or the caller is woken when the link works again."},
})

// listener is a caller that listens for changes of a key.
type listener struct {
	d    *driver
	key  string
	wake <-chan struct{}
}

// listen calls Listen for key, with a context that ends after patience. The end of the try stops
// the listening.
func (d *driver) listen(key string, patience time.Duration) (*listener, error) {
	ctx, cancel := context.WithTimeout(d.e.ctx, patience)
	defer cancel()
	l := &listener{d: d, key: key}
	err := d.e.within("Listen", func() error {
		wake, stop, err := d.Driver.(backend.Waker).Listen(ctx, d.e.claimOf(key, d.e.long))
		if err == nil {
			d.e.onEnd(stop)
			l.wake = wake
		}

		return err
	})
	return l, err
}

// listens begins to listen for a key that is held, and makes an attempt, as the engine does. A
// driver need wake only callers that were refused.
func (d *driver) listens(key string) *listener {
	l, err := d.listen(key, d.e.patience)
	mustf(err, "listen for %.60q", key)
	l.refused()
	return l
}

// refused makes an attempt, which must be refused. It then drops a signal that has already come, so
// that the next signal is about a later change.
func (l *listener) refused() {
	must(l.d.refuses(waiting(l.d.e.claimOf(l.key, l.d.e.long))))
	select {
	case <-l.wake:
	default:
	}
}

// woken ends the try unless the caller is woken, or the caller's channel is closed. It reports
// whether the channel is open. A slow machine may cause a failure, because a driver may wake only
// callers whose last attempt is recent.
func (l *listener) woken(what string) (open bool) {
	t := time.NewTimer(l.d.e.patience)
	defer t.Stop()
	select {
	case _, open = <-l.wake:
	case <-t.C:
		requireInTime(false, "%s wakes no caller that listens", what)
	}
	return open
}

// wakeChange frees a key in each way that the driver has. A caller that listens must be woken each
// time.
func wakeChange(e *env, a, b *driver) {
	ways := []string{"a release"}
	if e.inspector {
		ways = append(ways, "a Break")
	}

	if e.traits.MinHold {
		ways = append(ways, "a release with KeepUntil")
	}

	for _, way := range ways {
		c := a.hold(e.long)
		l := b.listens(c.Key)
		switch way {
		case "a Break":
			a.breakKey(c.Key)
		case "a release with KeepUntil":
			c.KeepUntil = time.Now().Add(e.long / 2)
			a.give(c)
		default:
			a.give(c)
		}

		requireInTime(l.woken(way), "the driver stops listening, although the link works")
	}
}

// wakeShared releases two shared holds of a key one after the other. The second release must wake a
// caller that listens.
func wakeShared(e *env, a, b *driver, key string) {
	one := a.join(key, e.long)
	two := b.join(key, e.long)
	l := b.listens(key)
	a.give(one)
	l.refused() // the first release may wake the caller, but the key is still held
	b.give(two)
	l.woken("the release of the last shared hold")
}

// wakeWriterLeaves lets a caller give up while a shared hold refuses it. While that caller asks
// again, the driver may refuse new shared claims.
func wakeWriterLeaves(e *env, a, b *driver, key string) {
	a.join(key, e.long)
	var last backend.Claim
	for range 3 {
		last = waiting(e.claimOf(key, e.long))
		must(b.refuses(last))
	}
	must(is("release by a caller that was refused", b.release(last), backend.ErrLost))
	a.join(key, e.long)
}

// wakeMissed releases a key while the link is Down or Deaf, so that the caller misses the message.
// The caller must be woken when the link is Up again.
func wakeMissed(e *env) {
	l := e.cable()
	d := e.openAt(l.Store)
	b := e.open()
	for i, state := range []LinkState{Down, Deaf} {
		e.recovers(d)
		c := b.hold(e.long)
		if i > 0 {
			// After the link has failed in the first round, Listen may fail for a while.
			e.retry("Listen", func() error { return errOf(d.listen(c.Key, e.patience)) })
		}

		caller := d.listens(c.Key)
		l.Set(state)
		b.give(c)
		e.sleep(e.term / 8) // so that the message about the release is lost
		l.Set(Up)
		caller.woken(fmt.Sprintf("a release while the link is %v", state))
	}
}

// wakeDown calls Listen over a link that fails. If Listen returns no error, the caller relies on
// it, and must be woken by a release.
func wakeDown(e *env) {
	l := e.cable()
	d := e.openAt(l.Store)
	b := e.open()
	for _, state := range []LinkState{Down, Hung} {
		e.recovers(d)
		c := b.hold(e.long)
		l.Set(state)
		caller, err := d.listen(c.Key, e.term)
		l.Set(Up)
		e.recovers(d)
		if err != nil {
			must(unknown(fmt.Sprintf("Listen over a link that is %v", state), err))
			continue
		}

		caller.refused()
		b.give(c)
		caller.woken(fmt.Sprintf("a release after a Listen while the link was %v", state))
	}
}

// wait blocks until c has its key. If d is a Waiter, wait calls Wait. If d is a Waker, wait creates
// a Client and calls Lock. In this way the clauses about Wait also check Wakers.
func wait(ctx context.Context, d backend.Driver, c backend.Claim) (backend.Grant, error) {
	if w, ok := d.(backend.Waiter); ok {
		return w.Wait(ctx, c)
	}

	waker, ok := d.(backend.Waker)
	if !ok {
		return backend.Grant{}, errors.New("the Traits have Ordered, but the driver is no Waiter")
	}
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	w := &loan{Waker: waker, c: c, end: end}
	client, err := hasp.New(w, &hasp.Options{Owner: c.Owner, TTL: c.TTL, Timeout: c.Timeout})
	if err != nil {
		return backend.Grant{}, err
	}
	defer func() { go client.Close() }() // Close waits for calls that hang

	opts := []hasp.Option{hasp.WithoutRenewal()} // the clause itself renews the hold
	if c.Fenced {
		opts = append(opts, hasp.WithFence())
	}

	if c.Shared {
		opts = append(opts, hasp.WithShared())
	}

	lease, err := client.Lock(ctx, c.Key, opts...)
	if err != nil {
		// If the method Acquire of loan has ended ctx, return the error of that attempt.
		var outcome *unknownOutcome
		if errors.As(context.Cause(ctx), &outcome) {
			err = outcome.error
		}

		return backend.Grant{}, err
	}

	g := w.grant
	g.Until = lease.Expires()

	// Unlock ends the lease of the Client. The hold in the store stays, because given is set.
	w.given.Store(true)
	_ = lease.Unlock(ctx)
	return g, nil
}

// loan is a driver between a Client and a Waker. All attempts of the Client use the token of the
// field c. As in a Wait, an attempt of unknown outcome ends the wait.
type loan struct {
	backend.Waker
	c     backend.Claim
	end   context.CancelCauseFunc
	grant backend.Grant // the grant of the last attempt
	given atomic.Bool   // the hold belongs to the clause, so the Client must not release it
}

// unknownOutcome is the cause of the end of a wait's context, if an attempt has ended the wait.
type unknownOutcome struct{ error }

// Acquire makes an attempt with the token of the field c, whatever token the Client has drawn. An
// error of unknown outcome ends the wait.
func (w *loan) Acquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	c.Token = w.c.Token
	g, err := w.Waker.Acquire(ctx, c)
	if err != nil && !definite(err) {
		// End the wait, also if the Client has ended only this attempt. Otherwise the Client would
		// make another attempt. The Client's release of this attempt could remove the hold of the
		// next one, which has the same token. If the wait has already ended, end does nothing.
		w.end(&unknownOutcome{err})
	}

	w.grant = g
	return g, err
}

// Release releases the hold of the field c, unless that hold belongs to the clause.
func (w *loan) Release(ctx context.Context, c backend.Claim) error {
	if w.given.Load() {
		return nil
	}
	c.Token = w.c.Token
	return w.Waker.Release(ctx, c)
}

// Close leaves the driver open.
func (w *loan) Close() error { return nil }
