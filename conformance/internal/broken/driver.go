package broken

import (
	"context"
	"errors"
	"iter"
	"time"

	"github.com/hasplock/hasp/backend"
)

// kind is the set of interfaces of a driver.
type kind int

const (
	polls  kind = iota // only a Driver
	waits              // a Waiter and an Inspector, with fences
	orders             // like waits, but keeps the order of arrival
	wakes              // like waits, but a Waker instead of a Waiter
)

// driver is correct until a fault replaces some of its parts.
type driver struct {
	way     *way
	kind    kind
	shares  bool                     // obeys Claim.Shared
	typ     string                   // a prefix of the tokens in the store; see the function other
	granted map[string]backend.Claim // by token, for Acquire only; store.mu guards it

	// Faults replace these parts, many of them by the functions of spoil.go.
	key      func(key string) string
	mine     func(c backend.Claim, token string) bool
	ttl      func(c backend.Claim) time.Duration
	deadline func(c backend.Claim, called time.Time) time.Time
	traits   func() backend.Traits
	acquire  call
	wait     call
	watch    func(key string) (changed func() <-chan struct{})
	sleep    func(left time.Duration) time.Duration
	listen   func(ctx context.Context, c backend.Claim) (<-chan struct{}, func(), error)
	moved    func() <-chan struct{} // the channel is closed when the link changes
	renewOne call
	renew    func(ctx context.Context, cs []backend.Claim, done answer)
	release  call
	inspect  func(ctx context.Context, key string) (backend.Status, error)
	list     func(ctx context.Context, prefix string, timeout time.Duration) seq
	breakKey call
	quit     func(c backend.Claim)
	close    func() error
}

// call is the type of the methods of a driver that handle one claim. Only Acquire, Wait and the
// renewal of one hold return a grant. Of the claim, Break uses only the key.
type call = func(ctx context.Context, c backend.Claim) (backend.Grant, error)

// answer is the type of the function done that Renew calls.
type answer = func(i int, g backend.Grant, err error)

// seq is the result of List, and yield is the body of a loop over it.
type (
	seq   = iter.Seq2[backend.Entry, error]
	yield = func(backend.Entry, error) bool
)

func newDriver(w *way, k kind) *driver {
	d := &driver{way: w, kind: k, shares: k != polls, granted: map[string]backend.Claim{}}
	d.key = func(key string) string { return key }
	d.mine = func(c backend.Claim, token string) bool { return token == c.Token }
	d.ttl = func(c backend.Claim) time.Duration { return c.TTL }
	d.deadline = func(c backend.Claim, called time.Time) time.Time {
		return called.Add(c.TTL - backend.Drift(c.TTL))
	}

	d.traits = func() backend.Traits {
		return backend.Traits{
			Ordered: k == orders,
			Fenced:  k != polls,
			MinHold: k != polls,
			Shared:  d.shares,
			Reach:   backend.Network,
		}
	}

	d.acquire = d.soundAcquire
	d.wait = d.soundWait
	d.watch = d.soundWatch
	d.sleep = soundSleep
	d.quit = d.soundQuit
	d.listen = d.soundListen
	d.moved = func() <-chan struct{} { _, c := d.way.now(); return c }

	d.renewOne = d.sends((*command).renew)
	d.renew = d.soundRenew
	d.release = d.sends((*command).release)

	d.inspect = d.soundInspect
	d.list = d.soundList
	d.breakKey = d.sends((*command).breakKey)
	d.close = func() error { return nil }
	return d
}

// as returns d with exactly the methods that the kind of d has.
func (d *driver) as() backend.Driver {
	switch d.kind {
	case polls:
		return d
	case wakes:
		return waker{full{d}}
	}
	return waiter{full{d}}
}

func (d *driver) Traits() backend.Traits { return d.traits() }

func (d *driver) Acquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	return d.acquire(ctx, c)
}

func (d *driver) Renew(ctx context.Context, cs []backend.Claim, done answer) {
	d.renew(ctx, cs, done)
}

func (d *driver) Release(ctx context.Context, c backend.Claim) error {
	_, err := d.release(ctx, c)
	return err
}

func (d *driver) Close() error { return d.close() }

// full is an Inspector and a Lister.
type full struct{ *driver }

// waiter is also a Waiter, and waker is also a Waker.
type (
	waiter struct{ full }
	waker  struct{ full }
)

func (w waiter) Wait(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	return w.wait(ctx, c)
}

func (w waker) Listen(ctx context.Context, c backend.Claim) (<-chan struct{}, func(), error) {
	return w.listen(ctx, c)
}

func (w full) Inspect(ctx context.Context, key string) (backend.Status, error) {
	return w.inspect(ctx, key)
}

func (w full) List(ctx context.Context, prefix string, timeout time.Duration) seq {
	return w.list(ctx, prefix, timeout)
}

func (w full) Break(ctx context.Context, key string) error {
	_, err := w.breakKey(ctx, backend.Claim{Key: key})
	return err
}

// command returns the command that the store receives for c.
func (d *driver) command(c backend.Claim, now time.Time) *command {
	c.TTL = d.ttl(c)
	c.Key = d.key(c.Key)
	c.Token = d.typ + c.Token
	c.Shared = c.Shared && d.shares
	if d.kind == polls {
		c.KeepUntil = time.Time{} // its Traits do not claim MinHold
	}

	s := d.way.store
	return &command{s, d, c, s.get(c.Key, now), now}
}

// visit runs f in the store.
func (d *driver) visit(ctx context.Context, c backend.Claim, f func(x *command)) error {
	return d.way.call(ctx, func(now time.Time) { f(d.command(c, now)) })
}

// send runs f in the store and returns the answer of f as a grant.
func (d *driver) send(ctx context.Context, c backend.Claim, f effect) (g backend.Grant, err error) {
	called := time.Now()
	// If the reply is lost, drop the answer of f.
	if lost := d.visit(ctx, c, func(x *command) { g.Fence, err = f(x) }); lost != nil {
		return backend.Grant{}, lost
	}
	if err == nil {
		g.Until = d.deadline(c, called)
	}
	return g, err
}

// sends returns a call that runs f in the store.
func (d *driver) sends(f effect) call {
	return func(ctx context.Context, c backend.Claim) (backend.Grant, error) {
		return d.send(ctx, c, f)
	}
}

func (d *driver) soundAcquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	if c.Fenced && d.kind == polls {
		return backend.Grant{}, errors.ErrUnsupported
	}
	return d.send(ctx, c, (*command).acquire)
}

// soundWait polls at once. It polls again when the key may be free, when the holder's term ends,
// and before the waiter's place in the queue expires.
func (d *driver) soundWait(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	var last error
	well := time.Now() // the time of the store's last answer

	for {
		// Watch before the poll, so that a release after the poll closes the channel.
		changed := d.watch(d.key(c.Key))
		called := time.Now()
		g, err := d.look(ctx, c)
		switch {
		case err == nil:
			return g, nil
		case definite(err):
			last = err
			well = called
		case ctx.Err() == nil && time.Since(well) >= c.Timeout:
			d.quit(c)
			return backend.Grant{}, err
		case ctx.Err() == nil:
			last = err
		}

		if ctx.Err() == nil {
			d.await(ctx, changed(), last)
		}

		if ctx.Err() != nil {
			d.quit(c)
			if last == nil {
				last = ctx.Err()
			}

			return backend.Grant{}, last
		}
	}
}

// look makes one poll, for c.Timeout at most.
func (d *driver) look(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	return d.send(ctx, c, (*command).look)
}

// await sleeps until the next poll is due.
func (d *driver) await(ctx context.Context, changed <-chan struct{}, last error) {
	sleep := 20 * time.Millisecond
	if definite(last) {
		sleep = d.sleep(retryAfter(last))
	}

	ctx, cancel := context.WithTimeout(ctx, sleep)
	defer cancel()
	select {
	case <-ctx.Done():
	case <-changed:
		if !d.way.delivers() {
			<-ctx.Done()
		}
	}
}

// soundWatch begins to watch a key for a Wait. The function changed returns a channel that is
// closed when the key may be free.
func (d *driver) soundWatch(key string) (changed func() <-chan struct{}) {
	c := d.way.store.watch(key)
	return func() <-chan struct{} { return c }
}

// soundSleep returns how long a refused Wait sleeps. The argument left is how long the holder's
// term still runs, or 0 if that is not known.
func soundSleep(left time.Duration) time.Duration {
	if left > 0 {
		return min(window/3, left)
	}
	return window / 3
}

// soundListen first sends a command that does nothing, so that Listen fails if the store does not
// answer. Later, a signal of the store wakes the caller. A change of the connection also wakes the
// caller, because a signal may have been lost.
func (d *driver) soundListen(
	ctx context.Context, c backend.Claim,
) (<-chan struct{}, func(), error) {
	changed := d.way.store.watch(d.key(c.Key))
	moved := d.moved()
	if _, err := d.send(ctx, c, doNothing); err != nil {
		return nil, nil, err
	}

	wake := make(chan struct{}, 1)
	stop := make(chan struct{})
	go func() {
		for {
			heard := true
			select {
			case <-changed:
				changed = d.way.store.watch(d.key(c.Key))
				heard = d.way.delivers()
			case <-moved:
				moved = d.moved()
			case <-stop:
				return
			case <-d.way.store.ended.Done():
				return
			}
			if heard {
				select {
				case wake <- struct{}{}:
				default:
				}
			}
		}
	}()
	return wake, func() { close(stop) }, nil
}

// soundQuit removes the place in the queue and the hold of a Wait that failed.
func (d *driver) soundQuit(c backend.Claim) {
	ctx, cancel := context.WithTimeout(context.Background(), c.Timeout)
	defer cancel()
	d.visit(ctx, c, (*command).quit)
}

func (d *driver) soundRenew(ctx context.Context, cs []backend.Claim, done answer) {
	backend.RenewEach(ctx, cs, done, d.renewOne)
}

func (d *driver) soundInspect(ctx context.Context, key string) (st backend.Status, err error) {
	err = d.visit(ctx, backend.Claim{Key: key}, func(x *command) { st = x.inspect(x.c.Key, x.now) })
	return st, err
}

// listPage is how many keys one command of soundList fetches.
const listPage = 500

func (d *driver) soundList(ctx context.Context, prefix string, timeout time.Duration) seq {
	return func(yield yield) {
		for after, more := "", true; more; {
			within, cancel := context.WithTimeout(ctx, timeout)
			var page []backend.Entry
			err := d.visit(within, backend.Claim{Key: prefix}, func(x *command) {
				page, more = x.list(x.c.Key, after, listPage, x.now)
			})

			cancel()
			if err != nil {
				yield(backend.Entry{}, err)
				return
			}

			for _, e := range page {
				after = e.Key
				if !yield(e, nil) {
					return
				}
			}
		}
	}
}
