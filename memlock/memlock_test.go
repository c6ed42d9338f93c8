package memlock

import (
	"context"
	"errors"
	"fmt"
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
	})
}
