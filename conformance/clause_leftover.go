package conformance

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

var leftoverClauses = alone(given(entries, []clause{
	{name: "leftovers", says: saysLeaves, check: leftovers,
		why: "After callers that hold, wait or are cancelled, the store keeps nothing, two timeouts later."},
	{name: "leftovers-close", says: saysCleansUp, check: leftoversClose,
		why: "If the Client is closed right after Unlock, the store keeps nothing, one timeout later."},
	{name: "leftovers-expired", says: saysLeaves, check: leftoversExpired,
		why: "What expired, broken and shared holds leave, and callers that waited for them, " +
			"disappears by itself, even if no caller wants the key again."},
}))

// entries returns the entries that the store has now.
func (e *env) entries() []string {
	l, err := e.h.Entries(e.ctx, e.store)
	hooked(err)
	return l
}

// nothingSince returns an error if the store has an entry that is not in the argument before.
func (e *env) nothingSince(before []string) error {
	left := slices.DeleteFunc(e.entries(), func(entry string) bool {
		return slices.Contains(before, entry)
	})
	if len(left) > 0 {
		return fmt.Errorf("the store keeps %q", left)
	}
	return nil
}

// leftovers makes calls that succeed, fail or are cancelled, and then lists the store's entries. It
// asks for long terms, so that leftovers do not expire before that.
func leftovers(e *env) {
	before := e.entries()
	c := e.newClient()
	b := e.open()
	held := b.hold(e.long)

	// Each caller gives up at another moment. Two thirds of the callers want the held key, and the
	// others want free keys. Some that were refused also ask once more.
	must(e.each(12, func(i int) {
		ctx := e.endingAfter(time.Duration(i) * e.term / 12)
		key := held.Key
		if i%3 == 0 {
			key = e.key()
		}

		if lease, err := c.Lock(ctx, key); err == nil {
			must(lease.Unlock(ctx))
		} else if i%4 == 0 {
			c.TryLock(e.ctx, held.Key)
		}
	}))

	b.give(held)
	k := e.fencedIfCan(e.claim(e.long))
	b.take(k)
	must(b.refused(k.Key))
	e.giveUp(b, k.Key)
	b.give(k)
	b.lost(k, "a hold that was released")
	must(e.lockOnce(c, k.Key))

	// After a call of unknown outcome the Client releases the token once more, one timeout later.
	// Wait for this release, because Close does not, and because this release also undoes a command
	// that arrives late.
	e.sleep(e.timeout)
	must(errors.Join(c.Close(), b.Close()))
	e.sleep(e.timeout) // a command that was in flight at Close may arrive so late
	must(e.nothingSince(before))
}

// giveUp begins a Wait for a held key, cancels it, and cleans up as the engine does. The place may
// still be in the queue, whatever error the Wait returned, so giveUp releases the token. After an
// unknown outcome a late command may take the key, so the method abandon releases the token again.
func (e *env) giveUp(d *driver, key string) {
	if e.waiter {
		w := e.queue(key, 1, d, d)[0]
		err := w.cancel()
		_ = d.release(w.c)
		w.abandon(err)
	}
}

// leftoversClose closes Clients and drivers while a command may be in flight. For example, redlock
// does not wait for the votes of all nodes.
func leftoversClose(e *env) {
	before := e.entries()
	for range 20 {
		c := e.newClient()
		d := e.open()
		must(e.lockOnce(c, e.key()))
		must(c.Close())

		d.give(d.hold(e.long))
		must(d.Close())
	}

	e.sleep(e.timeout)
	must(e.nothingSince(before))
}

// leftoversExpired takes exclusive holds that expire or are broken, and shared holds that end in
// several ways. What they leave in the store must disappear without a further call for their keys.
func leftoversExpired(e *env) {
	before := e.entries()
	d := e.open()
	d.take(e.fencedIfCan(e.claim(e.term)))
	if e.waiter {
		held := d.hold(e.long)
		w := d.want(e.claimOf(held.Key, e.term))
		e.queued(d, held.Key, 1)
		d.give(held)

		// On a slow machine the hold may expire before the Wait returns.
		mustInTime(e.arrives("Wait", w.done), "a hold by Wait for %v", e.term)
	}

	if e.inspector {
		broken := e.fencedIfCan(e.claim(e.long))
		d.take(broken)
		d.breakKey(broken.Key)
	}

	if e.traits.Shared {
		e.leaveShared(d)
	}

	d.outlast(e.term)
	e.retry("the end of what the holds have left", func() error {
		if e.h.Sweep != nil {
			hooked(e.h.Sweep(e.ctx, e.store))
		}

		return e.nothingSince(before)
	})
}

// leaveShared lets shared holds end in several ways: with and without a caller that has waited for
// the key and given up.
func (e *env) leaveShared(d *driver) {
	// This hold expires alone.
	d.join(e.key(), e.term)

	// A Wait for a key with two holds is cancelled. Then the first hold is released, and the second
	// expires.
	one := d.join(e.key(), e.long)
	two := e.fencedIfCan(shared(e.claimOf(one.Key, e.term)))
	d.take(two)
	e.giveUp(d, one.Key)
	d.give(one)

	// This hold is released after a caller has asked once and died.
	held := d.join(e.key(), e.long)
	must(d.refuses(waiting(e.claimOf(held.Key, e.long))))
	d.give(held)

	// These two holds are broken.
	if e.inspector {
		broken := d.join(e.key(), e.long)
		d.join(broken.Key, e.long)
		d.breakKey(broken.Key)
	}
}

var costClauses = alone(given(commands, []clause{
	{name: "commands-per-operation", says: saysCommands, check: commandsPerOperation,
		why: "Acquire, Renew and Release, also with a fence or KeepUntil, take as many commands " +
			"as documented, also through the engine."},
	{name: "commands-waiting", says: saysBusy, check: commandsWaiting,
		why: "Callers that wait do not keep the store busy, however many wait in one Client."},
}))

// costs calls f n times. Meanwhile the store may serve at most about n*each calls, including those
// that drivers make in the background.
func (e *env) costs(what string, n int, each float64, f func(i int)) {
	count := func() int64 {
		calls, err := e.h.Commands(e.ctx, e.store)
		hooked(err)
		return calls
	}

	// Find out how many calls Commands itself makes, to subtract these.
	first := count()
	own := count() - first
	began := time.Now()
	before := count()
	for i := range n {
		f(i)
	}

	got := count() - before - own

	// Allow for calls that keep connections alive: two, two more in each second, and 5 percent.
	spare := 2 + 2*time.Since(began).Seconds() + 0.05*float64(n)*each
	requireInTime(float64(got) <= float64(n)*each+spare,
		"%d × %s: %d calls to the store, want %g", n, what, got, float64(n)*each)
}

// commandsPerOperation compares the calls that each operation takes with Harness.Cost, for many
// holds. Half of the claims ask for a fence, if the driver has fences.
func commandsPerOperation(e *env) {
	const n = 40
	d := e.open()
	c := e.newClient()
	cost := e.h.Cost

	// These calls load scripts, so that no call for that is counted below.
	for _, warm := range []backend.Claim{e.claim(e.long), e.fencedIfCan(e.claim(e.long))} {
		d.take(warm)
		must(d.refused(warm.Key))
		d.keep(warm)
		d.give(warm)
	}

	if e.traits.MinHold {
		d.keptHold(e.long, e.term)
	}

	cs := make([]backend.Claim, n)
	for i := range cs {
		cs[i] = e.claim(e.long)
		cs[i].Fenced = e.traits.Fenced && i%2 == 0
	}

	e.costs("Acquire", n, cost.Acquire, func(i int) { d.take(cs[i]) })
	e.costs("Acquire of a held key", n, cost.Refused, func(i int) { must(d.refused(cs[i].Key)) })
	e.costs(fmt.Sprintf("Renew of %d holds", n), 1, n*cost.Renew, func(int) {
		renewAll(e.ctx, d, cs).check()
	})

	if e.traits.MinHold {
		const half = n / 2 // the other half is released without KeepUntil
		e.costs("Release with KeepUntil", half, cost.Keep, func(i int) {
			d.give(keptFor(cs[i], e.term))
		})

		cs = cs[half:]
	}

	e.costs("Release", len(cs), cost.Release, func(i int) { d.give(cs[i]) })

	must(e.lockOnce(c, e.key())) // makes the Client's connections
	e.costs("Lock and Unlock", n, cost.Acquire+cost.Release, func(int) {
		must(e.lockOnce(c, e.key()))
	})
}

// commandsWaiting compares the calls that several waiting callers of one Client take with
// Cost.Waiting, which does not depend on their number.
func commandsWaiting(e *env) {
	d := e.open()
	c := e.newClient()
	held := d.hold(e.long)

	// This Lock makes connections and loads scripts, so that no call for these is counted below.
	err := errOf(c.Lock(e.ctx, held.Key, hasp.WithMaxWait(e.term)))
	require(err != nil, "lock %.60q, which is held: granted", held.Key)

	// Besides the calls in each second, allow 2*n calls, because an ordered driver sends a call to
	// put each waiter into the queue.
	const n = 8
	ctx := e.endingAfter(2 * time.Second)
	e.costs(fmt.Sprintf("%d callers waiting for 2 s", n), 1, 2*e.h.Cost.Waiting+2*n, func(int) {
		must(e.each(n, func(int) {
			must(is("Lock of a held key until its context ends", errOf(c.Lock(ctx, held.Key)),
				context.DeadlineExceeded))
		}))
	})
}
