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
	c.last = backend.Claim{Key: "k", Token: fmt.Sprintf("%p/%d", c, c.attempts), TTL: time.Hour, Timeout: time.Hour, Shared: c.shared, WillRetry: true}
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
		c := &caller{T: t, Driver: newDriver(t, s.Where(), ""), shared: kind == 'r'}
		all = append(all, c)
		if i == 0 {
			if !c.ask() {
				t.Fatal("the key is not free")
			}
			continue
		}
		// The session of the listener begins with a signal.
		var err error
		c.wake, c.stop, err = c.Listen(t.Context(), backend.Claim{Key: "k", Shared: c.shared})
		must(t, err)
		until(t, "a listener", func() bool { return c.woken(time.Second) })
		if c.ask() {
			t.Fatalf("caller %d of %s got the key", i, kinds)
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
	s := pgtest.Shared(t)
	all := line(t, s, "rww")
	all[2].stop()
	until(t, "the end of its place", func() bool {
		return fmt.Sprint(await.Value(s.Rows(t.Context(), "SELECT cardinality(waiters) FROM hasp_locks WHERE key = 'k'"))) == "[1]"
	})
	reader := &caller{T: t, Driver: newDriver(t, s.Where(), ""), shared: true}
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
	s := pgtest.Start(t)
	waiter := line(t, s, "xx")[1]
	s.Must(t, `UPDATE hasp_locks SET waiters = waiters || (SELECT array_agg(i::bigint) FROM generate_series(1, 99) i),
		ends = (clock_timestamp() + interval '1 s') || array_fill(clock_timestamp() + interval '2500 ms', ARRAY[99])`)
	time.Sleep(100 * time.Millisecond) // an answer may be given again for half of this time
	if waiter.ask() {
		t.Fatal("got the key")
	}
	s.Must(t, `SELECT 1 / (SELECT count(*)::int FROM hasp_locks WHERE ends[1] > clock_timestamp() + interval '1500 ms')`)

	s.Must(t, `UPDATE hasp_locks SET ends = array_fill(clock_timestamp() - interval '1 s', ARRAY[100])`)
	time.Sleep(100 * time.Millisecond)
	if waiter.ask() {
		t.Fatal("got the key")
	}
	s.Must(t, `SELECT 1 / (SELECT count(*)::int FROM hasp_locks WHERE cardinality(waiters) = 1)`)
}

// A table of an older hasp is refused with what to do.
func TestOlderTable(t *testing.T) {
	t.Parallel()
	s := pgtest.Shared(t)
	s.Must(t, "CREATE TABLE hasp_locks (key bytea PRIMARY KEY, writer_until timestamptz)")
	_, err := hasp.Open(t.Context(), urlOf(s.Where(), ""), patient)
	clear(t, err, "older hasp", "DROP TABLE")
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
