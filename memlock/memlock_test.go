package memlock

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
)

func claim(key, token string) backend.Claim {
	return backend.Claim{Key: key, Token: token, Owner: "owner of " + token, TTL: 10 * time.Second, Timeout: time.Second}
}

func acquire(t *testing.T, d *driver, c backend.Claim) {
	t.Helper()
	_, err := d.Acquire(t.Context(), c)
	await.Must(t, err)
}

func release(t *testing.T, d *driver, c backend.Claim) {
	t.Helper()
	await.Must(t, d.Release(t.Context(), c))
}

// wait begins a Wait, and returns a channel that receives its error.
func wait(t *testing.T, d *driver, c backend.Claim) <-chan error {
	ended := make(chan error)
	go func() { _, err := d.Wait(t.Context(), c); ended <- err }()
	return ended
}

// want fails the test unless err matches target, or is nil if target is nil.
func want(t *testing.T, what string, err, target error) {
	t.Helper()
	if !errors.Is(err, target) {
		t.Errorf("%s: %v, want %v", what, err, target)
	}
}

func TestKeysThatAreFreeTakeNoMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := new(Store)
		d := newDriver(s)
		for i := range 100_000 {
			c := claim(fmt.Sprint(i), "t")
			acquire(t, d, c)
			release(t, d, c)
		}
		if n := len(s.keys); n != 0 {
			t.Errorf("%d keys kept", n)
		}
		// Leases that were lost and never unlocked are swept.
		for i := range 100_000 {
			acquire(t, d, claim(fmt.Sprint(i), "t"))
			time.Sleep(10 * time.Millisecond) // so that the terms of a thousand have not ended
		}
		if n := len(s.keys); n > 5000 {
			t.Errorf("%d keys kept", n)
		}
	})
}

func TestMemoryIsGivenBackAfterManyKeysWereHeld(t *testing.T) {
	heap := func() int64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	d := newDriver(new(Store))
	before := heap()
	const n = 100_000
	for i := range n {
		c := claim(fmt.Sprint(i), "t")
		c.TTL = time.Hour // outlasts the test on any machine
		acquire(t, d, c)
	}
	held := heap() - before
	for i := range n {
		release(t, d, claim(fmt.Sprint(i), "t"))
	}
	if left := heap() - before; left > held/20 {
		t.Errorf("%d bytes of %d are left", left, held)
	}
	runtime.KeepAlive(d)
}

// A waiter gets the key, and wakes only after a Break has ended that hold and another caller has
// got the key.
func TestAWaiterThatWakesLateLeavesTheNextHoldAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := new(Store)
		d := newDriver(s)
		acquire(t, d, claim("k", "holder"))
		woken := wait(t, d, claim("k", "late"))
		synctest.Wait()

		// The waiter needs the mutex, so it cannot run before the Unlock below.
		s.mu.Lock()
		now := time.Now()
		e := s.keys["k"]
		for range 2 { // the holder's Release, which grants the key to the waiter, and a Break
			e.claim.Token = ""
			s.advanceLocked(e, now)
		}
		s.grantLocked(s.entryLocked("k", now), claim("k", "next"), now)
		s.mu.Unlock()

		want(t, "the wait", <-woken, nil)
		_, err := d.Acquire(t.Context(), claim("k", "third"))
		want(t, "while the next one holds the key", err, backend.ErrHeld)
		release(t, d, claim("k", "next"))
	})
}

func TestNamedStoresAreShared(t *testing.T) {
	open := func(url string) *hasp.Client {
		c := await.Value(hasp.Open(t.Context(), url, nil))
		t.Cleanup(func() { c.Close() })
		return c
	}
	a, b, other := open("memlock://x"), open("memlock://x"), open("memlock://y")
	for _, c := range []struct {
		what string
		c    *hasp.Client
		want error
	}{{"first", a, nil}, {"the same name", b, hasp.ErrHeld}, {"another name", other, nil}} {
		l, err := c.c.TryLock(t.Context(), "k")
		want(t, c.what, err, c.want)
		if err == nil {
			defer l.Unlock(t.Context())
		}
	}
}

func TestCloseEndsWaitsOfThatDriverOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := new(Store)
		a, b := newDriver(s), newDriver(s)
		a.Acquire(t.Context(), claim("k", "holder"))
		ended := wait(t, a, claim("k", "1"))
		served := wait(t, b, claim("k", "2"))
		synctest.Wait()
		a.Close()
		want(t, "a wait of the closed driver", <-ended, errClosed)
		want(t, "a wait of the other", <-served, nil)
		_, err := a.Acquire(t.Context(), claim("other", "3"))
		want(t, "Acquire after Close", err, errClosed)
		_, err = a.Inspect(t.Context(), "k")
		want(t, "Inspect after Close", err, errClosed)
	})
}

// The key is held until the last term of a reader ends, whichever readers leave, renew or die.
func TestLastTermOfTheReaders(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDriver(new(Store))
		r := rand.New(rand.NewPCG(1, 2))
		ends := map[string]time.Time{} // ends of the terms of the readers that have not left
		for i := range 5000 {
			c := claim("k", fmt.Sprint(r.IntN(40)))
			c.Shared, c.TTL = true, time.Second+rand.N(10*time.Second)
			switch end, reads := ends[c.Token]; {
			case !reads:
				acquire(t, d, c)
				ends[c.Token] = time.Now().Add(c.TTL)
			case !time.Now().Before(end):
				want(t, "Release after the term", d.Release(t.Context(), c), backend.ErrLost)
				delete(ends, c.Token)
			case r.IntN(3) == 0:
				await.Value(d.renew(c))
				ends[c.Token] = later(end, time.Now().Add(c.TTL))
			default:
				release(t, d, c)
				delete(ends, c.Token)
			}

			var last time.Duration
			for _, end := range ends {
				last = max(last, time.Until(end))
			}
			if st, _ := d.Inspect(t.Context(), "k"); st.TTL != last || st.Held != (last > 0) {
				t.Fatalf("step %d: %+v, want %v", i, st, last)
			}
			time.Sleep(rand.N(200 * time.Millisecond))
		}
	})
}
