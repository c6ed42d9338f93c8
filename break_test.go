package hasp_test

import (
	"cmp"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
)

// Once Break has returned, its own Client neither reports the key as held nor gives the broken hold
// to another caller, whenever the hold was taken.
func TestBreakByTheHoldersClient(t *testing.T) {
	for name, tc := range map[string]struct {
		opts    []hasp.Option
		attempt time.Duration // when the attempt begins
		reply   time.Duration // how long the reply to the attempt takes
		breaks  time.Duration // when Break is called
		err     error         // what Break returns
		unlock  bool          // the holder unlocks before Break has reached the store
	}{
		"a hold":                                 {breaks: time.Second},
		"a hold without renewal":                 {breaks: time.Second, opts: options{hasp.WithoutRenewal()}},
		"a shared hold":                          {breaks: time.Second, opts: options{hasp.WithShared()}},
		"a hold, and the reply to Break is lost": {breaks: time.Second, err: errNet},
		"an attempt in flight":                   {breaks: 5 * time.Millisecond, reply: 40 * time.Millisecond},
		"an attempt during the Break":            {attempt: 5 * time.Millisecond},
		"a key that lingers":                     {attempt: 5 * time.Millisecond, unlock: true, opts: options{hasp.WithLinger()}},
	} {
		runTwo(t, name, nil, func(t *bench, rival *hasp.Client) {
			t.acquire = late(tc.reply)
			t.inspect = func(q *call) error {
				return cmp.Or(trip(20*time.Millisecond)(q), tc.err)
			}

			time.Sleep(time.Minute)
			old := make(chan *hasp.Lease, 1)
			time.AfterFunc(tc.attempt, func() {
				l := t.lock("k", tc.opts...)
				if tc.unlock {
					unlock(t, l)
				}
				old <- l
			})
			time.Sleep(tc.breaks)
			want(t, "Break", t.Client.Break(t.Context(), "k"), tc.err)

			theirs := lockNow(t, rival, "k")
			l := <-old
			next := t.lockSoon(t.Context(), "k")
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
			hangs := t.lock("k")
			want(t, "Break", t.Client.Break(t.Context(), "k"), tc.err)
			synctest.Wait()
			want(t, "the old lease", hangs.Err(), hasp.ErrLost)
			want(t, "TryLock after Break", t.tryErr("k"), nil)
			want(t, "Unlock", hangs.Unlock(t.Context()), hasp.ErrLost)
		})
	}
}

// A caller that waits gets the key by a Break of its own Client, and keeps it.
func TestBreakForAWaiterOfTheSameClient(t *testing.T) {
	for _, ordered := range []bool{false, true} {
		withTwo(t, nil, func(t *bench, rival *hasp.Client) {
			t.inspect = trip(2 * time.Second)
			if ordered {
				t.Client = opened(t, t.Driver, nil) // gets the key before Break returns
			}
			stuck := lockNow(t, rival, "k")
			next := t.lockSoon(t.Context(), "k")
			time.Sleep(time.Second)
			want(t, "Break", t.Client.Break(t.Context(), "k"), nil)
			l := <-next
			time.Sleep(3 * hasp.DefaultTTL)
			unlock(t, l)
			want(t, "Unlock of the broken lease", stuck.Unlock(t.Context()), hasp.ErrLost)
		})
	}
}
