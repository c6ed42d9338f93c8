//go:build unix

package pglock_test

import (
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/pgtest"
	"github.com/hasplock/hasp/pglock"
)

// caller is a Client's caller that waits for the key "k".
type caller struct {
	*testing.T
	*pglock.Driver
	shared   bool
	attempts int
	last     backend.Claim
	wake     <-chan struct{}
	stop     func()
}

// ask makes an attempt, and reports whether it was granted.
func (c *caller) ask() bool {
	c.Helper()
	c.attempts++
	c.last = claim("k", fmt.Sprintf("%p/%d", c, c.attempts))
	c.last.Shared, c.last.WillRetry = c.shared, true
	_, err := c.Acquire(c.Context(), c.last)
	if err != nil && !errors.Is(err, backend.ErrHeld) {
		c.Error(err)
	}
	return err == nil
}

func (c *caller) release() {
	c.Helper()
	must(c.T, c.Release(c.Context(), c.last))
}

// woken reports whether a message has come for the caller, or comes within a duration.
func (c *caller) woken(within time.Duration) bool {
	select {
	case <-c.wake:
		return true
	case <-time.After(within):
		return false
	}
}

// line returns callers of one Client each: the first one holds the key, the others wait in order. An
// r stands for a shared one.
func line(t *testing.T, s *pgtest.Server, kinds string) (all []*caller) {
	for i, kind := range kinds {
		c := &caller{T: t, Driver: newDriver(t, s.Where()), shared: kind == 'r'}
		if all = append(all, c); i == 0 {
			continue
		}

		// The session of the listener begins with a signal.
		var err error
		c.wake, c.stop, err = c.Listen(t.Context(), backend.Claim{Key: "k", Shared: c.shared})
		must(t, err)
		until(t, "a listener", func() bool { return c.woken(time.Second) })
	}

	// A place lasts for 3 s, so all callers ask only when all listen.
	for i, c := range all {
		if c.ask() != (i == 0) {
			t.Fatalf("caller %d of %s: granted %t", i, kinds, i > 0)
		}
	}
	return all
}

// A release wakes one waiter, which alone may take the key. The others come later.
func TestOneWaiterIsWoken(t *testing.T) {
	t.Parallel()
	const heir, follower = 1, 2
	for name, tt := range map[string]struct {
		kinds string
		then  func(heir *caller) // what the heir does before the follower gets the key
	}{
		"it takes the key":              {"wwww", func(h *caller) { await.Success(h.T, "a grant", h.granted); h.release() }},
		"it gives up":                   {"wwww", func(h *caller) { h.stop() }},
		"it dies":                       {"wwww", func(h *caller) {}},
		"readers come together":         {"wrrw", func(h *caller) { await.Success(h.T, "a grant", h.granted) }},
		"a reader waits behind another": {"wwrw", func(h *caller) { await.Success(h.T, "a grant", h.granted); h.release() }},
		"the last reader leaves":        {"rwww", func(h *caller) { await.Success(h.T, "a grant", h.granted); h.release() }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := pgtest.Shared(t)
			all := line(t, s, tt.kinds)
			all[0].release()
			if !all[heir].woken(await.Patience) {
				t.Fatal("the first waiter is not woken")
			}
			if all[3].woken(0) || all[3].ask() {
				t.Fatal("the last waiter is woken, or gets the key")
			}
			tt.then(all[heir])
			if name == "it dies" {
				await.Success(t, "the second waiter gets the key", all[follower].granted)
			} else if !all[follower].woken(await.Patience) || !all[follower].ask() {
				t.Error("the second waiter is not woken, or does not get the key")
			}
		})
	}
}

// granted returns an error unless an attempt is granted.
func (c *caller) granted() error {
	if !c.ask() {
		return backend.ErrHeld
	}
	return nil
}

// A writer that gives up does not take away the place of another one that waits.
func TestAWriterThatLeavesKeepsThePlacesOfOthers(t *testing.T) {
	t.Parallel()
	s, d := onServer(t)
	db := newPool(t, s.URL())
	all := line(t, s, "rww")
	all[2].stop()
	until(t, "the end of its place", func() bool { return has(t, db, "cardinality(waiters) = 1") })
	reader := &caller{T: t, Driver: d, shared: true}
	if reader.ask() {
		t.Error("a reader joins, although a writer waits")
	}
	all[0].release()
	if !all[1].woken(await.Patience) || !all[1].ask() {
		t.Error("the writer that waits does not get the key")
	}
}

// A caller that waits in a full line keeps its place. Places of callers that have died make room.
func TestFullLine(t *testing.T) {
	t.Parallel()
	s := pgtest.Shared(t)
	db, waiter := newPool(t, s.URL()), line(t, s, "xx")[1]
	update := func(set string) {
		await.Value(db.Exec(t.Context(), "UPDATE hasp_locks SET "+set))
		time.Sleep(100 * time.Millisecond) // an answer may be given again for half of this time
	}
	update(`waiters = waiters || (SELECT array_agg(i::bigint) FROM generate_series(1, 99) i),
		ends = (clock_timestamp() + interval '1 s') || array_fill(clock_timestamp() + interval '2500 ms', ARRAY[99])`)
	if waiter.ask() {
		t.Fatal("got the key")
	}
	if !has(t, db, "ends[1] > clock_timestamp() + interval '1500 ms'") {
		t.Error("the waiter does not keep its place")
	}

	update("ends = array_fill(clock_timestamp() - interval '1 s', ARRAY[100])")
	if waiter.ask() {
		t.Fatal("got the key")
	}
	if !has(t, db, "cardinality(waiters) = 1") {
		t.Error("places of the dead make no room")
	}
}

// Many processes may start at once on a new database. Each opens, although only one of them creates
// the table.
func TestClientsThatOpenAtOnceShareATable(t *testing.T) {
	t.Parallel()
	s := pgtest.Shared(t)
	for round := range 20 {
		var all sync.WaitGroup
		for range 8 {
			all.Go(func() {
				url := urlOf(s.Where(), fmt.Sprint("&table=locks", round))
				c, err := hasp.Open(t.Context(), url, patient)
				if err != nil {
					t.Errorf("round %d: %v", round, err)
					return
				}
				c.Close()
			})
		}
		all.Wait()
	}
}
