package fairlock_test

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/fairlock"
)

// If the counter has no fence in it, a reader that wants a fence gets an error and
// leaves nothing. The others are served.
func TestBadFenceCounterOfReaders(t *testing.T) {
	r := onServer(t)
	ctx := t.Context()
	a, c := shared(), sharedFenced()
	r.Acquire(t, a)
	r.Redis.Set(ctx, counter, "x", 0)
	for what, err := range map[string]error{"acquire": errOf(r.Driver.Acquire(ctx, c)), "wait": errOf(r.Driver.Wait(ctx, c))} {
		if !errors.Is(err, backend.ErrInvalid) {
			t.Errorf("%s: %v", what, err)
		}
	}
	r.holds(t, a)

	// In the queue, those behind it are served.
	d := r.another(t)
	x := r.wait(t, r.another(t), claim("k"), 1)
	y, z := r.wait(t, d, c, 2), r.wait(t, d, shared(), 3)
	r.Release(t, a)
	x.served(t)
	if err := <-y.done; !errors.Is(err, backend.ErrInvalid) {
		t.Errorf("got %v", err)
	}
	z.served(t)
}

// The owner of a reader may have any bytes. It comes last in members and entries.
func TestOwnersOfReadersOfAnyBytes(t *testing.T) {
	r := onServer(t)
	for _, owner := range []string{"", " ", "a b  c ", "#", "a#b", "\x00\r\n\xff", "PUBLISH x 1 1 2 y"} {
		w, c := r.hold(t), shared()
		c.Owner = owner
		x := r.wait(t, r.another(t), c, 1)
		r.Release(t, w)
		x.got(t)
		if s, err := r.Driver.Inspect(t.Context(), "k"); err != nil || !slices.Equal(s.Shared, []string{owner}) {
			t.Errorf("%q: %+v, %v", owner, s, err)
		}
		want(t, "renew", r.Renew(t, c), nil)
		x.release(t)
	}
}

// A reader that comes to a shared record passes waiters whose connections are closed, as
// a waiter for a free key does. It does not wait until their window has passed.
func TestReadersPassTheDead(t *testing.T) {
	for _, kind := range []string{"0", "2"} {
		r := onServer(t)
		ctx := t.Context()
		a, c := shared(), shared()
		r.Acquire(t, a)
		till := r.Redis.Time(ctx).Val().Add(10 * time.Second).UnixMilli()
		r.Redis.ZAdd(ctx, queueKey, redis.Z{Score: 1, Member: "dead PUBLISH hasp:grant:dead 1 60000 " + kind + " a dead one"})
		r.Redis.ZAdd(ctx, clientsKey, redis.Z{Score: float64(till), Member: "hasp:grant:dead"})
		began := time.Now()
		d := fairlock.New(r.Server.Client(), &fairlock.Options{Window: 3 * time.Second})
		t.Cleanup(func() { d.Close() })
		want(t, "wait", errOf(d.Wait(ctx, c)), nil)
		if took := time.Since(began); took > 5*time.Second {
			t.Errorf("kind %s: took %v", kind, took)
		}
		r.holds(t, a, c)
	}
}
