package redlock

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp/backend"
)

func aReader(key string) backend.Claim {
	c := aClaim(key)
	c.Shared = true
	return c
}

// refusedBy fails the test unless err says that the key is held, shared or not.
func refusedBy(t *testing.T, what string, err error, shared bool) {
	t.Helper()
	var held *backend.HeldError
	if !errors.As(err, &held) || held.Shared != shared || held.Owner == "" || held.RetryAfter <= 0 {
		t.Errorf("%s: got %#v, want held, shared %v", what, err, shared)
	}
}

// Readers hold a key together. They and a writer refuse each other.
func TestReadersShareAKey(t *testing.T) {
	for _, n := range []int{3, 5} {
		try(t, n, nil, func(t *testing.T, tr trial) {
			other := tr.direct(t, nil)
			one, two, writer := aReader("k"), aReader("k"), aFenced("k")
			one.Fenced, two.Fenced = true, true
			g1, err := tr.d.Acquire(t.Context(), one)
			if err != nil {
				t.Fatal(err)
			}
			g2, err := other.Acquire(t.Context(), two)
			if err != nil || g2.Fence <= g1.Fence {
				t.Errorf("second reader: fence %d after %d, %v", g2.Fence, g1.Fence, err)
			}
			synctest.Wait()
			_, err = tr.d.Acquire(t.Context(), writer)
			refusedBy(t, "writer", err, true)
			if s, err := tr.d.Inspect(t.Context(), "k"); err != nil || !s.Held || len(s.Shared) != 2 || s.Owner != "" {
				t.Errorf("inspect: %+v, %v", s, err)
			}
			tr.release(t, tr.d, one)
			synctest.Wait()
			_, err = tr.d.Acquire(t.Context(), writer)
			refusedBy(t, "writer after one release", err, true)
			tr.release(t, other, two)
			synctest.Wait()
			g3, err := other.Acquire(t.Context(), writer)
			if err != nil || g3.Fence <= g2.Fence {
				t.Errorf("writer: fence %d after %d, %v", g3.Fence, g2.Fence, err)
			}
			synctest.Wait()
			_, err = tr.d.Acquire(t.Context(), one)
			refusedBy(t, "reader", err, false)
			tr.release(t, other, writer)
			synctest.Wait()
			nothingLeftOf(t, tr, "k")
		})
	}
}

func nothingLeftOf(t *testing.T, tr trial, key string) {
	t.Helper()
	for i, v := range tr.vs {
		if v.Mini.Exists(key) {
			t.Errorf("node %d has %s", i, key)
		}
	}
}

// One reader's renewal does not keep another, and the shorter term does not end the longer.
func TestReadersEndByThemselves(t *testing.T) {
	try(t, 3, nil, func(t *testing.T, tr trial) {
		one, two := aReader("k"), aReader("k")
		tr.acquire(t, tr.d, one)
		tr.acquire(t, tr.d, two)
		short := aReader("k")
		short.TTL = time.Second
		tr.acquire(t, tr.d, short)
		time.Sleep(6 * time.Second)
		if err := renewOne(tr.d, one, time.Second); err != nil {
			t.Errorf("renewal: %v", err)
		}
		if err := renewOne(tr.d, short, time.Second); !errors.Is(err, backend.ErrLost) {
			t.Errorf("renewal of the ended one: %v", err)
		}
		time.Sleep(5 * time.Second)
		if err := renewOne(tr.d, two, time.Second); !errors.Is(err, backend.ErrLost) {
			t.Errorf("renewal of the dead one: %v", err)
		}
		if err := renewOne(tr.d, one, time.Second); err != nil {
			t.Errorf("renewal: %v", err)
		}
	})
}

// A node that lost its data gets a reader back next to others.
func TestReadersAreRepaired(t *testing.T) {
	try(t, 3, nil, func(t *testing.T, tr trial) {
		one, two := aReader("k"), aReader("k")
		tr.acquire(t, tr.d, one)
		tr.acquire(t, tr.d, two)
		synctest.Wait()
		tr.vs[2].Mini.Del("k")
		for _, c := range []backend.Claim{one, two} {
			if err := renewOne(tr.d, c, time.Second); err != nil {
				t.Errorf("renewal: %v", err)
			}
			synctest.Wait()
		}
		if members, err := tr.vs[2].Mini.ZMembers("k"); err != nil || len(members) != 2 {
			t.Errorf("node 2 has %q, %v", members, err)
		}
		tr.release(t, tr.d, one)
		tr.release(t, tr.d, two)
		synctest.Wait()
		nothingLeftOf(t, tr, "k")
	})
}

// A writer that waits gets the key although readers keep coming.
func TestAWriterGetsTheKeyFromReaders(t *testing.T) {
	try(t, 3, nil, func(t *testing.T, tr trial) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		readers := make(chan int, 4)
		for i := range 4 {
			d := tr.direct(t, nil)
			go func() {
				n := 0
				for ctx.Err() == nil {
					c := aReader("k")
					var err error
					if i%2 == 0 {
						_, err = d.Wait(ctx, c)
					} else {
						_, err = d.Acquire(ctx, c)
					}
					if err == nil {
						n++
						time.Sleep(50 * time.Millisecond)
						_ = d.Release(context.Background(), c)
					} else {
						time.Sleep(time.Duration(i+1) * time.Millisecond)
					}
				}
				readers <- n
			}()
		}
		time.Sleep(time.Second)
		for range 5 {
			c := aClaim("k")
			began := time.Now()
			if _, err := tr.d.Wait(ctx, c); err != nil {
				t.Errorf("writer: %v", err)
				break
			}
			if took := time.Since(began); took > time.Second {
				t.Errorf("the writer waited for %v", took)
			}
			tr.release(t, tr.d, c)
			time.Sleep(200 * time.Millisecond)
		}
		cancel()
		for i := range 4 {
			if n := <-readers; n < 5 {
				t.Errorf("reader %d got the key %d times", i, n)
			}
		}
	})
}
