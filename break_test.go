package hasp_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/memlock"
)

// slowBreak takes the time way to the store, and as long for the reply.
type slowBreak struct {
	*faulty
	way time.Duration
	err error
}

func (d *slowBreak) Break(ctx context.Context, key string) error {
	time.Sleep(d.way)
	defer time.Sleep(d.way)
	if err := d.faulty.Break(ctx, key); err != nil {
		return err
	}
	return d.err
}

// Once Break has returned, its own Client neither reports the key as held nor gives the broken hold
// to another caller, whenever the hold was taken.
func TestBreakByTheHoldersClient(t *testing.T) {
	for _, tc := range []struct {
		name   string
		opts   []hasp.Option
		reply  time.Duration // how long the reply to the attempt takes
		after  time.Duration // when the attempt begins, counted from the call of Break
		err    error         // what Break returns
		unlock bool          // the holder unlocks before Break has reached the store
	}{
		{name: "a hold", after: -time.Second},
		{name: "a hold without renewal", after: -time.Second, opts: options{hasp.WithoutRenewal()}},
		{name: "a shared hold", after: -time.Second, opts: options{hasp.WithShared()}},
		{name: "a hold, and the reply to Break is lost", after: -time.Second, err: errNet},
		{name: "an attempt in flight", after: -5 * time.Millisecond, reply: 40 * time.Millisecond},
		{name: "an attempt during the Break", after: 5 * time.Millisecond},
		{name: "a key that lingers", after: 5 * time.Millisecond, unlock: true, opts: options{hasp.WithLinger()}},
	} {
		runBubble(t, tc.name, func(t *testing.T) {
			store := new(memlock.Store)
			d := &slowBreak{faulty: faultyOver(store), way: 10 * time.Millisecond, err: tc.err}
			d.acquire = func(q *call) error {
				defer time.Sleep(tc.reply)
				return q.send()
			}
			c, rival := opened(t, d, nil), opened(t, store.Driver(), nil)

			time.Sleep(time.Minute)
			begins := time.Now().Add(max(-tc.after, 0))
			old := make(chan *hasp.Lease, 1)
			time.AfterFunc(time.Until(begins)+tc.after, func() {
				l := lockNow(t, c, "k", tc.opts...)
				if tc.unlock {
					unlock(t, l)
				}
				old <- l
			})
			time.Sleep(time.Until(begins))
			want(t, "Break", c.Break(t.Context(), "k"), tc.err)

			theirs := lockNow(t, rival, "k")
			l := <-old
			next := lockSoon(t, c, timeout(t, t.Context(), time.Hour), "k")
			if !tc.unlock {
				l.Unlock(t.Context())
			}
			synctest.Wait()
			if len(next) > 0 {
				t.Error("a later caller of the Client has the key beside the rival")
			}
			unlock(t, theirs)
			unlock(t, <-next)

			// The key is free for the Client itself, although the old holder does not unlock.
			if tc.reply == 0 && !tc.unlock && tc.opts == nil {
				d.err = tc.err
				hangs := lockNow(t, c, "k")
				want(t, "Break", c.Break(t.Context(), "k"), tc.err)
				synctest.Wait()
				want(t, "the old lease", hangs.Err(), hasp.ErrLost)
				l, err := c.TryLock(t.Context(), "k")
				want(t, "TryLock after Break", err, nil)
				unlock(t, l)
				want(t, "Unlock", hangs.Unlock(t.Context()), hasp.ErrLost)
			}
		})
	}
}

// A caller that waits gets the key by a Break of its own Client, and keeps it.
func TestBreakForAWaiterOfTheSameClient(t *testing.T) {
	for _, ordered := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			store := new(memlock.Store)
			var d backend.Driver = store.Driver() // hands the key to the waiter before Break returns
			if !ordered {
				d = &slowBreak{faulty: faultyOver(store), way: time.Second}
			}
			c, rival := opened(t, d, nil), opened(t, store.Driver(), nil)
			stuck := lockNow(t, rival, "k")
			next := lockSoon(t, c, timeout(t, t.Context(), time.Hour), "k")
			time.Sleep(time.Second)
			want(t, "Break", c.Break(t.Context(), "k"), nil)
			l := <-next
			time.Sleep(3 * hasp.DefaultTTL)
			unlock(t, l)
			want(t, "Unlock of the broken lease", stuck.Unlock(t.Context()), hasp.ErrLost)
		})
	}
}
