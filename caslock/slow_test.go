package caslock_test

import (
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/caslock"
	"github.com/hasplock/hasp/caslock/internal/memkv"
	"github.com/hasplock/hasp/internal/await"
)

// A request that takes longer than a try of a renewal is still answered, and the answer counts.
func TestLeasesInASlowStore(t *testing.T) {
	const ttl = 10 * time.Second
	for _, trip := range []time.Duration{ttl * 15 / 100, ttl / 5} {
		synctest.Test(t, func(t *testing.T) {
			store := &network{Store: memkv.New()}
			o := &hasp.Options{TTL: ttl, Timeout: ttl}
			var delay atomic.Int64
			store.Fault = func(string) memkv.Fault {
				return memkv.Fault{Reply: time.Duration(delay.Load())}
			}
			c := await.Value(caslock.New(t.Context(), store, o))

			lost := 0
			for range 20 {
				delay.Store(0)
				l := await.Value(c.Lock(t.Context(), "key"))
				delay.Store(int64(trip))
				time.Sleep(10 * ttl)
				if l.Unlock(t.Context()) != nil {
					lost++
				}
			}
			await.Must(t, c.Close())
			time.Sleep(trip) // the store carries out what was sent
			if lost > 0 {
				t.Errorf("trip %v of a term of %v: %d of 20 leases lost", trip, ttl, lost)
			}
		})
	}
}

// A library or a proxy sends a Put twice, and returns the answer to the second.
func TestRepeatedPuts(t *testing.T) {
	for _, opts := range [][]hasp.Option{nil, {hasp.WithMinHold(time.Hour)}, {hasp.WithShared()}} {
		synctest.Test(t, func(t *testing.T) {
			mem, ctx := memkv.New(), t.Context()
			c := await.Value(caslock.New(ctx, mem, nil))
			mem.Fault = func(op string) memkv.Fault { return memkv.Fault{Twice: op == "put"} }

			began := time.Now()
			l := await.Value(c.Lock(ctx, "key", opts...))
			await.Must(t, errors.Join(l.Extend(ctx, time.Minute), l.Unlock(ctx)))
			if took := time.Since(began); took > time.Second {
				t.Errorf("three calls took %v", took)
			}
			await.Must(t, c.Close())
		})
	}
}

// A writer that waits for readers asks at the pace of Backoff, if the store is no Watcher. It gets
// the key nevertheless, although other readers come, whose clocks are ahead.
func TestAWriterKeepsThePaceOfBackoff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mem, ctx := memkv.New(), t.Context()
		o := &hasp.Options{Backoff: func(int) time.Duration { return 5 * time.Second }}
		early := ahead(mem, 31*time.Second)
		readers := await.Value(caslock.New(ctx, struct{ caslock.Store }{early}, o))
		writer := await.Value(caslock.New(ctx, struct{ caslock.Store }{mem}, o))
		first := await.Value(readers.Lock(ctx, "key", hasp.WithShared(), hasp.WithTTL(time.Hour)))

		before := mem.Calls.Load()
		_, err := writer.Lock(ctx, "key", hasp.WithMaxWait(time.Minute))
		calls := mem.Calls.Load() - before
		if !errors.Is(err, hasp.ErrHeld) || calls > 40 {
			t.Errorf("%d calls in a minute: %v", calls, err)
		}

		go func() {
			for range 200 {
				second, err := readers.TryLock(ctx, "key", hasp.WithShared())
				await.Must(t, first.Unlock(ctx))
				if err != nil {
					second = await.Value(readers.Lock(ctx, "key", hasp.WithShared()))
				}
				time.Sleep(time.Second)
				first = second
			}
			await.Must(t, first.Unlock(ctx))
		}()
		l, err := writer.Lock(ctx, "key", hasp.WithMaxWait(time.Minute))
		await.Must(t, err)
		await.Must(t, errors.Join(l.Unlock(ctx), writer.Close()))
		time.Sleep(5 * time.Minute) // until the readers have gone
		await.Must(t, readers.Close())
	})
}

// Attempts that fail before their Put need no release. Otherwise the releases of many callers would
// keep a store busy that has just recovered.
func TestAttemptsThatSentNothingAreNotReleased(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, mem := t.Context(), memkv.New()
		store := &network{Store: mem}
		holder, waiter := await.Value(caslock.New(ctx, store, nil)), await.Value(caslock.New(ctx, store, nil))
		l := await.Value(holder.Lock(ctx, "key", hasp.WithTTL(time.Hour)))
		mem.Fault = func(string) memkv.Fault { return memkv.Fault{Lost: true} }
		before := mem.Calls.Load()
		for range 20 {
			_, err := waiter.TryLock(ctx, "key")
			await.ErrorIs(t, "TryLock in an outage", err, hasp.ErrUnavailable)
		}
		time.Sleep(10 * time.Second)
		mem.Fault = nil
		time.Sleep(time.Minute)
		if n := mem.Calls.Load() - before; n != 20 {
			t.Errorf("%d calls of 20 attempts", n)
		}
		await.Must(t, errors.Join(l.Unlock(ctx), holder.Close(), waiter.Close()))
	})
}
