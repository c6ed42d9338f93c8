package fairlock_test

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/fairlock"
	"github.com/hasplock/hasp/internal/redistest"
)

// Names beside the lock "k".
const (
	queueKey   = "hasp:{k}:queue:k"
	entriesKey = "hasp:{k}:entries:k"
	aliveKey   = "hasp:{k}:alive:k"
)

// another is one more driver on the same Redis, with a window that no test
// outlasts.
func (r rig) another(t *testing.T) *fairlock.Driver {
	d := fairlock.New(r.srv.Client(), &fairlock.Options{Window: time.Minute})
	t.Cleanup(func() { d.Close() })
	return d
}

// driver is one over a client with those options.
func (r rig) driver(t *testing.T, o *redis.Options) *fairlock.Driver {
	rdb := redis.NewClient(o)
	d := fairlock.New(rdb, nil)
	t.Cleanup(func() { d.Close(); rdb.Close() })
	return d
}

// waiting is a Wait under way.
type waiting struct {
	c     backend.Claim
	d     *fairlock.Driver
	done  chan error
	grant backend.Grant
}

// wait begins a Wait for c and returns when n wait.
func (r rig) wait(t *testing.T, d *fairlock.Driver, c backend.Claim, n int) *waiting {
	t.Helper()
	x := &waiting{c: c, d: d, done: make(chan error, 1)}
	go func() {
		var err error
		x.grant, err = d.Wait(t.Context(), c)
		x.done <- err
	}()
	r.queued(t, c.Key, n)
	return x
}

// queued returns when n wait for key.
func (r rig) queued(t *testing.T, key string, n int) {
	t.Helper()
	atLast(t, fmt.Sprintf("%d in the queue", n), func() bool {
		return r.rdb.LLen(t.Context(), "hasp:{"+key+"}:queue:"+key).Val() == int64(n)
	})
}

func (x *waiting) got(t *testing.T) backend.Grant {
	t.Helper()
	select {
	case err := <-x.done:
		if err != nil {
			t.Fatalf("wait: %v", err)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("still waits")
	}
	return x.grant
}

func (x *waiting) release(t *testing.T) {
	t.Helper()
	if err := x.d.Release(t.Context(), x.c); err != nil {
		t.Errorf("release: %v", err)
	}
}

// dead puts n entries into the queue of "k" whose clients listen to nothing,
// but have been heard of lately.
func (r rig) dead(t *testing.T, n int, how string, till time.Duration) {
	ctx := t.Context()
	now := r.rdb.Time(ctx).Val()
	pipe := r.rdb.Pipeline()
	for i := range n {
		token, channel := fmt.Sprint("dead", serial.Add(1)), fmt.Sprint("hasp:grant:dead", i)
		pipe.RPush(ctx, queueKey, token)
		pipe.HSet(ctx, entriesKey, token, how+" "+channel+" 1 60000 0 a dead one")
		pipe.ZAdd(ctx, aliveKey, redis.Z{Score: float64(now.Add(till).UnixMilli()), Member: channel})
	}
	if _, err := pipe.Exec(ctx); err != nil {
		t.Fatal(err)
	}
}

// A queue is looked at in pieces, and what is left of it by the next look.
func TestLongQueueOfTheDead(t *testing.T) {
	for _, n := range []int{31, 32, 33, 64, 200} {
		r := setup(t, nil)
		c := claim("k")
		r.acquire(t, c)
		r.dead(t, n, "PUBLISH", time.Hour)
		x := r.wait(t, r.another(t), fenced("k"), n+1)
		next := r.wait(t, r.another(t), claim("k"), n+2)
		if err := r.d.Release(t.Context(), c); err != nil {
			t.Fatal(err)
		}
		x.got(t)
		if left := r.rdb.LLen(t.Context(), queueKey).Val(); left != int64(n+1) {
			t.Errorf("%d are left in the queue, want the %d dead and one", left, n)
		}
		// From now on by what tries to take it, and by Break.
		if err := r.d.Break(t.Context(), "k"); err != nil {
			t.Error(err)
		}
		next.got(t)
		next.release(t)
		if _, err := r.d.Acquire(t.Context(), claim("k")); !errors.Is(err, backend.ErrHeld) {
			t.Errorf("acquire past %d in the queue: %v", n, err)
		}
		// And by who comes last.
		x = &waiting{c: claim("k"), d: r.another(t), done: make(chan error, 1)}
		go func() {
			_, err := x.d.Wait(t.Context(), x.c)
			x.done <- err
		}()
		x.got(t)
	}
}

// An attempt that finds a free key and many before it has the look go on.
func TestAcquireGoesOnLooking(t *testing.T) {
	r := setup(t, nil)
	c := claim("k")
	r.acquire(t, c)
	r.dead(t, 100, "PUBLISH", time.Hour)
	x := r.wait(t, r.another(t), claim("k"), 101)
	r.rdb.Del(t.Context(), "k") // nobody looks
	if _, err := r.d.Acquire(t.Context(), claim("k")); !errors.Is(err, backend.ErrHeld) {
		t.Errorf("acquire: %v", err)
	}
	x.got(t)
}

func TestEntriesWhoseTimeHasPassedAreRemoved(t *testing.T) {
	r := setup(t, nil)
	c := claim("k")
	r.acquire(t, c)
	r.dead(t, 40, "PUBLISH", -time.Second)
	if s, err := r.d.Inspect(t.Context(), "k"); err != nil || len(s.Waiters) != 0 {
		t.Errorf("inspect: %+v, %v", s, err)
	}
	if err := r.d.Release(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	atLast(t, "no queue", func() bool { return r.rdb.Exists(t.Context(), queueKey, entriesKey, aliveKey).Val() == 0 })
	r.acquire(t, claim("k"))
}

// A client that may not subscribe has entries without a way to be told: it is
// still handed the key, and finds out at its next look. If it is dead, the key
// stays blocked for a term, or for the rest of its window if that is longer.
func TestEntryThatLooks(t *testing.T) {
	r := setup(t, nil)
	c := claim("k")
	r.acquire(t, c)
	r.dead(t, 1, "-", 30*time.Second)
	if err := r.d.Release(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	s, err := r.d.Inspect(t.Context(), "k")
	if err != nil || s.Owner != "a dead one" || len(s.Waiters) != 0 || s.TTL > time.Minute || s.TTL <= 0 {
		t.Errorf("inspect: %+v, %v", s, err)
	}
}

// Redis may evict any of the keys, since each has a term.
func TestEvictionOfAPartOfTheQueue(t *testing.T) {
	t.Parallel()
	for _, gone := range []string{queueKey, entriesKey, aliveKey} {
		r := setup(t, nil)
		c := claim("k")
		r.acquire(t, c)
		d := fairlock.New(r.srv.Client(), &fairlock.Options{Window: 600 * time.Millisecond})
		x := r.wait(t, d, claim("k"), 1)
		r.rdb.Del(t.Context(), gone)
		if err := r.d.Release(t.Context(), c); err != nil {
			t.Fatal(err)
		}
		x.got(t)
		x.release(t)
		d.Close()
		if left := r.rdb.Keys(t.Context(), "*").Val(); len(left) > 0 {
			t.Errorf("without %s: %q are left", gone, left)
		}
	}
}

// An entry whose half is gone does not stop the queue.
func TestEntryOfNoUseIsRemoved(t *testing.T) {
	r := setup(t, nil)
	c := claim("k")
	r.acquire(t, c)
	r.rdb.RPush(t.Context(), queueKey, "half")
	r.rdb.RPush(t.Context(), queueKey, "odd")
	r.rdb.HSet(t.Context(), entriesKey, "odd", "odd")
	x := r.wait(t, r.another(t), claim("k"), 3)
	if s, err := r.d.Inspect(t.Context(), "k"); err != nil || len(s.Waiters) != 1 || s.Waiters[0] != x.c.Owner {
		t.Errorf("inspect: %+v, %v", s, err)
	}
	if err := r.d.Release(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	x.got(t)
	x.release(t)
}

// What is no fence is told to whoever wants one, and is in nobody else's way.
func TestFenceThatIsNotToBeHadWhileWaiting(t *testing.T) {
	invalid := func(t *testing.T, err error) {
		t.Helper()
		if !errors.Is(err, backend.ErrInvalid) || !strings.Contains(err.Error(), strconv.Quote(counter)) {
			t.Errorf("got %v", err)
		}
	}
	for name, free := range map[string]func(r rig, c backend.Claim) error{
		"by a message": func(r rig, c backend.Claim) error { return r.d.Release(t.Context(), c) },
		"in a reply": func(r rig, c backend.Claim) error { // who listens anew looks
			err := r.rdb.Del(t.Context(), "k").Err()
			if r.srv.Real() {
				r.rdb.Do(t.Context(), "client", "kill", "type", "pubsub")
				return err
			}
			return r.d.Break(t.Context(), "k")
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := setup(t, nil)
			c := claim("k")
			r.acquire(t, c)
			x := r.wait(t, r.another(t), fenced("k"), 1)
			next := r.wait(t, r.another(t), claim("k"), 2)
			r.rdb.Set(t.Context(), counter, "x", 0)
			if err := free(r, c); err != nil {
				t.Fatal(err)
			}
			next.got(t)
			next.release(t)
			select {
			case err := <-x.done:
				invalid(t, err)
			case <-time.After(20 * time.Second):
				t.Error("still waits")
			}
			_, err := r.d.Wait(t.Context(), fenced("k"))
			invalid(t, err)
			r.acquire(t, claim("k"))
		})
	}
}

// Fences grow from hold to hold, however the key was come by.
func TestFencesOfAQueue(t *testing.T) {
	r := setup(t, nil)
	c := fenced("k")
	last := r.acquire(t, c).Fence
	d := r.another(t)
	var xs []*waiting
	for i := range 4 {
		xs = append(xs, r.wait(t, d, fenced("k"), i+1))
	}
	if err := r.d.Release(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	for _, x := range xs {
		g := x.got(t)
		if s, err := r.d.Inspect(t.Context(), "k"); g.Fence <= last || s.Fence != g.Fence || s.Owner != x.c.Owner {
			t.Errorf("fence %d after %d; %+v, %v", g.Fence, last, s, err)
		}
		last = g.Fence
		x.release(t)
	}
}

// A release that is repeated finds nothing of its own, and leaves the others.
func TestReleaseOfAPlaceInTheQueue(t *testing.T) {
	r := setup(t, nil)
	c := claim("k")
	r.acquire(t, c)
	d := r.another(t)
	x, y := r.wait(t, d, claim("k"), 1), r.wait(t, d, claim("k"), 2)
	for range 2 {
		if err := r.d.Release(t.Context(), backend.Claim{Key: "k", Token: x.c.Token, Timeout: time.Second}); !errors.Is(err, backend.ErrLost) {
			t.Errorf("release of a place: %v", err)
		}
		r.queued(t, "k", 1)
	}
	if err := r.d.Release(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	y.got(t)
	y.release(t)
}

// Without memory to write in, a hold can be given back, and be handed over.
func TestReleaseWithoutMemory(t *testing.T) {
	r := setup(t, &redistest.Options{Own: true, Real: true})
	c := claim("k")
	r.acquire(t, c)
	x := r.wait(t, r.another(t), fenced("k"), 1)
	r.rdb.ConfigSet(t.Context(), "maxmemory", "1")
	if err := r.d.Release(t.Context(), c); err != nil {
		t.Errorf("release: %v", err)
	}
	x.got(t)
	x.release(t)
	if n := r.rdb.DBSize(t.Context()).Val(); n != 1 {
		t.Errorf("%d keys are left, want the counter", n)
	}
}

// A user who may not publish still hands the key over. The waiter holds the key
// until its next look, however short its term.
func TestReleaseByAUserWhoMayNotPublish(t *testing.T) {
	r := setup(t, &redistest.Options{Own: true, Real: true})
	c, short := claim("k"), claim("k")
	short.TTL = backend.MinTTL
	r.acquire(t, c)
	r.wait(t, r.another(t), short, 1) // which looks three times a minute
	if err := r.rdb.Do(t.Context(), "acl", "setuser", "default", "-publish").Err(); err != nil {
		t.Fatal(err)
	}
	if err := r.d.Release(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	if got := r.rdb.HGet(t.Context(), "k", "token").Val(); got != short.Token {
		t.Errorf("%q has the key", got)
	}
	if left := r.left(t, "k"); left < 20*time.Second {
		t.Errorf("for %v", left)
	}
}

// Nor is it in the way of a release if the queue cannot be read.
func TestReleaseThatCannotHandOver(t *testing.T) {
	r := setup(t, &redistest.Options{Own: true, Real: true})
	c := claim("k")
	r.acquire(t, c)
	if err := r.rdb.Do(t.Context(), "acl", "setuser", "default", "-lindex").Err(); err != nil {
		t.Fatal(err)
	}
	if err := r.d.Release(t.Context(), c); err != nil || r.rdb.Exists(t.Context(), "k").Val() != 0 {
		t.Errorf("release: %v", err)
	}
}

// A record without an end would be held for ever.
func TestNoHoldWithoutAnEnd(t *testing.T) {
	r := setup(t, &redistest.Options{Own: true, Real: true})
	if err := r.rdb.Do(t.Context(), "acl", "setuser", "default", "-pexpire").Err(); err != nil {
		t.Fatal(err)
	}
	_, err := r.d.Acquire(t.Context(), claim("k"))
	outage(t, r, "acquire", err)
	if n := r.rdb.Exists(t.Context(), "k").Val(); n != 0 {
		t.Error("held without an end")
	}
}

// The right to read the counter may be missing; that is no reason to think
// that there is none.
func TestCounterThatMayNotBeRead(t *testing.T) {
	r := setup(t, &redistest.Options{Own: true, Real: true})
	if err := r.rdb.Do(t.Context(), "acl", "setuser", "default", "-getrange").Err(); err != nil {
		t.Fatal(err)
	}
	_, err := r.d.Acquire(t.Context(), fenced("k"))
	outage(t, r, "acquire fenced", err)
	r.acquire(t, claim("k"))
}
