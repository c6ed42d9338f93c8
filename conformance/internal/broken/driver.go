package broken

import (
	"context"
	"iter"
	"time"

	"github.com/hasplock/hasp/backend"
)

// kind is the set of interfaces of a driver.
type kind int

const (
	polls  kind = iota // only a Driver
	waits              // a Waiter and an Inspector, with fences
	orders             // like waits, and keeps the order of arrival
	wakes              // like waits, but a Waker
)

// driver is a correct driver until a fault replaces some of its parts.
type driver struct {
	way     *way
	kind    kind
	shares  bool                     // obeys Claim.Shared
	typ     string                   // the type of its records: their tokens begin with it
	granted map[string]backend.Claim // what Acquire was granted, by token; for faults; the store's mu guards it

	// Parts that faults replace. The first four name keys, compare tokens, choose
	// terms and compute deadlines.
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
	renewOne call
	renew    func(ctx context.Context, cs []backend.Claim, done func(int, backend.Grant, error))
	release  call
	inspect  func(ctx context.Context, key string) (backend.Status, error)
	list     func(ctx context.Context, prefix string, timeout time.Duration) seq
	breakKey call
	quit     func(c backend.Claim)
	close    func() error
}

// call is a call of a driver for one claim. Only Acquire, Wait and the renewal of
// one hold return a grant. The claim of a Break has nothing but a key.
type call = func(ctx context.Context, c backend.Claim) (backend.Grant, error)

// seq is a list, and yield is the loop over one.
type (
	seq   = iter.Seq2[backend.Entry, error]
	yield = func(backend.Entry, error) bool
)

// command is what the store does for a call. The claim is in the store's form.
type command = func(s *store, c backend.Claim, now time.Time) (fence uint64, err error)

func newDriver(w *way, k kind) *driver {
	d := &driver{way: w, kind: k, shares: k != polls, granted: map[string]backend.Claim{}}
	d.key = func(key string) string { return key }
	d.mine = func(c backend.Claim, token string) bool { return token == c.Token }
	d.ttl = func(c backend.Claim) time.Duration { return c.TTL }
	d.deadline = func(c backend.Claim, called time.Time) time.Time { return called.Add(c.TTL - backend.Drift(c.TTL)) }
	d.traits = func() backend.Traits {
		return backend.Traits{Ordered: k == orders, Fenced: k != polls, MinHold: k != polls, Shared: d.shares, Reach: backend.Network}
	}
	d.acquire, d.wait, d.renewOne, d.renew = d.soundAcquire, d.soundWait, d.soundRenewOne, d.soundRenew
	d.release, d.inspect, d.breakKey, d.quit = d.soundRelease, d.soundInspect, d.soundBreak, d.soundQuit
	d.list, d.listen, d.watch, d.sleep = d.soundList, d.soundListen, d.soundWatch, soundSleep
	d.close = func() error { return nil }
	return d
}

// as returns d with the interfaces of its kind.
func (d *driver) as() backend.Driver {
	switch d.kind {
	case polls:
		return d
	case wakes:
		return waker{full{d}}
	}
	return waiter{full{d}}
}

// Traits returns the claimed traits.
func (d *driver) Traits() backend.Traits { return d.traits() }

// Acquire makes one attempt.
func (d *driver) Acquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	return d.acquire(ctx, c)
}

// Renew prolongs terms.
func (d *driver) Renew(ctx context.Context, cs []backend.Claim, done func(int, backend.Grant, error)) {
	d.renew(ctx, cs, done)
}

// Release ends a hold.
func (d *driver) Release(ctx context.Context, c backend.Claim) error {
	_, err := d.release(ctx, c)
	return err
}

// Close ends the driver.
func (d *driver) Close() error { return d.close() }

// full is a driver with Inspect, Break and List.
type full struct{ *driver }

// waiter and waker are drivers that also have Wait or Listen.
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

// at runs f in the store.
func (d *driver) at(ctx context.Context, f func(s *store, now time.Time)) error {
	return d.way.call(ctx, func(now time.Time) { f(d.way.store, now) })
}

// asked returns c in the form that the store gets.
func (d *driver) asked(c backend.Claim) backend.Claim {
	c.Key, c.Token, c.TTL = d.key(c.Key), d.typ+c.Token, d.ttl(c)
	c.Shared = c.Shared && d.shares
	return c
}

// send runs f in the store for c and returns its answer.
func (d *driver) send(ctx context.Context, c backend.Claim, f command) (g backend.Grant, err error) {
	called := time.Now()
	// If the reply is lost, f may have run all the same. So its answer does not count.
	lost := d.at(ctx, func(s *store, now time.Time) { g.Fence, err = f(s, d.asked(c), now) })
	if lost != nil {
		return backend.Grant{}, lost
	}
	if err == nil {
		g.Until = d.deadline(c, called)
	}
	return g, err
}

func (d *driver) soundAcquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	if c.Fenced && d.kind == polls {
		return backend.Grant{}, errUnsupported
	}
	return d.send(ctx, c, d.acquireIn)
}

// acquireIn is the command of Acquire.
func (d *driver) acquireIn(s *store, c backend.Claim, now time.Time) (fence uint64, err error) {
	if fence, err = s.acquire(c, now); err == nil {
		d.granted[c.Token] = c
	}
	return fence, err
}

// soundWait polls at once, when the key may be free, when the holder's term ends,
// and in time to keep its place.
func (d *driver) soundWait(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	if c.Fenced && d.kind == polls {
		return backend.Grant{}, errUnsupported
	}
	var last error
	well := time.Now() // when the store answered last

	for {
		// Watch before the poll: a release between the two then closes the channel.
		changed := d.watch(d.key(c.Key))
		called := time.Now()
		g, err := d.look(ctx, c)
		switch {
		case err == nil:
			return g, nil
		case definite(err):
			last, well = err, called
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

// look is one poll of a Wait. It lasts for c.Timeout at most.
func (d *driver) look(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	return d.send(ctx, c, func(s *store, c backend.Claim, now time.Time) (uint64, error) {
		return s.look(c, d.kind == orders, now)
	})
}

// await sleeps until the next poll is due.
func (d *driver) await(ctx context.Context, changed <-chan struct{}, last error) {
	sleep := 20 * time.Millisecond
	if definite(last) {
		sleep = d.sleep(retryAfter(last))
	}

	t := time.NewTimer(sleep)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	case <-changed:
		if !d.way.delivers() {
			select {
			case <-t.C:
			case <-ctx.Done():
			}
		}
	}
}

// soundWatch begins to watch a key for a Wait, and returns the function that returns its signal.
func (d *driver) soundWatch(key string) (changed func() <-chan struct{}) {
	c := d.way.store.watch(key)
	return func() <-chan struct{} { return c }
}

// soundSleep returns how long a Wait sleeps that was refused, if the term of the holder goes on
// for left. It is 0 if that is not known.
func soundSleep(left time.Duration) time.Duration {
	if left > 0 {
		return min(window/3, left)
	}
	return window / 3
}

// soundListen asks the store for nothing, so that Listen fails if the store does not answer.
// From then on a signal of the store wakes the caller. Each change of the connection does so as
// well, because a signal may have been missed.
func (d *driver) soundListen(ctx context.Context, c backend.Claim) (<-chan struct{}, func(), error) {
	changed := d.way.store.watch(d.key(c.Key))
	_, moved := d.way.now()
	if err := d.at(ctx, func(*store, time.Time) {}); err != nil {
		return nil, nil, err
	}

	wake, stop := make(chan struct{}, 1), make(chan struct{})
	go func() {
		for {
			heard := true
			select {
			case <-changed:
				changed, heard = d.way.store.watch(d.key(c.Key)), d.way.delivers()
			case <-moved:
				_, moved = d.way.now()
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

// soundQuit removes the place and the hold of a Wait that did not return a grant.
func (d *driver) soundQuit(c backend.Claim) {
	ctx, cancel := context.WithTimeout(context.Background(), c.Timeout)
	defer cancel()
	d.at(ctx, func(s *store, now time.Time) { s.quit(d.asked(c), now) })
}

func (d *driver) soundRenewOne(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	return d.send(ctx, c, d.renewIn)
}

// renewIn is the command of a renewal.
func (d *driver) renewIn(s *store, c backend.Claim, now time.Time) (uint64, error) {
	return 0, s.renew(c, func(token string) bool { return d.mine(c, token) }, now)
}

func (d *driver) soundRenew(ctx context.Context, cs []backend.Claim, done func(int, backend.Grant, error)) {
	backend.RenewEach(ctx, cs, done, d.renewOne)
}

func (d *driver) soundRelease(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	return d.send(ctx, c, d.releaseIn)
}

// releaseIn is the command of Release.
func (d *driver) releaseIn(s *store, c backend.Claim, now time.Time) (uint64, error) {
	if d.kind == polls {
		c.KeepUntil = time.Time{} // not MinHold by its Traits
	}
	if !c.KeepUntil.IsZero() {
		c.KeepUntil = now.Add(time.Until(c.KeepUntil)) // by the store's clock
	}
	return 0, s.release(c, func(token string) bool { return d.mine(c, token) }, now)
}

func (d *driver) soundInspect(ctx context.Context, key string) (st backend.Status, err error) {
	err = d.at(ctx, func(s *store, now time.Time) { st = s.inspect(d.key(key), now) })
	return st, err
}

// listPage is how many keys soundList gets by one command.
const listPage = 500

func (d *driver) soundList(ctx context.Context, prefix string, timeout time.Duration) seq {
	return func(yield yield) {
		for after, more := "", true; more; {
			within, cancel := context.WithTimeout(ctx, timeout)
			var page []backend.Entry
			err := d.at(within, func(s *store, now time.Time) { page, more = s.list(d.key(prefix), after, listPage, now) })
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

func (d *driver) soundBreak(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	return d.send(ctx, c, func(s *store, c backend.Claim, now time.Time) (uint64, error) {
		r := s.get(c.Key, now)
		r.readers, r.writer = nil, queued{}
		s.release(c, anyToken, now)
		s.signal(c.Key)
		return 0, nil
	})
}

// anyToken takes every token for the right one.
func anyToken(string) bool { return true }

// holder returns the token that holds key.
func (d *driver) holder(ctx context.Context, key string) (token string, err error) {
	err = d.record(ctx, key, func(r *record, _ time.Time) { token = r.token })
	return token, err
}

// record runs f on the record of a key.
func (d *driver) record(ctx context.Context, key string, f func(r *record, now time.Time)) error {
	return d.at(ctx, func(s *store, now time.Time) { f(s.get(d.key(key), now), now) })
}
