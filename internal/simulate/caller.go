package main

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

// client is one hasp.Client of a world.
type client struct {
	*hasp.Client
	w       *world
	name    string
	link    link
	timeout time.Duration
	waits   bool         // its driver is a Waiter
	long    bool         // its callers may ask for long terms
	slowest atomic.Int64 // answer to an attempt so far
}

// patience returns the longest time that the Client may give to an attempt whose
// wait is over: four round trips, but 50 ms at least and Timeout at most.
func (c *client) patience() time.Duration {
	return min(max(4*time.Duration(c.slowest.Load()), 50*time.Millisecond), c.timeout)
}

// timed is a driver that measures its Client's attempts.
type timed struct {
	backend.Inspector
	slowest *atomic.Int64
}

func (t timed) Acquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	began := time.Now()
	g, err := t.Inspector.Acquire(ctx, c)
	if err == nil || errors.Is(err, hasp.ErrHeld) {
		d := int64(time.Since(began))
		for old := t.slowest.Load(); d > old && !t.slowest.CompareAndSwap(old, d); old = t.slowest.Load() {
		}
	}
	return g, err
}

// timedWaiter is a timed driver that is a Waiter.
type timedWaiter struct {
	timed
	waiter backend.Waiter
}

func (t timedWaiter) Wait(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	return t.waiter.Wait(ctx, c)
}

// Lock counts the call, also those that Do and LockAll make.
func (c *client) Lock(ctx context.Context, key string, opts ...hasp.Option) (*hasp.Lease, error) {
	defer c.w.book.called(c.name, key)()
	l, err := c.Client.Lock(ctx, key, opts...)
	if err == nil {
		c.w.book.has(c.name, l)
	}
	return l, err
}

// TryLock counts the call.
func (c *client) TryLock(ctx context.Context, key string, opts ...hasp.Option) (*hasp.Lease, error) {
	defer c.w.book.called(c.name, key)()
	l, err := c.Client.TryLock(ctx, key, opts...)
	if err == nil {
		c.w.book.has(c.name, l)
	}
	return l, err
}

// caller is a goroutine that uses a Client as its seed says.
type caller struct {
	w *world
	c *client
	r *rand.Rand
}

func (a *caller) chance(of int) bool { return a.r.IntN(of) == 0 }

func (a *caller) upTo(d time.Duration) time.Duration { return time.Duration(a.r.Int64N(int64(d))) }

func (a *caller) nap(d time.Duration) { time.Sleep(a.upTo(d)) }

// run makes some rounds of whatever users do.
func (a *caller) run() {
	for range 4 + a.r.IntN(10) {
		switch a.r.IntN(14) {
		case 0:
			a.all()
		case 1:
			a.do()
		case 2:
			a.nested()
		case 3:
			a.short()
		case 4:
			a.odd()
		case 5:
			a.breaks()
		case 6:
			a.polls()
		case 7:
			a.robbed()
		default:
			a.lock()
		}
		if a.chance(3) {
			a.nap(50 * time.Millisecond)
		}
	}
}

// bounds is the context and the options of one call, and until when it must
// have returned.
type bounds struct {
	ctx    context.Context
	cancel context.CancelFunc
	opts   []hasp.Option
	end    time.Time // of the wait
	within bool      // WithMaxWait ends the wait, and not ctx
	long   bool      // the term is long
}

const (
	late  = 50 * time.Millisecond // after the end of its context, a call returns within this time
	grace = 10 * time.Millisecond // after the end of a command's time, its call returns within this time
)

// due returns when a call must have returned.
func (a *caller) due(b bounds) time.Time {
	if b.within {
		// The last attempt may begin at the end of the wait.
		return b.end.Add(a.c.patience() + grace)
	}
	return b.end.Add(late)
}

// bounds draws the limits of a call. Every call has one, so that a caller who is
// stuck is seen.
func (a *caller) bounds() bounds {
	b, wait := bounds{}, 10*time.Millisecond+a.upTo(2*time.Second)
	switch a.r.IntN(4) {
	case 0: // a deadline
		b.ctx, b.cancel = context.WithTimeout(context.Background(), wait)
	case 1: // cancelled on the way
		b.ctx, b.cancel = context.WithCancel(context.Background())
		time.AfterFunc(wait, b.cancel)
	case 2: // WithMaxWait
		b.ctx, b.cancel = context.WithCancel(context.Background())
		b.opts, b.within = append(b.opts, hasp.WithMaxWait(wait)), true
	default: // the end of the world
		wait = time.Minute
		b.ctx, b.cancel = context.WithTimeout(context.Background(), wait)
	}
	b.end = time.Now().Add(wait)
	term := hasp.MinTTL + a.upTo(400*time.Millisecond)
	often := 5
	if a.w.breaks {
		often = 2 // what is left of a broken hold is seen only if its term is long
	}
	if a.c.long && a.chance(often) {
		term, b.long = longTerm, true
		b.opts = append(b.opts, hasp.WithTTL(term))
	}
	for _, o := range []hasp.Option{
		hasp.WithFence(), hasp.WithoutRenewal(),
		hasp.WithTTL(term),
		hasp.WithMaxHold(time.Millisecond + a.upTo(500*time.Millisecond)),
	} {
		if a.chance(5) {
			b.opts = append(b.opts, o)
		}
	}
	return b
}

// try limits b to one attempt.
func (b *bounds) try(c *client) {
	if end := time.Now().Add(c.timeout); b.within || end.Before(b.end) {
		b.end, b.within = end, false
	}
}

// took checks how a call came out that began as start says, and reports whether
// it has the key.
func (a *caller) took(what string, b bounds, start start, err error) bool {
	began := start.at
	if d := time.Since(a.due(b)); d > 0 {
		a.w.book.errorf("%s by %s returned %v late: %v", what, a.c.name, d, err)
	}
	switch {
	case err == nil:
		return true
	case errors.Is(err, hasp.ErrInvalid), errors.Is(err, errors.ErrUnsupported), errors.Is(err, hasp.ErrLost), errors.Is(err, hasp.ErrReleased):
		a.w.book.errorf("%s by %s: %v", what, a.c.name, err)
	case errors.Is(err, hasp.ErrHeld) && !start.here:
		// A Client may say on its own that it still has the key, or that another
		// caller of it came first, if the call ends too early for an answer. It may
		// repeat the answer that this other caller got a Timeout ago. If that caller
		// is in a driver's Wait, the answer may be older: a Wait polls the store, and
		// ends when polls were not answered for a Timeout.
		var held *backend.HeldError
		own := errors.As(err, &held) && held.Owner == a.c.name
		enough := max(a.c.timeout/3, 100*time.Millisecond) + late
		d, since := time.Since(began), began
		if start.others {
			since = began.Add(-a.c.timeout - 2*late)
			if a.c.waits {
				since = since.Add(-poll - a.c.timeout)
			}
		}
		if !own && (d > enough || !start.others) && a.w.unheard(a.c, since) {
			a.w.book.errorf("%s by %s, which the store did not answer for %v: %v", what, a.c.name, d, err)
		}
	}
	return false
}

// start is when a call began, and whether its Client had one of its keys lately,
// or other callers who asked for one.
type start struct {
	at           time.Time
	here, others bool
}

func (a *caller) start(keys ...string) start {
	s := start{at: time.Now()}
	for _, k := range keys {
		s.here = s.here || a.w.book.held(a.c.name, k, 2*a.c.timeout)
		s.others = s.others || a.w.book.asked(a.c.name, k)
	}
	return s
}

// lock is a Lock or a TryLock, and what a holder does.
func (a *caller) lock() {
	b := a.bounds()
	defer b.cancel()
	key := a.key()
	start := a.start(key)
	var l *hasp.Lease
	var err error
	if a.chance(4) {
		b.try(a.c)
		l, err = a.c.TryLock(b.ctx, key, b.opts...)
	} else {
		l, err = a.c.Lock(b.ctx, key, b.opts...)
	}
	if !a.took("lock", b, start, err) {
		return
	}
	group := a.w.book.took(l, 0, start.at)
	leases := []*hasp.Lease{l}
	for range a.r.IntN(6) {
		switch a.r.IntN(7) {
		case 0: // re-entry
			began := time.Now()
			x, err := a.c.Lock(l.Context(), l.Key(), hasp.WithTTL(hasp.MinTTL+a.upTo(400*time.Millisecond)))
			if err == nil && l.Err() == nil {
				a.w.book.took(x, group, began)
			}
			if err == nil {
				leases = append(leases, x)
			}
		case 1:
			ttl := hasp.MinTTL + a.upTo(300*time.Millisecond)
			if a.c.long && a.chance(3) {
				ttl, b.long = longTerm, true
			}
			_ = l.Extend(b.ctx, ttl)
		case 2:
			a.nap(300 * time.Millisecond)
		case 3:
			a.nap(5 * time.Millisecond)
		case 4:
			a.w.book.look()
		case 5: // another key under this one
			inner, cancel := context.WithTimeout(l.Context(), a.upTo(200*time.Millisecond))
			began := time.Now()
			if x, err := a.c.Lock(inner, a.key()); err == nil {
				if x.Key() != l.Key() {
					a.w.book.took(x, 0, began)
				}
				leases = append(leases, x)
			}
			defer cancel()
		case 6:
			_, _ = a.c.Inspect(b.ctx, l.Key())
		}
	}
	if a.chance(4) {
		b.cancel()
	}
	if !b.long && a.chance(20) {
		return // never unlocked: the term ends it
	}
	if a.chance(2) {
		a.r.Shuffle(len(leases), func(i, j int) { leases[i], leases[j] = leases[j], leases[i] })
	}
	for i := len(leases) - 1; i >= 0; i-- {
		a.unlock(b.ctx, leases[i])
	}
}

// unlock unlocks once or more often, at once or one after the other.
func (a *caller) unlock(ctx context.Context, l *hasp.Lease) {
	began := time.Now()
	if a.chance(10) {
		done := make(chan struct{})
		go func() {
			defer close(done)
			_ = l.Unlock(ctx)
		}()
		defer func() { <-done }()
	}
	err := l.Unlock(ctx)
	if a.chance(10) {
		err = l.Unlock(ctx)
	}
	if d := time.Since(began); d > 3*a.c.timeout+late {
		a.w.book.errorf("Unlock took %v: %v", d, err)
	}
	if l.Err() == nil {
		a.w.book.errorf("a lease is trusted after Unlock: %v", err)
	}
}

// all is LockAll.
func (a *caller) all() {
	b := a.bounds()
	defer b.cancel()
	keys := []string{a.key(), a.key(), a.key()}
	start := a.start(keys...)
	ls, err := hasp.LockAll(b.ctx, a.c, keys, b.opts...)
	if err != nil && errors.Is(err, hasp.ErrLost) {
		return // a lease that was had first, while it waited for the next
	}
	b.end = b.end.Add(2 * a.c.timeout) // LockAll unlocks the leases that it has
	if b.within {
		b.end = b.end.Add(2 * a.c.timeout) // after the wait, it still locks keys that are free
	}
	if !a.took("LockAll", b, start, err) {
		return
	}
	for _, l := range ls.All() {
		a.w.book.took(l, 0, start.at)
	}
	a.nap(100 * time.Millisecond)
	_ = ls.Unlock(b.ctx)
}

// do is Do, with an fn that may fail, panic or unlock.
func (a *caller) do() {
	b := a.bounds()
	defer b.cancel()
	entered, began := false, time.Now()
	defer func() { _ = recover() }()
	err := hasp.Do(b.ctx, a.c, a.key(), func(ctx context.Context, l *hasp.Lease) error {
		entered = true
		a.w.book.took(l, 0, began)
		a.nap(200 * time.Millisecond)
		switch a.r.IntN(5) {
		case 0:
			panic("fn")
		case 1:
			return l.Unlock(ctx)
		case 2:
			return errors.New("fn")
		}
		return nil
	}, b.opts...)
	if entered && errors.Is(err, hasp.ErrReleased) {
		a.w.book.errorf("Do: %v", err)
	}
}

// nested re-enters deeply and is cancelled. What that costs is counted rather
// than timed: the time of a bubble stands still while a goroutine computes.
func (a *caller) nested() {
	base, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	var leases []*hasp.Lease
	var asked atomic.Int64
	var ctx context.Context = counted{base, &asked}
	group, key := 0, a.key()
	for range 2 + a.r.IntN(9) { // one more takes a computer twice the time, if each asks the next one twice
		began := time.Now()
		l, err := a.c.Lock(ctx, key)
		if err != nil {
			break
		}
		if len(leases) == 0 || leases[0].Err() == nil {
			group = a.w.book.took(l, group, began)
		}
		leases = append(leases, l)
		ctx = counted{l.Context(), &asked}
	}
	if a.chance(2) {
		a.nap(300 * time.Millisecond) // renewals ask the contexts, too
	}
	asked.Store(0)
	cancel()
	if base.Err() != nil && ctx.Err() == nil {
		a.w.book.errorf("an inner context goes on after the outermost has ended")
	}
	<-ctx.Done()
	if n, most := asked.Load(), int64(16*(len(leases)+1)); n > most {
		a.w.book.errorf("the end of a context under %d leases took %d calls, want at most %d", len(leases), n, most)
	}
	for i := len(leases) - 1; i >= 0; i-- {
		_ = leases[i].Unlock(base)
	}
}

// counted is a context that counts the calls of its methods but Value.
type counted struct {
	context.Context
	calls *atomic.Int64
}

func (c counted) Err() error {
	c.calls.Add(1)
	return c.Context.Err()
}

func (c counted) Done() <-chan struct{} {
	c.calls.Add(1)
	return c.Context.Done()
}

func (c counted) Deadline() (time.Time, bool) {
	c.calls.Add(1)
	return c.Context.Deadline()
}

// breaks is a program that frees a key, whoever holds it, as hasp break does. It
// may not reach one of the servers.
func (a *caller) breaks() {
	if !a.w.breaks {
		return
	}
	c := a.w.client(a.r)
	if link, ok := c.link.(*wires); ok && a.chance(2) {
		link.proxies[a.r.IntN(len(link.proxies))].Down()
	}
	key := a.key()
	a.w.book.broke(key, time.Now().Add(time.Hour))
	_ = c.Break(context.Background(), key)
	a.w.close(c)
}

// robbed is a caller whose key is removed from a majority of the servers. Its next
// renewal is refused. The rest of its hold would block the key for a minute.
func (a *caller) robbed() {
	s, ok := a.w.store.(*servers)
	if !ok || !a.c.long {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), a.upTo(2*time.Second))
	defer cancel()
	key, began := a.key(), time.Now()
	l, err := a.c.Lock(ctx, key, hasp.WithTTL(longTerm))
	if err != nil {
		return
	}
	a.w.book.took(l, 0, began)

	a.w.book.broke(key, time.Now().Add(1))
	for _, i := range a.r.Perm(len(s.nodes))[:len(s.nodes)/2+1] {
		s.remove(s.nodes[i], key)
	}
	a.nap(longTerm / 2) // the renewal comes after a third of the term
	a.unlock(context.Background(), l)
}

// polls is a program with a Client of its own that tries for a key now and then.
func (a *caller) polls() {
	c := a.w.client(a.r)
	p := caller{w: a.w, c: c, r: a.r}
	key := a.key()
	for range 5 + a.r.IntN(20) {
		start := p.start(key)
		l, err := c.TryLock(context.Background(), key)
		if p.took("a poll", bounds{end: start.at.Add(c.timeout)}, start, err) {
			a.w.book.took(l, 0, start.at)
			p.nap(10 * time.Millisecond)
			_ = l.Unlock(context.Background())
		}
		p.nap(300 * time.Millisecond)
	}
	a.w.close(c)
}

// short is a program that opens a Client for one lock, as hasp run does. When
// its Client is closed, its hold must be gone.
func (a *caller) short() {
	c := a.w.client(a.r)
	b := caller{w: a.w, c: c, r: a.r}.drawn()
	defer b.cancel()
	began := time.Now()
	if l, err := c.Lock(b.ctx, a.key(), b.opts...); err == nil {
		a.w.book.took(l, 0, began)
		a.nap(20 * time.Millisecond)
		_ = l.Unlock(b.ctx)
	}
	a.w.close(c)
}

func (a caller) drawn() bounds { return a.bounds() }

// odd makes calls that must fail at once.
func (a *caller) odd() {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	if _, err := a.c.Lock(ctx, ""); !errors.Is(err, hasp.ErrInvalid) {
		a.w.book.errorf("an empty key: %v", err)
	}
	cancel()
	began := time.Now()
	if _, err := a.c.Lock(ctx, a.key()); !errors.Is(err, context.Canceled) || time.Since(began) > late {
		a.w.book.errorf("a context that has ended: %v after %v", err, time.Since(began))
	}
}

func (a *caller) key() string { return key(a.r.IntN(keyCount)) }
