package pubsublock_test

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redisstore"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/internal/strategytest"
)

var shared = strategytest.Shared

// All readers that wait try at once when a writer has released the key, also readers of a
// Client that has just had the key. They take no turns.
func TestReleaseWakesAllReadersAtOnce(t *testing.T) {
	bubble(t, func(t *testing.T, v *redistest.VirtualServer, a, b rig) {
		first := claim("k")
		a.Acquire(t, first)
		var others []*waiter
		for range 3 {
			others = append(others, over(t, v.Direct()).wait(t, "k"))
		}
		a.Release(t, first) // from here on a has other Clients ahead
		synctest.Wait()
		var readers []*waiter
		for _, r := range []rig{a, b} {
			for range 3 {
				readers = append(readers, r.wait(t, "k", hasp.WithShared()))
			}
		}
		time.Sleep(2300 * time.Millisecond)
		for _, o := range others {
			if !o.ended() {
				o.leave()
			}
		}
		for _, o := range others {
			if o.err == nil {
				unlock(t, o.lease)
			}
		}
		released := time.Now()
		for _, r := range readers {
			r.granted(t, released, 0, 0)
			defer unlock(t, r.lease)
		}
	})
}

// A writer that gives up ends its intent, and the readers that it has kept away try at once. When no
// caller waits any more, the subscriptions end.
func TestWriterThatGivesUpLetsReadersIn(t *testing.T) {
	bubble(t, func(t *testing.T, v *redistest.VirtualServer, a, b rig) {
		first := shared("k")
		b.Acquire(t, first)
		w := a.wait(t, "k", hasp.WithMaxWait(2300*time.Millisecond))
		if all := v.Mini.PubSubChannels(""); len(all) != 1 {
			t.Errorf("subscribed to %q", all)
		}
		reader := b.wait(t, "k", hasp.WithShared())
		time.Sleep(2200 * time.Millisecond)
		reader.waits(t)
		<-w.done
		want(t, "the writer", w.err, hasp.ErrHeld)
		reader.granted(t, w.at, 0, 0)
		b.Release(t, first)
		unlock(t, reader.lease)
		time.Sleep(5 * time.Second) // a channel is kept for a moment
		if keys, channels := v.Mini.Keys(), v.Mini.PubSubChannels(""); len(keys)+len(channels) != 0 {
			t.Errorf("left %q, and subscribed to %q", keys, channels)
		}
	})
}

// A caller that gives up does not end the intent of another one.
func TestIntentOfAnotherStays(t *testing.T) {
	r := setup(t, nil)
	r.Acquire(t, shared("k"))
	first, second := claim("k"), claim("k")
	first.WillRetry, second.WillRetry = true, true
	for _, c := range []backend.Claim{first, second} {
		want(t, "acquire", await.ErrorOf(r.Driver.Acquire(t.Context(), c)), backend.ErrHeld)
	}
	lost(t, "release", r.Driver.Release(t.Context(), first))
	if got := r.Redis.Get(t.Context(), redisstore.IntentKey("k")).Val(); got != second.Token {
		t.Errorf("the intent is %q", got)
	}
}

// A key without readers costs no more than before: one command, with one key.
func TestIntentOnlyAfterReaders(t *testing.T) {
	bubble(t, func(t *testing.T, v *redistest.VirtualServer, a, b rig) {
		c := claim("k")
		c.WillRetry = true
		a.Acquire(t, c)
		a.Release(t, c)
		v.Proxy.Commands()
		a.Acquire(t, c)
		want(t, "a second Acquire", await.ErrorOf(a.Driver.Acquire(t.Context(), c)), backend.ErrHeld)
		a.Release(t, c)
		sent := v.Proxy.Commands()
		if len(sent) != 3 || slices.ContainsFunc(sent, func(s string) bool { return !strings.Contains(s, " 1 k ") }) {
			t.Errorf("sent %q", sent)
		}
	})
}
