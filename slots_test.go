package hasp_test

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/memlock"
)

// Callers of several Clients use all n slots, and never more. Each caller gets slots, and the
// caller that looks for one makes few calls.
func TestSlotsAreShared(t *testing.T) {
	const n = 8
	for _, ordered := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			w := &crowd{clients: 4, callers: 64, ordered: ordered, trip: 200 * time.Microsecond, hold: 10 * time.Millisecond, lasts: 10 * time.Second,
				opts: options{hasp.WithSlots(n), hasp.WithFence()}}
			holds, _ := w.run(t, new(memlock.Store))
			if slices.Contains(w.shares, 0) {
				t.Errorf("ordered %t: a caller got no slot: %v", ordered, w.shares)
			}
			equal(t, fmt.Sprintf("ordered %t: the slots that were held", ordered), w.most, n)
			if float64(w.attempts) > 5*n*holds {
				t.Errorf("ordered %t: %d attempts for %v leases", ordered, w.attempts, holds)
			}
		})
	}
}

var (
	oneSlot  = hasp.WithSlots(1)
	twoSlots = hasp.WithSlots(2)
)

// withSlots runs a test with a Client. Another Client of the same store has taken both of two
// slots.
func withSlots(t *testing.T, o *hasp.Options, run func(t *bench, taken []*hasp.Lease), opts ...hasp.Option) {
	t.Helper()
	withTwo(t, o, func(t *bench, holder *hasp.Client) {
		var taken []*hasp.Lease
		for range 2 {
			taken = append(taken, lockNow(t, holder, "k", append(opts, twoSlots)...))
		}
		equal(t, "the sum of the slots", taken[0].Slot()+taken[1].Slot(), 1)
		defer time.Sleep(2 * time.Hour) // until calls that hang have ended
		defer func() {
			for _, l := range taken {
				l.Unlock(context.Background())
			}
			t.Client.Close()
			t.nothingLeft()
			synctest.Wait() // because the holder unlocks the queue in the background
			equal(t, "the queue is still held", await.Value(holder.Inspect(t.Context(), "k#queue")).Held, false)
		}()
		run(t, taken)
	})
}

// If another Client frees a slot, a waiting caller gets it within 100 ms. If its own Client frees a
// slot, the caller gets it immediately. While a caller waits, a TryLock of its Client gets none.
func TestFreedSlotIsTaken(t *testing.T) {
	withSlots(t, nil, func(t *bench, taken []*hasp.Lease) {
		got := make(chan *hasp.Lease)
		for range 2 {
			go func() { got <- t.lock("k", twoSlots) }()
		}
		time.Sleep(3 * time.Second)
		began := time.Now()
		unlock(t, taken[1])
		before := t.attempts()
		want(t, "TryLock", t.tryErr("k", twoSlots), hasp.ErrHeld)
		equal(t, "attempts before and after the TryLock", t.attempts(), before)
		l := <-got
		within(t, "a slot of another Client", began, 100*time.Millisecond)
		if l.Slot() != taken[1].Slot() || l.Key() != "k" {
			t.Errorf("slot %d of %q, want slot %d", l.Slot(), l.Key(), taken[1].Slot())
		}

		time.Sleep(3 * time.Second)
		began = time.Now()
		unlock(t, l)
		l = <-got
		within(t, "a slot of this Client", began, time.Millisecond)
		unlock(t, l)
		synctest.Wait() // the queue is unlocked in the background
		unlock(t, t.lock("k", twoSlots, hasp.WithMaxWait(0)))
	})
}

func TestSlotOfADeadHolder(t *testing.T) {
	withSlots(t, nil, func(t *bench, taken []*hasp.Lease) {
		began := time.Now()
		l := t.lock("k", twoSlots, hasp.WithFence())
		within(t, "a slot whose holder does not renew", began, 2*time.Second+10*time.Millisecond)
		for _, dead := range taken {
			if dead.Slot() == l.Slot() && l.Fence() <= dead.Fence() {
				t.Errorf("fence %d after %d", l.Fence(), dead.Fence())
			}
		}
		unlock(t, l)
	}, hasp.WithTTL(2*time.Second), hasp.WithoutRenewal(), hasp.WithFence())
}

func TestTryLockLooksAtEachSlotOnce(t *testing.T) {
	withSlots(t, nil, func(t *bench, taken []*hasp.Lease) {
		want(t, "Extend", taken[1].Extend(t.Context(), time.Hour), nil)
		for range 20 { // each begins at one of the slots, at random
			rest := refusal(t, t.tryErr("k", twoSlots)).RetryAfter
			between(t, "the first end of a slot", rest, 1, hasp.DefaultTTL)
		}
		want(t, "WithMaxWait(0)", t.lockErr("k", twoSlots, hasp.WithMaxWait(0)), hasp.ErrHeld)
		equal(t, "attempts", t.attempts(), 42)
		unlock(t, taken[0])
		l := t.lock("k", twoSlots, hasp.WithMaxWait(0))
		equal(t, "slot", l.Slot(), taken[0].Slot())
		unlock(t, l)
	})
}

func TestWaitForASlotEnds(t *testing.T) {
	withSlots(t, nil, func(t *bench, taken []*hasp.Lease) {
		// Two callers each time: one looks for a slot, and the other waits in the queue.
		both := func(ctx context.Context, opts ...hasp.Option) []error {
			first := t.lockLater(ctx, append(opts, twoSlots)...)
			second := t.lockLater(ctx, append(opts, twoSlots)...)
			return []error{<-first, <-second}
		}
		began := time.Now()
		for _, err := range both(t.Context(), hasp.WithMaxWait(time.Second)) {
			wantOnly(t, "max wait", err, hasp.ErrHeld)
		}
		ctx := timeout(t, t.Context(), time.Second)
		for _, err := range both(ctx) {
			wantOnly(t, "deadline", err, hasp.ErrHeld, context.DeadlineExceeded)
		}
		within(t, "two waits of a second", began, 2*time.Second+50*time.Millisecond)
		time.AfterFunc(time.Second, func() { t.Client.Close() })
		for _, err := range both(t.Context()) {
			want(t, "closed", err, hasp.ErrClosed)
		}
	})
}

// A Lock that looks for a slot goes on through a short outage, and returns the error of a long one.
func TestLookForASlotInAnOutage(t *testing.T) {
	withSlots(t, &hasp.Options{Timeout: time.Second}, func(t *bench, taken []*hasp.Lease) {
		time.AfterFunc(time.Second, func() { t.set(down) })
		time.AfterFunc(1500*time.Millisecond, func() { t.set(up) })
		time.AfterFunc(2*time.Second, func() { taken[0].Unlock(t.Context()) })
		l := t.lock("k", twoSlots)
		time.AfterFunc(time.Second, func() { t.set(down) })
		began := time.Now()
		wantOutage(t, "Lock", t.lockErr("k", twoSlots), errNet)
		within(t, "an outage", began, 3*time.Second)
		t.set(up)

		// The context ends during an outage. An answer from before does not hide the outage.
		ctx := timeout(t, t.Context(), 2*time.Second)
		time.AfterFunc(1500*time.Millisecond, func() { t.set(down) })
		wantOutage(t, "Lock", errOf(t.Lock(ctx, "k", twoSlots)), errNet, context.DeadlineExceeded)
		t.set(up)
		unlock(t, l)
		time.Sleep(10 * time.Second) // until clean-up has ended
	})
}

func TestReentryOfASlot(t *testing.T) {
	onBench(t, func(t *bench) {
		t.lock("k", hasp.WithSlots(3))
		outer := t.lock("k", hasp.WithSlots(3))
		inner := t.lockIn(outer.Context(), "k", twoSlots)
		if inner.Slot() != outer.Slot() || inner.Key() != "k" {
			t.Errorf("slot %d of %q in slot %d", inner.Slot(), inner.Key(), outer.Slot())
		}
		plain := t.lockIn(outer.Context(), "k")
		equal(t, "slot without WithSlots", plain.Slot(), 0)
		for range 20 { // slots are taken at random
			other := t.lockIn(outer.Context(), "k", hasp.WithSlots(3), hasp.WithoutReentry())
			again := t.lockIn(other.Context(), "k", hasp.WithSlots(3)) // re-enters the innermost lease
			if again.Slot() != other.Slot() || other.Slot() == outer.Slot() {
				t.Errorf("outer %d, inner %d, re-entered %d", outer.Slot(), other.Slot(), again.Slot())
			}
			unlock(t, again)
			unlock(t, other)
		}
		unlock(t, plain)
		unlock(t, inner)
		if t.free(fmt.Sprint("k#", outer.Slot())) {
			t.Error("the slot is free, though the outer lease holds it")
		}
		unlock(t, outer)
		t.freed("the slot is still held", fmt.Sprint("k#", outer.Slot()))
	})
}

// A call with slots has the events of one call, however many attempts it takes to find a slot.
func TestEventsOfSlots(t *testing.T) {
	var s seen
	withSlots(t, &hasp.Options{Observe: s.observe}, func(t *bench, taken []*hasp.Lease) {
		got := t.lockSoon(t.Context(), "k", twoSlots)
		want(t, "refused", t.lockErr("k", twoSlots, hasp.WithMaxWait(time.Second)), hasp.ErrHeld)
		await.Must(t, t.Client.Break(t.Context(), "k#queue"))
		time.Sleep(5 * time.Second)
		unlock(t, taken[0])
		unlock(t, <-got)
		synctest.Wait()
		begin(t, s.lines(0),
			"0 lock k requested",
			"1 lock k requested",
			"1 lock k refused 1s",
			"0 lock k acquired 6.",
			"0 lock k released")
	})
}

// If the server of one slot does not answer, Lock still finds the other slots.
func TestSlotThatDoesNotAnswer(t *testing.T) {
	withSlots(t, nil, func(t *bench, taken []*hasp.Lease) {
		away := fmt.Sprint("k#", taken[1].Slot())
		t.onAcquire(func(q *call) error {
			if q.Key == away {
				time.Sleep(time.Minute)
				return errNet
			}
			return q.send()
		})
		want(t, "TryLock", t.tryErr("k", twoSlots), hasp.ErrUnavailable)
		time.AfterFunc(10*time.Second, func() { taken[0].Unlock(t.Context()) }) // after more than Timeout
		l := t.lock("k", twoSlots)
		equal(t, "slot", l.Slot(), taken[0].Slot())
		unlock(t, l)
		t.set(up)
		time.Sleep(2 * time.Minute)
	})
}

// If no slot answers, a call takes no longer than one without slots.
func TestSlotsThatDoNotAnswer(t *testing.T) {
	withEnds(t, backend.CancelPrompt, nil, func(t *bench) {
		began := time.Now()
		var hangs atomic.Int64 // when the slots begin to hang, in Unix nanoseconds; they first fail immediately
		hangs.Store(began.UnixNano())
		t.acquire = func(q *call) error {
			switch {
			case q.Key == "k#queue":
				return q.send()
			case time.Now().UnixNano() >= hangs.Load():
				return hung(q)
			}
			return errNet
		}
		want(t, "TryLock", t.tryErr("k", hasp.WithSlots(4)), hasp.ErrUnavailable)
		within(t, "TryLock", began, hasp.DefaultTimeout)
		for after := range 3 {
			time.Sleep(time.Second) // past the gap that follows the last hold of the queue
			began = time.Now()
			hangs.Store(began.Add(time.Duration(after) * time.Second).UnixNano())
			want(t, "Lock", t.lockErr("k", hasp.WithSlots(4)), hasp.ErrUnavailable)
			within(t, "Lock", began, hasp.DefaultTimeout+100*time.Millisecond)
		}
		t.set(up)
	})
}

// If a store grants only short terms, a Lock with slots asks for no longer term, not even for the
// queue.
func TestSlotsOfAStoreWithShortTerms(t *testing.T) {
	c := opened(t, newShort(), &hasp.Options{TTL: maxTTL})
	unlock(t, lockNow(t, c, "k", oneSlot))
	want(t, "Lock", errOf(c.Lock(t.Context(), "k", oneSlot, hasp.WithTTL(2*maxTTL))), hasp.ErrInvalid)
}

func TestContextThatEndsWhileTheQueueOfSlotsIsGranted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		d := hooked{traits: memlock.NewDriver().Traits()}.over(new(memlock.Store))
		c := opened(t, d, nil)
		l := lockNow(t, c, "k", oneSlot)
		synctest.Wait() // the queue is unlocked in the background
		d.acquire = func(q *call) error {
			if q.Key == "k#queue" {
				defer cancel()
			}
			return q.send()
		}
		wantOnly(t, "Lock", errOf(c.Lock(ctx, "k", oneSlot)), context.Canceled, hasp.ErrHeld)
		unlock(t, l)
	})
}

// While many slots are held, the caller that looks for one makes about a hundred attempts a second.
func TestManySlotsThatAreHeldAreAskedForSeldom(t *testing.T) {
	withTwo(t, nil, func(t *bench, other *hasp.Client) {
		var taken []*hasp.Lease
		for range 100 {
			taken = append(taken, lockNow(t, other, "k", hasp.WithSlots(100)))
		}

		// A look at all slots may end after WithMaxWait, but no later than one attempt may.
		t.onAcquire(slow(20 * time.Millisecond))
		start := time.Now()
		err := t.lockErr("k", hasp.WithSlots(100), hasp.WithMaxWait(100*time.Millisecond))
		want(t, "Lock", err, hasp.ErrHeld)
		within(t, "Lock", start, 300*time.Millisecond)
		t.set(up)

		before := t.attempts()
		got := t.lockSoon(t.Context(), "k", hasp.WithSlots(100))
		time.Sleep(20 * time.Second)
		between(t, "calls in 20 s", t.attempts()-before, 20, 4000)
		start = time.Now()
		unlock(t, taken[0])
		unlock(t, <-got)
		within(t, "a free slot", start, 1100*time.Millisecond)
		for _, l := range taken[1:] {
			unlock(t, l)
		}
	})
}
