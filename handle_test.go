package hasp_test

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

// A renewal and a release get the handle that the last grant gave. A nil handle of a
// renewal keeps the one before.
func TestHandleIsPassedBack(t *testing.T) {
	withClient(t, nil, func(t *testing.T, f *faulty, c *hasp.Client) {
		var seen []any
		gives := []any{"second", nil, "third"}
		f.acquire = func(c backend.Claim, send func() (backend.Grant, error)) (backend.Grant, error) {
			seen = append(seen, c.Handle)
			g, err := send()
			g.Handle = "first"
			return g, err
		}
		f.renew = func(_ context.Context, c backend.Claim, send func() (backend.Grant, error)) (backend.Grant, error) {
			seen = append(seen, c.Handle)
			g, err := send()
			g.Handle, gives = gives[0], gives[1:]
			return g, err
		}
		f.release = func(c backend.Claim, send func() error) error {
			seen = append(seen, c.Handle)
			return send()
		}

		l := lockNow(t, c, "k")
		for range 3 {
			want(t, "Extend", l.Extend(t.Context(), time.Minute), nil)
		}
		want(t, "Unlock", l.Unlock(t.Context()), nil)
		if !slices.Equal(seen, []any{nil, "first", "second", "second", "third"}) {
			t.Errorf("calls with the handles %v", seen)
		}
	})
}

// A grant that arrives after its caller has left is released with its handle. So is one
// that arrives after the end of its term.
func TestLateGrantIsReleasedWithItsHandle(t *testing.T) {
	for what, late := range map[string]time.Duration{"left": 2 * time.Second, "too late": 25 * time.Second} {
		t.Run(what, func(t *testing.T) {
			withClient(t, &hasp.Options{TTL: 20 * time.Second, Timeout: time.Minute}, func(t *testing.T, f *faulty, c *hasp.Client) {
				var seen []any
				f.acquire = func(_ backend.Claim, send func() (backend.Grant, error)) (backend.Grant, error) {
					time.Sleep(late)
					g, err := send()
					g.Handle, g.Until = "late", time.Time{}
					return g, err
				}
				f.release = func(c backend.Claim, send func() error) error {
					seen = append(seen, c.Handle)
					return send()
				}
				ctx := t.Context()
				if what == "left" {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, time.Second)
					defer cancel()
				}
				if err := errOf(c.TryLock(ctx, "k")); what == "left" {
					want(t, "TryLock", err, context.DeadlineExceeded)
				} else {
					wantOutage(t, "TryLock", err)
				}
				time.Sleep(2 * time.Minute)
				synctest.Wait()
				if len(seen) == 0 || seen[0] != "late" {
					t.Errorf("releases with the handles %v, want the grant's", seen)
				}
			})
		})
	}
}
