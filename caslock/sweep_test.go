package caslock_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/caslock"
	"github.com/hasplock/hasp/caslock/internal/memkv"
	"github.com/hasplock/hasp/internal/await"
)

// network is a store in another host, as far as the engine knows. It counts the deletes.
type network struct {
	*memkv.Store
	deletes, most atomic.Int64 // in flight, and the most in flight so far
}

func (*network) Limits() (backend.Reach, backend.Cancellation) {
	return backend.Network, backend.CancelPrompt
}

func (n *network) Delete(ctx context.Context, name, version string) error {
	now := n.deletes.Add(1)
	defer n.deletes.Add(-1)
	n.most.Store(max(n.most.Load(), now))
	return n.Store.Delete(ctx, name, version)
}

// No Unlock waits for a sweep, and sweeps keep up with keys that are used once. When Close returns,
// no sweep is left.
func TestKeysUsedOnce(t *testing.T) {
	const (
		keys = 10_000
		trip = 50 * time.Millisecond
	)
	synctest.Test(t, func(t *testing.T) {
		ctx, store := t.Context(), &network{Store: memkv.New()}
		store.Fault = func(string) memkv.Fault { return memkv.Fault{Reply: trip} }
		c := await.Value(caslock.New(ctx, store, nil))

		most := 0
		var took []time.Duration
		idle := func() bool { return store.deletes.Load() == 0 }
		for n := 0; n < keys || n < 2*keys && idle(); n++ { // ends in the middle of a sweep
			l := await.Value(c.Lock(ctx, fmt.Sprint("order-", n)))
			began := time.Now()
			await.Must(t, l.Unlock(ctx))
			took = append(took, time.Since(began))
			if n%100 == 0 {
				es, _, _ := store.Scan(ctx, "", keys)
				most = max(most, len(es))
			}
		}
		await.Must(t, c.Close())
		if n := store.deletes.Load(); n > 0 {
			t.Errorf("%d deletes in flight after Close", n)
		}

		time.Sleep(trip) // the store carries out what was sent

		longest := slices.Max(took)
		t.Logf("the longest Unlock took %v, %d records at most", longest, most)
		if longest > 2*trip || most > 2000 || store.most.Load() > 16 {
			t.Errorf("longest %v, %d records, %d deletes at a time", longest, most, store.most.Load())
		}
	})
}

// oneByOne reads the entries of a Scan one after another.
type oneByOne struct {
	network
	trip time.Duration
}

func (s *oneByOne) Scan(
	ctx context.Context, position string, n int,
) ([]caslock.Entry, string, error) {
	es, next, err := s.Store.Scan(ctx, position, n)
	select {
	case <-time.After(s.trip * time.Duration(1+len(es))):
		return es, next, err
	case <-ctx.Done():
		return nil, "", ctx.Err()
	}
}

func TestListOfASlowStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, s := t.Context(), &oneByOne{network: network{Store: memkv.New()}}
		d := open(t, s)
		for i := range 10_000 {
			c := claim(fmt.Sprint(i), "t")
			c.TTL = time.Hour
			await.Value(d.Acquire(ctx, c))
		}

		s.trip = 60 * time.Millisecond
		c := await.Value(caslock.New(ctx, s, nil))
		defer c.Close()
		n := 0
		for _, err := range c.List(ctx, "") {
			await.Must(t, err)
			n++
		}
		if n != 10_000 {
			t.Errorf("%d keys listed", n)
		}
	})
}

func TestNamesAreShort(t *testing.T) {
	const longest = 300
	mem := memkv.New()
	mem.Written = func(name string, _ []byte) {
		if len(name) > 240 {
			t.Errorf("a name of %d bytes", len(name))
		}
	}
	d := open(t, mem)
	for n := range longest {
		for _, key := range []string{strings.Repeat("a", n+1), strings.Repeat("/", n) + "b"} {
			await.Value(d.Acquire(t.Context(), claim(key, "t")))
		}
	}
	if es, _, _ := mem.Scan(t.Context(), "", 1000); len(es) != 2*longest {
		t.Errorf("%d records of %d keys", len(es), 2*longest)
	}
}

// A sweep removes the hold of a dead process a term after an earlier sweep has seen it, and the
// record an hour later. Fences grow nevertheless.
func TestSweep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mem, ctx := memkv.New(), t.Context()
		d := open(t, mem)
		acquire := func(token string) uint64 {
			c := claim("key", token)
			c.Fenced = true
			return await.Value(d.Acquire(ctx, c)).Fence
		}
		entries := func() int {
			es, _, _ := mem.Scan(ctx, "", 10)
			return len(es)
		}
		fence := acquire("dead")
		other := open(t, mem)
		for i, want := range []struct {
			sleep time.Duration
			held  bool
			n     int
		}{{0, true, 1}, {59 * time.Second, true, 1}, {2 * time.Second, false, 1}, {time.Minute, false, 1}, {time.Hour, false, 0}} {
			time.Sleep(want.sleep)
			await.Must(t, caslock.Sweep(ctx, other))
			e, _ := mem.Get(ctx, "key")
			if held := strings.Contains(string(e.Value), "dead"); held != want.held || entries() != want.n {
				t.Errorf("sweep %d: held %v and %d entries, want %v and %d", i, held, entries(), want.held, want.n)
			}
		}
		if next := acquire("next"); next <= fence {
			t.Errorf("fence %d after %d", next, fence)
		}
	})
}

// forgetful lists an entry that another client has deleted meanwhile, and forgets each position, as
// an API server of Kubernetes does after some minutes.
type forgetful struct{ *memkv.Store }

func (forgetful) Scan(_ context.Context, position string, _ int) ([]caslock.Entry, string, error) {
	expired := map[string]error{"next": errors.New("the position has expired")}
	return []caslock.Entry{{}}, "next", expired[position]
}

// A sweep begins again after an error, and leaves an entry that is gone: memkv panics if it is asked
// to delete that.
func TestSweepOfAForgetfulStore(t *testing.T) {
	d := open(t, forgetful{memkv.New()})
	for i, fails := range []bool{false, true, false} {
		if err := caslock.Sweep(t.Context(), d); (err != nil) != fails {
			t.Errorf("sweep %d: %v", i, err)
		}
	}
}
