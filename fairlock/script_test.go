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

// The keys of the queue of "k".
const (
	queueKey   = "hasp:{k}:queue:k"
	entriesKey = "hasp:{k}:entries:k"
	aliveKey   = "hasp:{k}:alive:k"
)

// another returns one more driver on the same Redis. Its window is longer than the
// test.
func (r rig) another(t *testing.T) *fairlock.Driver {
	d := fairlock.New(r.srv.Client(), &fairlock.Options{Window: time.Minute})
	t.Cleanup(func() { d.Close() })
	return d
}

// driver returns a driver over a client with those options.
func (r rig) driver(t *testing.T, o *redis.Options) *fairlock.Driver {
	rdb := redis.NewClient(o)
	d := fairlock.New(rdb, nil)
	t.Cleanup(func() { d.Close(); rdb.Close() })
	return d
}

// waiting is one Wait.
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

// dead puts n entries into the queue of "k" whose clients have no subscription, and
// count as alive for that long.
func (r rig) dead(t *testing.T, n int, command string, alive time.Duration) {
	ctx := t.Context()
	now := r.rdb.Time(ctx).Val()
	pipe := r.rdb.Pipeline()
	for i := range n {
		token, channel := "dead-"+claim("k").Token, fmt.Sprint("hasp:grant:dead", i)
		pipe.RPush(ctx, queueKey, token)
		pipe.HSet(ctx, entriesKey, token, command+" "+channel+" 1 60000 0 a dead one")
		pipe.ZAdd(ctx, aliveKey, redis.Z{Score: float64(now.Add(alive).UnixMilli()), Member: channel})
	}
	if _, err := pipe.Exec(ctx); err != nil {
		t.Fatal(err)
	}
}

// One script checks a part of a long queue, and the next script continues.
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
		// Break hands the key over in the same way.
		if err := r.d.Break(t.Context(), "k"); err != nil {
			t.Error(err)
		}
		next.got(t)
		next.release(t)
		if _, err := r.d.Acquire(t.Context(), claim("k")); !errors.Is(err, backend.ErrHeld) {
			t.Errorf("acquire overtakes %d in the queue: %v", n, err)
		}
		// So does a waiter that queues at the end.
		x = &waiting{c: claim("k"), d: r.another(t), done: make(chan error, 1)}
		go func() {
			_, err := x.d.Wait(t.Context(), x.c)
			x.done <- err
		}()
		x.got(t)
	}
}

// An acquire that finds a free key and a long queue continues the hand-over.
func TestAcquireContinuesAHandOver(t *testing.T) {
	r := setup(t, nil)
	c := claim("k")
	r.acquire(t, c)
	r.dead(t, 100, "PUBLISH", time.Hour)
	x := r.wait(t, r.another(t), claim("k"), 101)
	r.rdb.Del(t.Context(), "k") // no waiter notices
	if _, err := r.d.Acquire(t.Context(), claim("k")); !errors.Is(err, backend.ErrHeld) {
		t.Errorf("acquire: %v", err)
	}
	x.got(t)
}

func TestEntriesOfDeadClientsAreRemoved(t *testing.T) {
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
	r.dead(t, 10, "PUBLISH", -time.Second)
	r.acquire(t, claim("k"))
}

// While callers wait without a pause, the channels of dead clients do not pile up.
func TestChannelsOfDeadClientsAreRemoved(t *testing.T) {
	r := setup(t, nil)
	r.acquire(t, claim("k"))
	r.dead(t, 40, "PUBLISH", -time.Second)
	r.wait(t, r.another(t), claim("k"), 41)
	if n := r.rdb.ZCard(t.Context(), aliveKey).Val(); n != 1 {
		t.Errorf("%d channels, want that of the living client", n)
	}
}

// The entries of a client without a subscription have no command. The client is
// handed the key all the same, and finds out at its next poll. If it is dead, the
// key is lost for the term, or until its client counts as dead if that is later.
func TestEntryWithoutACommand(t *testing.T) {
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

// Redis may evict any of the keys, because each has a time to live.
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

// A token without an entry, and an entry that cannot be read, are removed.
func TestBadEntriesAreRemoved(t *testing.T) {
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

// If the counter has no fence in it, a waiter that wants a fence gets an error, and
// the others are served.
func TestBadFenceCounterWhileWaiting(t *testing.T) {
	invalid := func(t *testing.T, err error) {
		t.Helper()
		if !errors.Is(err, backend.ErrInvalid) || !strings.Contains(err.Error(), strconv.Quote(counter)) {
			t.Errorf("got %v", err)
		}
	}
	for name, free := range map[string]func(r rig, c backend.Claim) error{
		"by a message": func(r rig, c backend.Claim) error { return r.d.Release(t.Context(), c) },
		"in a reply": func(r rig, c backend.Claim) error { // a client that subscribes again polls
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

// Fences grow from hold to hold, also if the key is handed over.
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

// A release of a token that waits removes its place, once, and no other place.
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

// A server without free memory still releases a key and hands it over.
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

// A user that may not publish still hands the key over. The waiter holds the key
// until its next poll, however short its term is.
func TestReleaseByAUserThatMayNotPublish(t *testing.T) {
	r := setup(t, &redistest.Options{Own: true, Real: true})
	c, short := claim("k"), claim("k")
	short.TTL = backend.MinTTL
	r.acquire(t, c)
	r.wait(t, r.another(t), short, 1) // it polls three times a minute
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

// A user that may not ask for subscribers learns from PUBLISH that a client is gone.
func TestReleaseByAUserThatMayNotCountSubscribers(t *testing.T) {
	r := setup(t, &redistest.Options{Own: true, Real: true})
	c := claim("k")
	r.acquire(t, c)
	r.dead(t, 3, "PUBLISH", time.Hour)
	x := r.wait(t, r.another(t), claim("k"), 4)
	if err := r.rdb.Do(t.Context(), "acl", "setuser", "default", "-pubsub").Err(); err != nil {
		t.Fatal(err)
	}
	if err := r.d.Release(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	x.got(t)
	r.queued(t, "k", 3)
	x.release(t)
}

// A queue that cannot be read does not count as empty.
func TestInspectOfAQueueThatMayNotBeRead(t *testing.T) {
	r := setup(t, &redistest.Options{Own: true, Real: true})
	r.acquire(t, claim("k"))
	if err := r.rdb.Do(t.Context(), "acl", "setuser", "default", "-lrange").Err(); err != nil {
		t.Fatal(err)
	}
	_, err := r.d.Inspect(t.Context(), "k")
	outage(t, r, "inspect", err)
}

// A token that has the key already writes its record, even if its term cannot
// grow. Replicas confirm only what was written.
func TestConfirmationIsWritten(t *testing.T) {
	r := setup(t, &redistest.Options{Own: true, Real: true})
	c := claim("k")
	r.acquire(t, c)
	for _, term := range []time.Duration{c.TTL, time.Hour} {
		r.rdb.PExpire(t.Context(), "k", term)
		before := r.changes(t)
		if _, err := r.d.Wait(t.Context(), c); err != nil {
			t.Fatal(err)
		}
		if r.changes(t) == before {
			t.Errorf("nothing was written with %v left", term)
		}
	}
	if left := r.left(t, "k"); left <= time.Hour/2 {
		t.Errorf("shortened to %v", left)
	}
}

// changes returns how many writes the server has counted.
func (r rig) changes(t *testing.T) string {
	t.Helper()
	return r.rdb.InfoMap(t.Context(), "persistence").Item("Persistence", "rdb_changes_since_last_save")
}

// A release succeeds even if the queue cannot be read.
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

// If the term cannot be set, the record is removed.
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

// A counter that the user may not read does not count as missing.
func TestCounterThatMayNotBeRead(t *testing.T) {
	r := setup(t, &redistest.Options{Own: true, Real: true})
	if err := r.rdb.Do(t.Context(), "acl", "setuser", "default", "-getrange").Err(); err != nil {
		t.Fatal(err)
	}
	_, err := r.d.Acquire(t.Context(), fenced("k"))
	outage(t, r, "acquire fenced", err)
	r.acquire(t, claim("k"))
}
