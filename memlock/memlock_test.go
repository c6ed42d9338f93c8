package memlock

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

func claim(key, token string) backend.Claim {
	return backend.Claim{Key: key, Token: token, Owner: "owner of " + token, TTL: 10 * time.Second, Timeout: time.Second}
}

func TestKeysThatAreFreeTakeNoMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := NewStore()
		d := s.Driver()
		for i := range 100_000 {
			c := claim(fmt.Sprint(i), "t")
			if _, err := d.Acquire(t.Context(), c); err != nil {
				t.Fatal(err)
			}
			if err := d.Release(t.Context(), c); err != nil {
				t.Fatal(err)
			}
		}
		if n := len(s.keys); n != 0 {
			t.Errorf("%d keys kept", n)
		}
		// Leases that were lost and never unlocked are swept.
		for i := range 100_000 {
			if _, err := d.Acquire(t.Context(), claim(fmt.Sprint(i), "t")); err != nil {
				t.Fatal(err)
			}
			time.Sleep(10 * time.Millisecond) // a thousand are live at a time
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
	d := New()
	before := heap()
	const n = 100_000
	for i := range n {
		if _, err := d.Acquire(t.Context(), claim(fmt.Sprint(i), "t")); err != nil {
			t.Fatal(err)
		}
	}
	held := heap() - before
	for i := range n {
		if err := d.Release(t.Context(), claim(fmt.Sprint(i), "t")); err != nil {
			t.Fatal(err)
		}
	}
	if left := heap() - before; left > held/20 {
		t.Errorf("%d bytes of %d are left", left, held)
	}
	runtime.KeepAlive(d)
}

func TestExpiryPassesTheKeyOnInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := New()
		if _, err := d.Acquire(t.Context(), claim("k", "dead")); err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		served := make(chan string, 3)
		for _, token := range []string{"a", "b", "c"} {
			go func() {
				if _, err := d.Wait(t.Context(), claim("k", token)); err != nil {
					t.Error(err)
				}
				served <- token
			}()
			synctest.Wait()
		}
		for i, want := range []string{"a", "b", "c"} {
			if got := <-served; got != want {
				t.Errorf("got %s, want %s", got, want)
			}
			if waited, want := time.Since(start), time.Duration(i+1)*10*time.Second; waited != want {
				t.Errorf("%s was served after %v, want %v", want, waited, want)
			}
		}
	})
}

func TestARenewalNeverShortensTheTerm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := New()
		c := claim("k", "holder")
		if _, err := d.Acquire(t.Context(), c); err != nil {
			t.Fatal(err)
		}
		short := c
		short.TTL = backend.MinTTL
		d.Renew(t.Context(), []backend.Claim{short}, func(_ int, _ backend.Grant, err error) {
			if err != nil {
				t.Error(err)
			}
		})

		time.Sleep(c.TTL - 1)
		if _, err := d.Acquire(t.Context(), claim("k", "other")); !errors.Is(err, backend.ErrHeld) {
			t.Errorf("before the end of the first term: %v, want ErrHeld", err)
		}
		time.Sleep(time.Nanosecond)
		if _, err := d.Acquire(t.Context(), claim("k", "other")); err != nil {
			t.Errorf("at the end of the first term: %v", err)
		}
	})
}

func TestTheFirstInTheQueueGivesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := New()
		d.Acquire(t.Context(), claim("k", "dead"))
		ctx, cancel := context.WithCancel(t.Context())
		gone := make(chan error)
		go func() {
			_, err := d.Wait(ctx, claim("k", "first"))
			gone <- err
		}()
		synctest.Wait()
		served := make(chan error)
		go func() {
			_, err := d.Wait(t.Context(), claim("k", "second"))
			served <- err
		}()
		synctest.Wait()
		cancel()
		if err := <-gone; !errors.Is(err, backend.ErrHeld) {
			t.Errorf("got %v", err)
		}
		if err := <-served; err != nil { // at the end of the dead one's term
			t.Error(err)
		}
	})
}

// A waiter that was granted the key may wake after the hold was broken and the
// key granted to another.
func TestAWaiterThatWakesLateLeavesTheNextHoldAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := NewStore()
		d := s.Driver()
		if _, err := d.Acquire(t.Context(), claim("k", "holder")); err != nil {
			t.Fatal(err)
		}
		woken := make(chan error)
		go func() {
			_, err := d.Wait(t.Context(), claim("k", "late"))
			woken <- err
		}()
		synctest.Wait()

		// The waiter cannot run in between, since it needs the mutex.
		s.mu.Lock()
		now := time.Now()
		s.freeLocked(s.keys["k"], now) // the holder's Release, which grants the key to the waiter
		s.freeLocked(s.keys["k"], now) // Break
		s.grantLocked(s.entryLocked("k", now), claim("k", "next"), now)
		s.mu.Unlock()

		if err := <-woken; err != nil {
			t.Error(err)
		}
		if _, err := d.Acquire(t.Context(), claim("k", "third")); !errors.Is(err, backend.ErrHeld) {
			t.Errorf("while the next one holds the key: %v, want ErrHeld", err)
		}
		if err := d.Release(t.Context(), claim("k", "next")); err != nil {
			t.Errorf("release of the next hold: %v", err)
		}
	})
}

func TestNamedStoresAreShared(t *testing.T) {
	open := func(url string) *hasp.Client {
		c, err := hasp.Open(t.Context(), url, nil)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	a, b, other := open("memlock://x"), open("memlock://x"), open("memlock://y")
	l, err := a.Lock(t.Context(), "k")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Unlock(t.Context())
	if _, err := b.TryLock(t.Context(), "k"); !errors.Is(err, hasp.ErrHeld) {
		t.Errorf("the same name: %v", err)
	}
	l2, err := other.TryLock(t.Context(), "k")
	if err != nil {
		t.Errorf("another name: %v", err)
	} else {
		l2.Unlock(t.Context())
	}
}

func TestOneOfTheQueueGivesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := New()
		if _, err := d.Acquire(t.Context(), claim("k", "dead")); err != nil {
			t.Fatal(err)
		}
		served := make(chan string)
		cancels := map[string]context.CancelFunc{}
		for _, token := range []string{"a", "b", "c", "d", "e"} {
			ctx, cancel := context.WithCancel(t.Context())
			cancels[token] = cancel
			go func() {
				if _, err := d.Wait(ctx, claim("k", token)); err == nil {
					served <- token
				} else if !errors.Is(err, backend.ErrHeld) {
					t.Errorf("%s: %v", token, err)
				}
			}()
			synctest.Wait()
		}
		for _, token := range []string{"c", "a", "e"} {
			cancels[token]()
			synctest.Wait()
		}
		for _, want := range []string{"b", "d"} {
			if got := <-served; got != want {
				t.Errorf("got %s, want %s", got, want)
			}
		}
	})
}

func TestCloseEndsWaitsOfThatDriverOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := NewStore()
		a, b := s.Driver(), s.Driver()
		a.Acquire(t.Context(), claim("k", "holder"))
		ended := make(chan error)
		go func() {
			_, err := a.Wait(t.Context(), claim("k", "1"))
			ended <- err
		}()
		served := make(chan error)
		go func() {
			_, err := b.Wait(t.Context(), claim("k", "2"))
			served <- err
		}()
		synctest.Wait()
		a.Close()
		if err := <-ended; !errors.Is(err, errClosed) {
			t.Errorf("got %v", err)
		}
		if err := <-served; err != nil {
			t.Error(err)
		}
		if _, err := a.Acquire(t.Context(), claim("other", "3")); !errors.Is(err, errClosed) {
			t.Errorf("Acquire after Close: %v", err)
		}
		if _, err := a.Inspect(t.Context(), "k"); !errors.Is(err, errClosed) {
			t.Errorf("Inspect after Close: %v", err)
		}
	})
}

func TestOpenTellsWhatIsWrong(t *testing.T) {
	for want, c := range map[string]hasp.Config{
		"memlock has no transport": {Nodes: []string{"redis://localhost"}},
		"one node":                 {Nodes: []string{"x", "y"}},
		"colour":                   {Params: hasp.Params{"colour": "red"}},
	} {
		c.Strategy = "memlock"
		d, err := c.Driver(t.Context())
		if !errors.Is(err, hasp.ErrInvalid) || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want ErrInvalid with %q", err, want)
		}
		if err == nil {
			d.Close()
		}
	}
}

// A claim that no caller of hasp makes is refused.
func TestClaimsWithoutAKeyATokenOrATerm(t *testing.T) {
	d := New()
	defer d.Close()
	for what, c := range map[string]backend.Claim{
		"no key":   {Token: "t", TTL: time.Minute},
		"no token": {Key: "k", TTL: time.Minute},
		"no term":  {Key: "k", Token: "t"},
	} {
		if _, err := d.Acquire(t.Context(), c); !errors.Is(err, backend.ErrInvalid) {
			t.Errorf("%s: got %v, want ErrInvalid", what, err)
		}
	}
}
