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

// leftovers asks for long terms, so that the store does not expire leftovers before they are
// counted.
func leftovers(e *env) {
	before := e.entries()
	c := e.newClient()
	b := e.open()
	held := b.hold(e.long)

	// Each caller gives up at another moment. Two thirds of the callers want the held key, and the
	// others want free keys.
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
	e.sleep(e.timeout)
	must(e.nothingSince(before))
}

// giveUp begins a Wait for a held key, cancels it, and cleans up. A late command may take the key
// after the first release, so the method abandon makes a second one.
func (e *env) giveUp(d *driver, key string) {
	if e.waiter {
		w := e.queue(key, 1, d, d)[0]
		err := w.cancel()
		_ = d.release(w.c) // as the engine does, because the place may still be in the queue
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

// leftoversExpired takes holds of several kinds, and releases none of the exclusive ones.
func leftoversExpired(e *env) {
	before := e.entries()
	d := e.open()
	d.take(e.fencedIfCan(e.claim(e.term)))
	if e.waiter {
		held := d.hold(e.long)
		w := d.want(e.claimOf(held.Key, e.term))
		e.queued(d, held.Key, 1)
		d.give(held)

		// This may fail on a slow machine, if the hold expires before the driver confirms the hold.
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

// leaveShared lets shared holds end in several ways, after callers that waited for them gave up.
func (e *env) leaveShared(d *driver) {
	d.join(e.key(), e.term)

	one := d.join(e.key(), e.long)
	two := e.fencedIfCan(shared(e.claim(e.term)))
	two.Key = one.Key
	d.take(two)

	// This caller asks once and dies.
	held := d.join(e.key(), e.long)
	must(d.refuses(waiting(e.claimOf(held.Key, e.long))))
	d.give(held)

	e.giveUp(d, one.Key)
	d.give(one)

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
		n, err := e.h.Commands(e.ctx, e.store)
		hooked(err)
		return n
	}

	// Subtract the calls that Commands itself makes.
	first := count()
	own := count() - first
	began := time.Now()
	before := count()
	for i := range n {
		f(i)
	}

	got := count() - before - own

	// Allow for calls that keep connections alive.
	spare := 2 + 2*time.Since(began).Seconds() + 0.05*float64(n)*each
	requireInTime(float64(got) <= float64(n)*each+spare,
		"%d × %s: %d calls to the store, want %g", n, what, got, float64(n)*each)
}

func commandsPerOperation(e *env) {
	const n = 40
	d := e.open()
	c := e.newClient()
	cost := e.h.Cost
	// To load scripts.
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
		const kept = n / 2
		e.costs("Release with KeepUntil", kept, cost.Keep, func(i int) {
			d.give(keptFor(cs[i], e.term))
		})

		cs = cs[kept:]
	}

	e.costs("Release", len(cs), cost.Release, func(i int) { d.give(cs[i]) })

	must(e.lockOnce(c, e.key()))
	e.costs("Lock and Unlock", n, cost.Acquire+cost.Release, func(int) {
		must(e.lockOnce(c, e.key()))
	})
}

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
