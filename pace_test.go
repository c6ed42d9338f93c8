package hasp_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/memlock"
)

// crowd has callers of several Clients, which take one key again and again.
type crowd struct {
	clients, callers int
	ordered          bool // the driver queues the callers; otherwise they poll
	trip, hold       time.Duration
	settles, lasts   time.Duration // time before the count begins, and length of the count
	opts             []hasp.Option

	mu       sync.Mutex    // guards all below
	inside   map[int]bool  // the slots that are held; only slot 0 without slots
	most     int           // most slots that were held at the same time
	shares   []float64     // number of holds of each caller
	attempts int           // number of attempts, if the callers poll
	longest  time.Duration // longest wait
}

// run returns the number of holds, and Jain's index of the callers' shares.
func (w *crowd) run(t *testing.T, store *memlock.Store) (holds, jain float64) {
	w.shares, w.inside = make([]float64, w.callers), map[int]bool{}
	begins := time.Now().Add(w.settles)
	ctx := timeout(t, t.Context(), w.settles+w.lasts)
	locked := func(note func()) {
		w.mu.Lock()
		defer w.mu.Unlock()
		note()
	}
	count := func(note func()) {
		if !time.Now().Before(begins) {
			locked(note)
		}
	}

	var wg sync.WaitGroup
	for i := range w.clients {
		f := faultyOver(store)
		f.acquire = func(q *call) error {
			time.Sleep(w.trip)
			count(func() { w.attempts++ })
			return q.send()
		}
		var d backend.Driver = f
		if w.ordered {
			d = f.Driver
		}
		c := await.Value(hasp.New(d, nil))
		defer c.Close() // so that no call is in flight when the test reads the figures
		for j := i; j < w.callers; j += w.clients {
			wg.Go(func() {
				for ctx.Err() == nil {
					asked := time.Now()
					l, err := c.Lock(ctx, "k", w.opts...)
					count(func() { w.longest = max(w.longest, time.Since(asked)) })
					if err != nil {
						return
					}
					count(func() { w.shares[j]++ })
					locked(func() {
						if w.inside[l.Slot()] {
							t.Errorf("two leases of slot %d", l.Slot())
						}
						w.inside[l.Slot()] = true
						w.most = max(w.most, len(w.inside))
					})
					time.Sleep(w.hold)
					locked(func() { delete(w.inside, l.Slot()) })
					l.Unlock(context.Background())
				}
			})
		}
	}
	wg.Wait()

	w.mu.Lock() // an Acquire whose Lock has ended may still be in flight
	defer w.mu.Unlock()
	squares := 0.0
	for _, s := range w.shares {
		holds += s
		squares += s * s
	}
	jain = holds * holds / (float64(w.callers) * squares)
	t.Logf("%v holds, Jain's index %.3f, longest wait %v, %.2f attempts for each", holds, jain, w.longest, float64(w.attempts)/holds)
	return holds, jain
}

// Callers of several Clients that poll share a key evenly, whether a hold is short or long. However
// many Clients there are, the number of attempts for each hold and the time between two holds stay
// small, and no caller waits much longer than the others.
func TestClientsThatPollShareAKey(t *testing.T) {
	type bounds struct {
		attempts float64 // most attempts for each hold
		rounds   int     // longest wait, in rounds; in a round each caller has one hold
		busy     float64 // least part of the time for which the key is held
	}
	many, alone := bounds{10, 30, 0.6}, bounds{9, 10, 0.75} // for many callers in each Client, and for one caller
	check := func(w *crowd, b bounds) {
		t.Run(fmt.Sprint(w.clients, " clients, ", w.callers, " callers, ", w.hold), func(t *testing.T) {
			if b == alone {
				await.Crowd(t)
			}
			synctest.Test(t, func(t *testing.T) {
				holds, jain := w.run(t, new(memlock.Store))
				if jain < 0.9 {
					t.Errorf("Jain's index of the shares is %.3f", jain)
				}
				if w.longest > time.Duration(b.rounds*w.callers)*w.hold {
					t.Errorf("a caller waited for %v", w.longest)
				}
				if float64(w.attempts) > b.attempts*holds {
					t.Errorf("%d attempts for %v holds", w.attempts, holds)
				}
				if busy := holds * float64(w.hold) / float64(w.lasts); busy < b.busy {
					t.Errorf("the key was held for %.0f %% of the time", 100*busy)
				}
			})
		})
	}
	const trip = 200 * time.Microsecond
	for _, clients := range []int{2, 4, 8} {
		for _, hold := range []time.Duration{time.Millisecond, 10 * time.Millisecond} {
			check(&crowd{clients: clients, callers: 64, trip: trip, hold: hold, lasts: 10 * time.Second}, many)
		}
	}
	for _, n := range []int{2, 10, 50, 200} {
		round := time.Duration(n) * 5 * time.Millisecond
		check(&crowd{clients: n, callers: n, trip: trip, hold: 5 * time.Millisecond, settles: max(20*round, 2*time.Second), lasts: 60 * round}, alone)
	}
}

// Some seconds after a long hold, the Clients that have waited share the key evenly. Each Client
// has one caller, and a round trip may take much less than a hold.
func TestClientsShareAKeyAfterALongHold(t *testing.T) {
	for _, trip := range []time.Duration{20 * time.Microsecond, 200 * time.Microsecond} {
		synctest.Test(t, func(t *testing.T) {
			store := new(memlock.Store)
			first := opened(t, store.Driver(), nil)
			long := lockNow(t, first, "k")
			time.AfterFunc(5*time.Second, func() { long.Unlock(context.Background()) })
			w := &crowd{clients: 5, callers: 5, trip: trip, hold: time.Millisecond, settles: 13 * time.Second, lasts: time.Second}
			if _, jain := w.run(t, store); jain < 0.8 {
				t.Errorf("trip %v: Jain's index of the shares in the ninth second is %.2f: %v", trip, jain, w.shares)
			}
		})
	}
}

// A Client that is alone uses a key for most of the time. Nevertheless a Client that comes later
// gets the key.
func TestALoneClientIsFoundByALaterOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := new(memlock.Store)
		alone := &crowd{clients: 1, callers: 16, hold: 10 * time.Millisecond, lasts: 10 * time.Second}
		if holds, _ := alone.run(t, store); holds < 920 {
			t.Errorf("%v holds of 10 ms in 10 s, by a Client that is alone", holds)
		}

		later := opened(t, faultyOver(store), nil)
		found := &crowd{clients: 1, callers: 16, hold: 10 * time.Millisecond, lasts: time.Minute}
		var wg sync.WaitGroup
		wg.Go(func() { found.run(t, store) })
		time.Sleep(10 * time.Second)
		waited := time.Duration(0) // about 4 s in total; one wait in 1,000 takes 3 s
		for range 10 {
			asked := time.Now()
			l := lockNow(t, later, "k")
			waited += time.Since(asked)
			unlock(t, l)
			time.Sleep(2 * time.Second)
		}
		if waited > 16*time.Second {
			t.Errorf("a Client that came later waited for %v in ten Locks", waited)
		}
		wg.Wait()
	})
}

// While one hold lasts, a waiting caller makes few attempts. A hold counts as the same hold even if
// answers are late, and if each attempt reports another end, because readers renew or a writer
// repeats its intent. Options.Backoff replaces the pace.
func TestAttemptsAtOneHold(t *testing.T) {
	answers := 0
	late := func(q *call) error {
		err := q.send()
		if answers++; answers%2 == 0 {
			time.Sleep(20 * time.Millisecond)
		}
		return err
	}
	otherTerm := func(q *call) error {
		answers++
		term := time.Duration(1+answers%10) * time.Second
		return &backend.HeldError{RetryAfter: term, Shared: !q.Shared}
	}
	for _, tc := range []struct {
		name        string
		acquire     hook
		backoff     func(int) time.Duration
		opts        []hasp.Option
		least, most int // attempts in a minute
	}{
		// The sleeps grow until they last 25 to 75 ms, 50 ms on average.
		{name: "the pace", least: 900, most: 1600},
		{name: "late answers", acquire: late, least: 600, most: 1250},
		{name: "a writer beside readers", acquire: otherTerm, least: 900, most: 1600},
		{name: "a reader beside a writer", acquire: otherTerm, opts: options{shared}, least: 900, most: 1600},
		// Each sleep is shortened by up to a half.
		{name: "Backoff", backoff: func(int) time.Duration { return time.Second }, least: 70, most: 125},
	} {
		runClient(t, tc.name, &hasp.Options{Backoff: tc.backoff}, func(t *bench) {
			heldByAnother(t, t.faulty, time.Hour)
			t.acquire = tc.acquire
			want(t, "Lock", t.lockErr("k", append(tc.opts, hasp.WithMaxWait(time.Minute))...), hasp.ErrHeld)
			between(t, "attempts in a minute", t.attempts(), tc.least, tc.most)
		})
	}
}

// afterTrip makes each call take a round trip. The first call also takes the time dial.
func afterTrip(dial time.Duration) hook {
	return func(q *call) error {
		time.Sleep(dial + 200*time.Microsecond)
		dial = 0
		return q.send()
	}
}

// After one slow answer, a later Lock must not leave a free key unused for long.
func TestAGapIsShortAfterASlowAnswer(t *testing.T) {
	withRival(t, hooked{traits: inNoOrder, acquire: afterTrip(2 * time.Second)}, func(t *bench, rival *hasp.Lease) {
		first := t.lockSoon(t.Context(), "k")
		time.Sleep(2100 * time.Millisecond)
		unlock(t, rival)
		l := <-first
		time.Sleep(100 * time.Millisecond)
		unlock(t, l)

		began := time.Now()
		unlock(t, t.lock("k"))
		within(t, "Lock of a free key that nobody else wants", began, 150*time.Millisecond)
	})
}

// After a long hold a caller that comes back leaves a gap, even if its Client has not met another
// caller for long: others may have come during the hold. But if the driver knows that nobody waits,
// the caller leaves no gap.
func TestGapAfterALongHold(t *testing.T) {
	unheard := false
	release := func(q *call) error {
		q.Unheard.Store(unheard)
		return q.send()
	}
	withRival(t, hooked{traits: inNoOrder, acquire: afterTrip(0), release: release}, func(t *bench, rival *hasp.Lease) {
		time.AfterFunc(time.Second, func() { rival.Unlock(context.Background()) })
		for i := range 4 {
			unheard = i >= 2
			l := t.lock("k")
			time.Sleep(time.Minute)
			unlock(t, l)

			began := time.Now()
			l = t.lock("k")
			// Without a gap, the Lock takes one round trip of 200 µs.
			if took := time.Since(began); unheard != (took <= 500*time.Microsecond) || took > 20*time.Millisecond {
				t.Errorf("unheard %v: the key was taken again after %v", unheard, took)
			}
			unlock(t, l)
			time.Sleep(time.Minute)
		}
	})
}

// A Client knows for a second which keys are contended, however many keys it uses. After a gap that
// nobody is known to need, the driver may use its cheapest command.
func TestContendedKeysAreNotForgotten(t *testing.T) {
	onBench(t, func(t *bench) {
		again := func(key string) (last backend.Claim) {
			t.onAcquire(func(q *call) error {
				last = q.Claim
				return q.send()
			})
			for range 2 {
				l := t.lock(key)
				time.Sleep(30 * time.Millisecond)
				unlock(t, l)
			}
			t.onAcquire(nil)
			return last
		}
		if cl := again("k"); cl.Waited == 0 || cl.Contended {
			t.Errorf("after a gap: %+v", cl)
		}
		rival := opened(t, t.Driver, nil)
		l := lockNow(t, rival, "k")
		want(t, "TryLock", t.tryErr("k"), hasp.ErrHeld)
		unlock(t, l)

		use := func(name string) {
			var all sync.WaitGroup
			for i := range 600 {
				all.Go(func() {
					l := t.lock(fmt.Sprint(name, i))
					time.Sleep(5 * time.Millisecond)
					unlock(t, l)
				})
			}
			all.Wait()
		}
		use("beside it ")
		if cl := again("k"); cl.Waited == 0 || !cl.Contended {
			t.Errorf("after a refusal: %+v", cl)
		}
		for i := range 5 {
			time.Sleep(2 * time.Second)
			use(fmt.Sprint("round ", i, " key "))
		}
		if n := hasp.Contended(t.Client); n > 1500 {
			t.Errorf("%d keys are in the table", n)
		}
	})
}

// withTwoThatPoll runs f with two Clients that poll one store.
func withTwoThatPoll(t *testing.T, f func(t *testing.T, a, b *hasp.Client)) {
	synctest.Test(t, func(t *testing.T) {
		store := new(memlock.Store)
		f(t, opened(t, faultyOver(store), nil), opened(t, faultyOver(store), nil))
	})
}

// During a gap, nobody asks the store. That is no outage for a caller whose wait ends meanwhile.
func TestAWaitThatEndsInAGap(t *testing.T) {
	withTwoThatPoll(t, func(t *testing.T, a, b *hasp.Client) {
		l := lockNow(t, a, "k")
		for _, c := range []*hasp.Client{b, a} { // long waits make long gaps
			next := lockSoon(t, c, t.Context(), "k")
			time.Sleep(time.Second)
			unlock(t, l)
			l = <-next
		}
		time.Sleep(100 * time.Millisecond)
		unlock(t, l)
		head := lockSoon(t, a, t.Context(), "k")
		want(t, "Lock", errOf(a.Lock(t.Context(), "k", hasp.WithMaxWait(60*time.Millisecond))), hasp.ErrHeld)
		unlock(t, <-head)
	})
}

// Callers of one Client take turns with holds that may linger, but cannot be handed over. Then
// other Clients get turns too.
func TestHoldsThatCannotBeHandedOverLeaveGaps(t *testing.T) {
	for name, opts := range map[string][2]hasp.Option{
		"fences": {hasp.WithFence(), hasp.WithFence()},
		"terms":  {hasp.WithTTL(time.Minute), hasp.WithTTL(time.Hour)},
	} {
		t.Run(name, func(t *testing.T) {
			withTwoThatPoll(t, func(t *testing.T, a, b *hasp.Client) {
				var all sync.WaitGroup
				end := time.Now().Add(15 * time.Second)
				for _, o := range opts {
					all.Go(func() {
						for time.Now().Before(end) {
							l := lockIn(t, a, t.Context(), "k", o, hasp.WithLinger())
							time.Sleep(20 * time.Millisecond)
							unlock(t, l)
						}
					})
				}
				time.Sleep(1007 * time.Millisecond) // not at the end of a hold
				unlock(t, lockIn(t, b, timeout(t, t.Context(), 10*time.Second), "k"))
				all.Wait()
			})
		})
	}
}
