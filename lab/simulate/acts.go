package main

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/hasplock/hasp"
)

// lock calls Lock or TryLock, and then acts as a holder.
func (a *caller) lock() {
	b := a.bounds()
	defer b.cancel()
	key := a.key()
	if a.chance(5) {
		a.keepLonger(&b)
	} else {
		a.share(&b)
	}
	start := a.start(key)
	lock := a.c.Lock
	if a.chance(4) {
		b.try(a.c)
		lock = a.c.TryLock
	}

	l, err := lock(b.ctx, key, b.opts...)
	if !a.got("lock", b, start, err) {
		return
	}

	n := a.take(l, 0, group{start.at, b.shared})
	var kept time.Time
	if b.minHold > 0 {
		// calculated now, because calls in the context of the lease change the same grant
		kept = b.grant.at.Add(b.minHold)
	}

	leases, cancel := a.hold(&b, l, n)
	defer cancel()
	if a.chance(4) {
		b.cancel()
	}
	if !b.long && a.chance(20) {
		return // the lease is never unlocked, so it ends with its term
	}
	if a.chance(2) {
		a.r.Shuffle(len(leases), func(i, j int) { leases[i], leases[j] = leases[j], leases[i] })
	}
	released := true
	for _, l := range slices.Backward(leases) {
		released = a.unlock(b.ctx, l) && released
	}
	if b.minHold > 0 && released {
		a.keep(l.Key(), n, kept)
	}
}

// hold acts as a holder of group n. It returns l and the leases that were granted in the context of
// l. If hold detached l, it returns the resumed lease instead of l, or no leases. The function
// cancel ends the contexts of the calls that the method under made.
func (a *caller) hold(b *bounds, l *hasp.Lease, n int) (leases []*hasp.Lease, cancel func()) {
	leases = append(leases, l)
	over, cancel := context.WithCancel(context.Background())
	for range a.r.IntN(6) {
		switch a.r.IntN(8) {
		case 0: // re-entry
			if x := a.reenter(l, n, b.shared); x != nil {
				leases = append(leases, x)
			}
		case 1:
			ttl := a.term(300 * time.Millisecond)
			if a.c.long && a.chance(3) {
				ttl = LongTerm
				b.long = true
			}
			_ = l.Extend(b.ctx, ttl)
		case 2:
			a.nap(300 * time.Millisecond)
		case 3:
			a.nap(5 * time.Millisecond)
		case 4:
			a.checkAll()
		case 5:
			if x := a.under(over, l); x != nil {
				leases = append(leases, x)
			}
		case 6:
			_, _ = a.c.Inspect(b.ctx, l.Key())
		case 7:
			if b.long {
				continue
			}
			x, err := l.Detach(b.ctx, a.term(300*time.Millisecond))
			if err != nil {
				continue
			}
			a.nap(5 * time.Millisecond)
			resume := func(ctx context.Context, _ string, _ ...hasp.Option) (*hasp.Lease, error) {
				return a.c.Resume(ctx, x)
			}
			if l, err = a.c.noted(resume)(over, l.Key()); err != nil {
				b.minHold = 0 // the key is free when the term ends
				return nil, cancel
			}
			a.took(l, n, time.Time{})
			leases[0] = l
		}
	}

	return leases, cancel
}

// reenter re-enters the hold of group n, of which l is a lease. An exclusive Lock in the
// context of a shared lease must fail.
func (a *caller) reenter(l *hasp.Lease, n int, shared bool) *hasp.Lease {
	opts := []hasp.Option{hasp.WithTTL(a.term(400 * time.Millisecond))}
	invalid := shared && a.chance(2)
	if a.c.shares && !invalid && (shared || a.chance(2)) {
		opts = append(opts, hasp.WithShared())
	}
	began := time.Now()
	x, err := a.c.Lock(l.Context(), l.Key(), opts...)
	if invalid && !errors.Is(err, hasp.ErrInvalid) && l.Context().Err() == nil {
		a.errorf("an exclusive Lock under a shared lease: %v", err)
	}
	if err == nil && l.Err() == nil {
		a.took(x, n, began)
	}
	return x
}

// under locks a key in the context of l. The key need not be the key of l. The context of this call
// also ends when the context over ends.
func (a *caller) under(over context.Context, l *hasp.Lease) *hasp.Lease {
	ctx, cancel := context.WithTimeout(l.Context(), a.upTo(200*time.Millisecond))
	context.AfterFunc(over, cancel)
	began := time.Now()
	x, err := a.c.Lock(ctx, a.key())
	if err == nil && x.Key() != l.Key() {
		a.took(x, 0, began)
	}
	return x
}

// unlock unlocks a lease, and reports whether the lease is certainly released. Now and then it
// calls Unlock twice, or from two goroutines.
func (a *caller) unlock(ctx context.Context, l *hasp.Lease) bool {
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
		a.errorf("Unlock took %v: %v", d, err)
	}
	if l.Err() == nil {
		a.errorf("a lease is trusted after Unlock: %v", err)
	}
	return err == nil || errors.Is(err, hasp.ErrReleased)
}

// slotted is the name of a key with slots, and the constant slots is the number of its slots.
const (
	slotted = "slotted"
	slots   = 2
)

// slot locks one slot of a key, and sometimes re-enters the hold of this slot.
func (a *caller) slot() {
	b := a.bounds()
	defer b.cancel()
	opts := slices.Clip(append(b.opts, hasp.WithSlots(slots)))
	start := a.start(slotted)
	lock := a.c.Lock
	if a.chance(4) {
		b.try(a.c)
		// TryLock inspects the queue, and makes one attempt for each slot
		b.end = b.end.Add(slots * a.c.timeout)
		lock = a.c.TryLock
	}

	l, err := lock(b.ctx, slotted, opts...)
	if b.within {
		b.end = b.end.Add(a.c.timeout) // the last attempt asks for two slots
	}
	if !a.got("lock of a slot", b, start, err) {
		return
	}
	if l.Slot() >= slots {
		a.errorf("slot %d of %d", l.Slot(), slots)
	}

	n := a.took(l, 0, start.at)
	if a.chance(3) {
		began := time.Now()
		if x, err := a.c.Lock(l.Context(), slotted, opts...); err == nil {
			if l.Err() == nil {
				a.took(x, n, began)
			}
			defer a.unlock(b.ctx, x)
		}
	}

	if a.chance(4) {
		// This call does not re-enter. So while l is held, it can only lock the other slot.
		began := time.Now()
		if x, err := a.c.TryLock(l.Context(), slotted,
			append(opts, a.calls.apart())...); err == nil {
			a.took(x, 0, began)
			defer a.unlock(b.ctx, x)
		}
	}

	a.nap(100 * time.Millisecond)
	a.checkAll()
	if b.long || !a.chance(20) { // otherwise the lease ends with its term
		a.unlock(b.ctx, l)
	}
}

// breakKey frees a key that any caller may hold: by the caller's own Client, or by one of its own, as
// the command "hasp break" does. In half of these cases that Client cannot reach one of the servers.
// Then the holder, whose next renewal is refused, must remove the rest of its hold.
func (a *caller) breakKey() {
	if !a.breaks {
		return
	}
	c := a.c
	if a.chance(2) {
		c = a.client(a.r)
		defer a.close(c)
		if link, ok := c.link.(*wires); ok && a.chance(2) {
			link.Down(a.r)
		}
	}
	key := a.key()
	a.broke(key, time.Now().Add(time.Hour))
	_ = c.Break(context.Background(), key)
}

// robbed acts as a caller whose key is removed from the store. The next renewal is refused. If the
// Client did not remove the rest of the hold, the key would be blocked for a minute.
func (a *caller) robbed() {
	s, ok := a.Store.(Robber)
	if !ok || !a.c.long {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), a.upTo(2*time.Second))
	defer cancel()
	key := a.key()
	began := time.Now()
	l, err := a.c.Lock(ctx, key, hasp.WithTTL(LongTerm))
	if err != nil {
		return
	}
	a.took(l, 0, began)

	a.broke(key, time.Now().Add(1))
	s.Rob(a.r, key)
	a.nap(LongTerm / 2) // the renewal comes after a third of the term
	a.unlock(context.Background(), l)
}

// program acts as a program with a Client of its own: one that locks once, as "hasp run" does, or one
// that calls TryLock now and then. When the Client is closed, the hold must be gone.
func (a *caller) program() {
	p := caller{World: a.World, c: a.client(a.r), r: a.r}
	defer a.close(p.c)
	key := a.key()
	polls := a.r.IntN(2) * (5 + a.r.IntN(20))
	for range max(polls, 1) {
		b := p.bounds()
		p.share(&b)
		lock := p.c.Lock
		if polls > 0 {
			b.try(p.c)
			lock = p.c.TryLock
		}
		start := p.start(key)
		l, err := lock(b.ctx, key, b.opts...)
		if p.got("a program", b, start, err) {
			a.take(l, 0, group{start.at, b.shared})
			p.nap(20 * time.Millisecond)
			_ = l.Unlock(b.ctx)
		}
		b.cancel()
		p.nap(300 * time.Millisecond)
	}
}
