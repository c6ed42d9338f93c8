package caslock_test

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/caslock"
	"github.com/hasplock/hasp/caslock/internal/memkv"
	"github.com/hasplock/hasp/conformance"
	"github.com/hasplock/hasp/internal/await"
)

// TestConformance is with Watch. TestConformanceHash is without, and a version is a hash of the
// value.
func TestConformance(t *testing.T) {
	t.Parallel()
	mem := memkv.New()
	conform(t, mem, mem)
}

func TestConformanceHash(t *testing.T) {
	t.Parallel()
	mem := memkv.New()
	mem.Hash = true
	conform(t, mem, struct{ caslock.Store }{mem})
}

func conform(t *testing.T, mem *memkv.Store, store caslock.Store) {
	janitor := open(t, mem)
	conformance.Run(t, conformance.Harness{
		Open: func(ctx context.Context, _ string) (backend.Driver, error) {
			return caslock.NewDriver(ctx, store)
		},
		Commands: func(context.Context, string) (int64, error) { return mem.Calls.Load(), nil },
		Cost:     conformance.Cost{Acquire: 2, Refused: 1},
		Entries: func(ctx context.Context, _ string) (left []string, err error) {
			es, _, err := mem.Scan(ctx, "", 1<<30)
			for _, e := range es {
				var r struct{ Items []any }
				if err := json.Unmarshal(e.Value, &r); err != nil || len(r.Items) > 0 {
					left = append(left, fmt.Sprintf("%s %v", e.Value, err))
				}
			}
			return left, err
		},
		// A sweep removes what an earlier one has seen for a whole term.
		Sweep: func(ctx context.Context, _ string) error { return caslock.Sweep(ctx, janitor) },
	})
}

// racing compares the version first, and writes later.
type racing struct{ *memkv.Store }

func (s racing) Put(
	ctx context.Context, key string, value []byte, version string,
) (string, error) {
	e, err := s.Get(ctx, key)
	if err != nil || e.Version != version {
		return "", cmp.Or(err, caslock.ErrConflict)
	}
	time.Sleep(2 * time.Millisecond)

	for err = caslock.ErrConflict; errors.Is(err, caslock.ErrConflict); {
		e = await.Value(s.Get(ctx, key))
		version, err = s.Store.Put(ctx, key, value, e.Version)
	}
	return version, err
}

// crude is a store whose Delete is of no use.
type crude struct {
	*memkv.Store
	fault   string
	calls   int
	deleted map[string]bool
}

func (s *crude) Delete(ctx context.Context, name, version string) error {
	s.calls++
	s.deleted[name] = true
	switch s.fault {
	case "there is no Delete":
		return errors.ErrUnsupported
	case "it ignores the version":
		version = await.Value(s.Get(ctx, name)).Version
	}
	return s.Store.Delete(ctx, name, version)
}

func (s *crude) Put(ctx context.Context, name string, value []byte, at string) (string, error) {
	if at == "" && s.deleted[name] && s.fault == "no name can be created again" {
		return "", caslock.ErrConflict
	}
	return s.Store.Put(ctx, name, value, at)
}

// Such a store is served, and only New deletes.
func TestNoConditionalDelete(t *testing.T) {
	faults := []string{
		"there is no Delete", "it ignores the version", "no name can be created again",
	}
	for _, fault := range faults {
		synctest.Test(t, func(t *testing.T) {
			s := &crude{Store: memkv.New(), fault: fault, deleted: map[string]bool{}}
			d := open(t, struct{ caslock.Store }{s})
			probes := s.calls
			for i := range 5000 {
				c := claim(fmt.Sprint(i), "t")
				await.Value(d.Acquire(t.Context(), c))
				await.Must(t, d.Release(t.Context(), c))
				time.Sleep(time.Second)
			}
			if s.calls != probes {
				t.Errorf("%s: %d deletes, %d of them by New", fault, s.calls, probes)
			}
		})
	}
}

// repeating gives a value the version of the one before, once it is on.
type repeating struct {
	*memkv.Store
	on bool
}

func (s *repeating) Put(ctx context.Context, key string, value []byte, at string) (string, error) {
	version, err := s.Store.Put(ctx, key, value, at)
	if s.on {
		version = at
	}
	return version, err
}

func TestStoresThatCannotKeepLocks(t *testing.T) {
	await.ErrorIs(t, "no store",
		await.ErrorOf(caslock.New(t.Context(), nil, nil)), backend.ErrInvalid)
	await.ErrorIs(t, "a nil pointer",
		await.ErrorOf(caslock.New(t.Context(), (*memkv.Store)(nil), nil)), backend.ErrInvalid)
	synctest.Test(t, func(t *testing.T) {
		_, err := caslock.NewDriver(t.Context(), racing{memkv.New()})
		if !errors.Is(err, backend.ErrInvalid) || !strings.Contains(err.Error(), "atomic") {
			t.Errorf("a store that compares first and writes later: %v", err)
		}
	})

	s := &repeating{Store: memkv.New()}
	d := open(t, s)
	await.Value(d.Acquire(t.Context(), claim("key", "token")))
	s.on = true
	err := d.Release(t.Context(), claim("key", "token"))
	if err == nil || backend.Definite(err) || !strings.Contains(err.Error(), "version") {
		t.Errorf("a version that repeats: %v, want an unknown outcome that names it", err)
	}
}

// An outage is no answer: New reports it at each step of its probe, and Inspect does not take the key
// for a free one.
func TestOutage(t *testing.T) {
	var left atomic.Int64
	mem := memkv.New()
	open(t, mem)
	probe := int(mem.Calls.Load())
	mem.Fault = func(string) memkv.Fault { return memkv.Fault{Lost: left.Add(-1) < 0} }
	for steps := range probe {
		left.Store(int64(steps))
		if _, err := caslock.New(t.Context(), mem, nil); !errors.Is(err, memkv.ErrLost) || backend.Definite(err) {
			t.Errorf("an outage after %d calls of New: %v", steps, err)
		}
	}
	left.Store(int64(probe))
	d := open(t, mem)
	if s, err := d.(backend.Inspector).Inspect(t.Context(), "key"); !errors.Is(err, memkv.ErrLost) {
		t.Errorf("Inspect in an outage: %v, %v", s, err)
	}

	// A renewal that has failed leaves nothing behind.
	await.ErrorIs(t, "a renewal in an outage",
		renew(t.Context(), d, claim("key", "token")), memkv.ErrLost)
	if n := caslock.Renewals(d); n > 0 {
		t.Errorf("%d renewals are left after an outage", n)
	}
}

// claim returns a claim for a minute.
func claim(key, token string) backend.Claim {
	return backend.Claim{Key: key, Token: token, TTL: time.Minute, Timeout: time.Minute}
}

// renew renews the hold of c.
func renew(ctx context.Context, d backend.Driver, c backend.Claim) (err error) {
	d.Renew(ctx, []backend.Claim{c}, func(_ int, _ backend.Grant, e error) { err = e })
	return err
}

func open(t *testing.T, s caslock.Store) backend.Driver {
	t.Helper()
	return await.Value(caslock.NewDriver(t.Context(), s))
}

// A writer that waits for readers does not wake itself by the writes of its intent. When it gives
// up, its intent goes, also if a reader of the same Client came at the same time.
func TestAWriterThatWaitsForReaders(t *testing.T) {
	for range 30 {
		synctest.Test(t, func(t *testing.T) {
			ctx, mem := t.Context(), memkv.New()
			mem.Fault = func(string) memkv.Fault {
				return memkv.Fault{Request: time.Millisecond/2 + rand.N(time.Millisecond), Reply: rand.N(time.Millisecond)}
			}
			c, other := await.Value(caslock.New(ctx, mem, nil)), await.Value(caslock.New(ctx, mem, nil))
			first := await.Value(other.Lock(ctx, "key", hasp.WithShared()))
			before := mem.Calls.Load()
			var callers sync.WaitGroup
			callers.Go(func() {
				if _, err := c.Lock(ctx, "key", hasp.WithMaxWait(time.Second)); !errors.Is(err, hasp.ErrHeld) {
					t.Error(err)
				}
			})
			callers.Go(func() {
				time.Sleep(rand.N(2 * time.Millisecond))
				if l, err := c.Lock(ctx, "key", hasp.WithShared(), hasp.WithMaxWait(200*time.Millisecond)); err == nil {
					await.Must(t, l.Unlock(ctx))
				}
			})
			callers.Wait()
			if calls := mem.Calls.Load() - before; calls > 60 {
				t.Errorf("%d calls in 1 s", calls)
			}
			time.Sleep(100 * time.Millisecond)
			second := await.Value(other.TryLock(ctx, "key", hasp.WithShared()))
			await.Must(t, errors.Join(second.Unlock(ctx), first.Unlock(ctx), c.Close(), other.Close()))
		})
	}
}

// A value that another program has written is never replaced.
func TestForeignValue(t *testing.T) {
	for _, value := range []string{"", "hello", `"text"`, "{}", `{"key":"b3RoZXI=","write":1}`} {
		mem := memkv.New()
		d, ctx := open(t, mem), t.Context()
		c := claim("key", "token")
		await.Value(d.Acquire(ctx, c))
		e, _ := mem.Get(ctx, "key")
		await.Value(mem.Put(ctx, "key", []byte(value), e.Version))

		for _, err := range []error{renew(ctx, d, c), d.Release(ctx, c)} {
			if !errors.Is(err, backend.ErrLost) {
				t.Errorf("%q: renewal or release of the hold that was there: %v", value, err)
			}
		}
		c.Token = "next"
		if _, err := d.Acquire(ctx, c); !errors.Is(err, backend.ErrInvalid) || !strings.Contains(err.Error(), "another program") {
			t.Errorf("%q: acquire: %v", value, err)
		}
		if err := d.(backend.Inspector).Break(ctx, "key"); err == nil {
			t.Errorf("%q: break returned no error", value)
		}
		for entry, err := range d.(backend.Lister).List(ctx, "", time.Second) {
			t.Errorf("%q: list: %v %v", value, entry, err)
		}
		if e, _ := mem.Get(ctx, "key"); string(e.Value) != value {
			t.Errorf("%q was replaced by %q", value, e.Value)
		}
	}
}

// A hold that the store's clock knows to be old is free to a driver that has never seen it.
func TestAge(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mem := memkv.New()
		c := claim("key", "dead")
		await.Value(open(t, mem).Acquire(t.Context(), c))
		for _, age := range []time.Duration{0, 59 * time.Second, 61 * time.Second} {
			_, err := open(t, reads{mem, func(e *caslock.Entry) { e.Age = age }}).
				Acquire(t.Context(), claim("key", "next"))
			if free := age > c.TTL; errors.Is(err, backend.ErrHeld) == free {
				t.Errorf("age %v: %v", age, err)
			}
		}
	})
}

// Other keys of a busy process do not make it forget a hold that it watches.
func TestATakeOverBesideManyKeys(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mem, ctx := memkv.New(), t.Context()
		c := claim("key", "dead")
		await.Value(open(t, mem).Acquire(ctx, c))
		d := open(t, mem)
		c.Token = "next"
		if _, err := d.Acquire(ctx, c); !errors.Is(err, backend.ErrHeld) {
			t.Error(err)
		}
		for i := range 50_000 {
			await.Value(d.(backend.Inspector).Inspect(ctx, fmt.Sprint("free", i)))
		}
		time.Sleep(c.TTL)
		if _, err := d.Acquire(ctx, c); err != nil {
			t.Errorf("a term after the first attempt: %v", err)
		}
	})
}

// reads is a store as one process reads it: change changes each entry that is read.
type reads struct {
	*memkv.Store
	change func(e *caslock.Entry)
}

func (s reads) Get(ctx context.Context, key string) (caslock.Entry, error) {
	e, err := s.Store.Get(ctx, key)
	s.change(&e)
	return e, err
}

func ExampleNew() {
	ctx := context.Background()
	store := memkv.New() // a program has an adapter here
	locks, err := caslock.New(ctx, store, &hasp.Options{TTL: 10 * time.Second})
	if err != nil {
		panic(err)
	}
	defer locks.Close()
	err = hasp.Do(ctx, locks, "nightly", func(context.Context, *hasp.Lease) error {
		fmt.Println("only one process prints this at a time")
		return nil
	})
	if err != nil {
		panic(err)
	}
	// Output: only one process prints this at a time
}
