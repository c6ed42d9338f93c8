package hasptest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp/internal/await"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/conformance"
	"github.com/hasplock/hasp/memlock"
)

// A service sees what it would see of a real store only if the driver keeps the contract, also
// during an outage.
func TestConformance(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := new(memlock.Store)
		var mu sync.Mutex
		links := map[string]*link{"": newLink(time.Minute)} // by the address of the store
		each := func(f func(*link)) {
			mu.Lock()
			defer mu.Unlock()
			for _, l := range links {
				f(l)
			}
		}
		h := conformance.Harness{
			// Other clauses start processes.
			Only: func(clause string) bool { return clause != "reach" && !strings.HasPrefix(clause, "process-") },
			Open: func(_ context.Context, store string) (backend.Driver, error) {
				mu.Lock()
				defer mu.Unlock()
				return newDriver(s, links[store]), nil
			},
			Stop: func(context.Context, string) error { each(func(l *link) { l.set(true, 0) }); return nil },
			Start: func(_ context.Context, _ string, data bool) error {
				if !data {
					return errors.ErrUnsupported
				}
				each(func(l *link) { l.set(false, 0) })
				return nil
			},
			Link: func(context.Context, string) (*conformance.Link, error) {
				mu.Lock()
				defer mu.Unlock()
				l := newLink(time.Minute)
				addr := fmt.Sprint(len(links))
				links[addr] = l
				return &conformance.Link{Store: addr, Close: func() {}, Set: func(s conformance.LinkState) {
					delay := map[conformance.LinkState]time.Duration{conformance.Slow: conformance.Delay, conformance.Deaf: time.Hour, conformance.Hung: time.Hour}
					l.set(s == conformance.Down, delay[s])
				}}, nil
			},
		}
		await.Must(t, conformance.Check(t.Context(), h, func(r conformance.Result) {
			t.Log(r.Status, r.Name, r.Reason)
			if r.Status == "fail" {
				t.Errorf("%s: %v", r.Name, r.Err)
			}
		}))
	})
}

// A lease ends with its term while the store is down. A call without an answer leaves nothing
// behind.
func TestSwitches(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := New(&hasp.Options{TTL: 10 * time.Second, Timeout: time.Second, Prefix: "app:"})
		b := a.Another(&hasp.Options{Prefix: "app:"})
		lease := await.Value(a.Lock(t.Context(), "k"))
		a.Down()
		<-lease.Context().Done()
		var lost *hasp.LostError
		if errors.As(lease.Err(), &lost); lost == nil || lost.Reason != hasp.LostUnanswered || !strings.Contains(lost.Error(), "down") {
			t.Errorf("after a term without a store: %v", lease.Err())
		}

		a.Delay(100 * time.Millisecond)
		began := time.Now()
		if _, err := a.Lock(t.Context(), "m"); err != nil || time.Since(began) != 100*time.Millisecond {
			t.Errorf("with a delay: %v after %v", err, time.Since(began))
		}
		a.Delay(time.Hour)
		await.ErrorIs(t, "without an answer",
			await.ErrorOf(a.TryLock(t.Context(), "k")), hasp.ErrUnavailable)
		a.Up()
		time.Sleep(3 * time.Second) // the release of the unanswered call is repeated
		release := b.Hold("k")
		await.ErrorIs(t, "a key of another program",
			await.ErrorOf(a.TryLock(t.Context(), "k")), hasp.ErrHeld)
		for name, f := range map[string]func(){"Hold of a held key": func() { a.Hold("k") }, "Lose of a free key": func() { a.Lose("free") }} {
			func() {
				defer func() {
					if recover() == nil {
						t.Errorf("%s does not panic", name)
					}
				}()
				f()
			}()
		}

		// Calls that are in flight when the link is cut.
		a.Delay(100 * time.Millisecond)
		time.AfterFunc(50*time.Millisecond, a.Down)
		await.ErrorIs(t, "a call that is cut off",
			await.ErrorOf(a.TryLock(t.Context(), "n")), hasp.ErrUnavailable)
		release()
		a.Delay(time.Hour)
		d := newDriver(a.store, a.link)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		began = time.Now()
		if _, err := d.Wait(ctx, backend.Claim{Key: "app:k", Token: "t", Timeout: time.Second}); err == nil || time.Since(began) != time.Second {
			t.Errorf("Wait without an answer: %v after %v", err, time.Since(began))
		}
		cancel()
		a.Up()
		d.Renew(ctx, []backend.Claim{{Key: "app:k", Token: "t"}}, func(_ int, _ backend.Grant, err error) {
			if err == nil {
				t.Error("Renew after the end of its context reports a grant")
			}
		})
		a.Close()
		b.Close()
	})
}
