package hasp_test

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/memlock"
)

// listOf returns the entries of a list, ordered by key, and its error.
func listOf(c *hasp.Client, ctx context.Context, prefix string) (all []backend.Entry, err error) {
	for e, err := range c.List(ctx, prefix) {
		if err != nil {
			return all, err
		}
		all = append(all, e)
	}
	slices.SortFunc(all, func(a, b backend.Entry) int { return slices.Compare([]byte(a.Key), []byte(b.Key)) })
	return all, nil
}

func TestListOfADriverThatIsNoLister(t *testing.T) {
	_, err := listOf(opened(t, plainDriver{memlock.NewDriver()}, nil), t.Context(), "p")
	want(t, "list", err, errors.ErrUnsupported)
	wantOf(t, err, "list", "p")
}

// lister yields two entries, and then the error of next, if there is one. It counts its steps.
type lister struct {
	backend.Driver
	ends  backend.Cancellation
	steps *int
	next  func(ctx context.Context) error
}

func (d lister) Traits() backend.Traits {
	return backend.Traits{Reach: backend.Network, Cancellation: d.ends}
}

func (d lister) List(ctx context.Context, _ string, _ time.Duration) iter.Seq2[backend.Entry, error] {
	return func(yield func(backend.Entry, error) bool) {
		for range 2 {
			*d.steps++
			if !yield(backend.Entry{Key: fmt.Sprint(*d.steps)}, nil) {
				return
			}
		}
		*d.steps++
		if err := d.next(ctx); err != nil {
			yield(backend.Entry{}, err)
		}
	}
}

func TestListAsksOnlyAsTheLoopGoesOn(t *testing.T) {
	for _, ends := range everyEnd {
		runBubble(t, fmt.Sprint(ends), func(t *testing.T) {
			steps := 0
			down := errors.New("connection refused")
			c := opened(t, lister{memlock.NewDriver().(Driver), ends, &steps, func(context.Context) error { return down }}, nil)
			list := c.List(t.Context(), "")
			time.Sleep(time.Second)
			equal(t, "steps before the loop", steps, 0)
			for _, err := range list {
				want(t, "list", err, nil)
				time.Sleep(time.Second)
				equal(t, "steps during the first turn", steps, 1)
				break
			}
			time.Sleep(time.Second)
			equal(t, "steps after the loop", steps, 1)

			all, err := listOf(c, t.Context(), "")
			wantOutage(t, "list", err, down)
			equal(t, "entries before the error", len(all), 2)
		})
	}
}

// If a call hangs, List leaves it behind when the caller's context ends or the Client is closed.
func TestListIsLeft(t *testing.T) {
	for _, ends := range everyEnd {
		for how, target := range map[string]error{"cancelled": context.Canceled, "deadline": context.DeadlineExceeded, "closed": hasp.ErrClosed} {
			runBubble(t, fmt.Sprint(ends, how), func(t *testing.T) {
				steps, stuck := 0, make(chan struct{})
				c := await.Value(hasp.New(lister{memlock.NewDriver().(Driver), ends, &steps, func(ctx context.Context) error {
					if ends == backend.CancelPrompt {
						<-ctx.Done()
						return ctx.Err()
					}
					<-stuck
					return errors.New("late")
				}}, &hasp.Options{Timeout: time.Minute}))
				why := errors.New("enough")
				ctx, cancel := context.WithCancelCause(t.Context())
				switch how {
				case "cancelled":
					time.AfterFunc(time.Second, func() { cancel(why) })
				case "deadline":
					ctx = timeout(t, ctx, time.Second)
				case "closed":
					time.AfterFunc(time.Second, func() { c.Close() })
				}
				defer cancel(nil)
				began := time.Now()
				_, err := listOf(c, ctx, "")
				wantOnly(t, "list", err, target)
				equal(t, "the time it took", time.Since(began), time.Second)
				if how == "cancelled" {
					want(t, "the cause", err, why)
				}
				close(stuck)
				c.Close()
				want(t, "list after Close", errOf(listOf(c, t.Context(), "")), hasp.ErrClosed)
			})
		}
	}
}

// The loop's body may call the Client. It may even call Close, which ends the list and does not
// wait for the loop.
func TestCloseDuringAList(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := await.Value(memlock.New(nil))
		for i := range 3 {
			lockNow(t, c, fmt.Sprint(i), hasp.WithMaxHold(time.Second))
		}
		turns, last := 0, error(nil)
		for _, err := range c.List(t.Context(), "") {
			turns, last = turns+1, err
			if turns == 1 { // the list does not keep the store locked
				want(t, "Inspect", errOf(c.Inspect(t.Context(), "0")), nil)
			}
			c.Close()
		}
		equal(t, "turns", turns, 2)
		want(t, "list", last, hasp.ErrClosed)
	})
}
