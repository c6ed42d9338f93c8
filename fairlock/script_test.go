package fairlock_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/fairlock"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/internal/strategytest"
)

// The keys of the queue of "k".
const (
	queueKey    = "hasp:{k}:queue:k"
	timeoutsKey = "hasp:{k}:timeouts:k"
)

// another returns one more driver on the same Redis. Its window is longer than the test.
func (r rig) another(t *testing.T) Driver {
	d := await.Value(fairlock.NewDriver(r.Server.Client(), &fairlock.Options{Window: time.Minute})).(Driver)
	t.Cleanup(func() { d.Close() })
	return d
}

// driver returns a driver over a client with those options.
func (r rig) driver(t *testing.T, o *redis.Options) Driver {
	rdb := redis.NewClient(o)
	d := await.Value(fairlock.NewDriver(rdb, nil)).(Driver)
	t.Cleanup(func() { d.Close(); rdb.Close() })
	return d
}

// waiting is one Wait.
type waiting struct {
	c     backend.Claim
	d     Driver
	done  chan error
	grant backend.Grant
}

// wait begins a Wait for c and returns when n wait.
func (r rig) wait(t *testing.T, d Driver, c backend.Claim, n int) *waiting {
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
	defer func() {
		for _, kind := range []string{"queue", "timeouts"} {
			if r.Redis.TTL(t.Context(), "hasp:{"+key+"}:"+kind+":"+key).Val() == -1 {
				t.Errorf("the key %s has no end", kind)
			}
		}
	}()
	atLast(t, fmt.Sprintf("%d in the queue", n), func() bool {
		return r.Redis.ZCard(t.Context(), "hasp:{"+key+"}:timeouts:"+key).Val() == int64(n)
	})
}

// left returns the keys in the Redis.
func (r rig) left(t *testing.T) []string { return r.Redis.Keys(t.Context(), "*").Val() }

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
	want(t, "release", x.d.Release(t.Context(), x.c), nil)
}

// served fails the test unless x gets the key. It releases it.
func (x *waiting) served(t *testing.T) {
	t.Helper()
	x.got(t)
	x.release(t)
}

// dead puts n entries into the queue of "k" whose clients have no subscription, and
// count as alive for that long.
func (r rig) dead(t *testing.T, n int, alive time.Duration) {
	t.Helper()
	r.deadOf(t, n, "PUBLISH", "0", alive)
}

// deadOf does what dead does, for entries with that command and those flags.
func (r rig) deadOf(t *testing.T, n int, command, flags string, alive time.Duration) {
	t.Helper()
	ctx := t.Context()
	now := r.Redis.Time(ctx).Val()
	pipe := r.Redis.Pipeline()
	if r.Redis.Exists(ctx, "k").Val() == 1 {
		pipe.SetRange(ctx, "k", int64(len("fairlock")), "+") // as an enqueue does
	}
	for i := range n {
		token, channel := "dead-"+claim("k").Token, fmt.Sprint("hasp:grant:dead", i)
		pipe.RPush(ctx, queueKey, token+" "+command+" "+channel+" 1 60000 "+flags+" a dead one")
		pipe.ZAdd(ctx, timeoutsKey, redis.Z{Score: float64(now.Add(alive).UnixMilli()), Member: token})
	}
	want(t, "exec", errOf(pipe.Exec(ctx)), nil)
}

// Waiters without a subscriber are passed and keep their places. One script meets 500 waiters
// at most.
func TestLongQueueOfTheDead(t *testing.T) {
	for _, n := range []int{100, 499, 500} {
		r := setup(t, nil)
		c := r.hold(t)
		r.dead(t, n, time.Hour)
		x := r.wait(t, r.another(t), fenced("k"), n+1)
		next := r.wait(t, r.another(t), claim("k"), n+2)
		r.Release(t, c)
		if n == 500 {
			if got := recordOf(t, r.Redis, "k").token; got != "" {
				t.Errorf("%q has the key", got)
			}
			continue
		}
		x.got(t)
		r.queued(t, "k", n+1)
		// So does an acquire that finds the key free, and a waiter that queues at the end.
		r.Redis.Del(t.Context(), "k") // no waiter notices
		want(t, "acquire", errOf(r.Driver.Acquire(t.Context(), claim("k"))), backend.ErrHeld)
		next.served(t)
		want(t, "wait", errOf(r.another(t).Wait(t.Context(), claim("k"))), nil)
	}
}

// A report reads the first 1,000 entries of a queue, because a longer script would block the server.
func TestReportOfALongQueue(t *testing.T) {
	r := onServer(t)
	r.hold(t)
	r.dead(t, 1001, time.Hour)
	s, err := r.Driver.Inspect(t.Context(), "k")
	if err != nil || len(s.Waiters) != 1000 {
		t.Errorf("inspect: %d waiters, %v", len(s.Waiters), err)
	}
	all, err := strategytest.Listed(t.Context(), r.Driver, "")
	if err != nil || len(all["k"].Waiters) != 1000 {
		t.Errorf("list: %d waiters, %v", len(all["k"].Waiters), err)
	}
}

// Entries without a place are no waiters, and do not pile up: those of dead clients, those whose
// caller has given up, and those that cannot be read. They keep no caller from the key.
func TestEntriesWithoutAPlace(t *testing.T) {
	r := setup(t, nil)
	c := r.hold(t)
	r.dead(t, 40, -time.Second)
	r.Redis.RPush(t.Context(), queueKey, "odd", "almost PUBLISH channel 1 term 0 an entry", "gone PUBLISH channel 1 1000 0 an entry")
	if s, err := r.Driver.Inspect(t.Context(), "k"); err != nil || len(s.Waiters) != 0 {
		t.Errorf("inspect: %+v, %v", s, err)
	}
	x := r.wait(t, r.another(t), claim("k"), 41)
	if s, err := r.Driver.Inspect(t.Context(), "k"); err != nil || len(s.Waiters) != 1 || s.Waiters[0] != x.c.Owner {
		t.Errorf("inspect: %+v, %v", s, err)
	}
	r.Release(t, c)
	x.served(t)
	r.Release(t, r.hold(t)) // the next caller ends the places whose time has passed
	if r.Redis.Exists(t.Context(), queueKey).Val() != 0 {
		t.Error("a queue is left")
	}
	// Stopped processes look alive.
	r.dead(t, 2, -time.Second)
	sub := r.Redis.Subscribe(t.Context(), "hasp:grant:dead0", "hasp:grant:dead1")
	defer sub.Close()
	for range 2 {
		want(t, "receive", errOf(sub.Receive(t.Context())), nil)
	}
	r.Acquire(t, claim("k"))
}

// If the counter has no fence in it, a waiter that wants a fence gets an error, and
// the others are served.
func TestBadFenceCounterWhileWaiting(t *testing.T) {
	for name, free := range map[string]func(r rig, c backend.Claim) error{
		"by a message": func(r rig, c backend.Claim) error { return r.Driver.Release(t.Context(), c) },
		"in a reply": func(r rig, c backend.Claim) error { // a client that subscribes again polls
			err := r.Redis.Del(t.Context(), "k").Err()
			if r.Server.Real() {
				r.Redis.Do(t.Context(), "client", "kill", "type", "pubsub")
				return err
			}
			return r.Driver.Break(t.Context(), "k")
		},
	} {
		for _, kind := range []backend.Claim{fenced("k"), sharedFenced()} {
			t.Run(fmt.Sprint(name, ", shared: ", kind.Shared), func(t *testing.T) {
				r := setup(t, nil)
				c := r.hold(t)
				x := r.wait(t, r.another(t), kind, 1)
				d := r.another(t)
				next, last := r.wait(t, d, claim("k"), 2), r.wait(t, d, shared(), 3)
				r.Redis.Set(t.Context(), counter, "x", 0)
				want(t, "free the key", free(r, c), nil)
				next.served(t)
				last.served(t)
				select {
				case err := <-x.done:
					if !errors.Is(err, backend.ErrInvalid) || !strings.Contains(err.Error(), strconv.Quote(counter)) {
						t.Errorf("got %v", err)
					}
				case <-time.After(20 * time.Second):
					t.Error("still waits")
				}
				r.Acquire(t, claim("k"))
			})
		}
	}
}

// A release of a token that waits removes its place, once, and no other place.
func TestReleaseOfAPlaceInTheQueue(t *testing.T) {
	for _, kind := range []backend.Claim{claim("k"), shared()} {
		r := setup(t, nil)
		c := r.hold(t)
		d := r.another(t)
		r.wait(t, d, kind, 1)
		y := r.wait(t, d, claim("k"), 2)
		place := backend.Claim{Key: "k", Token: kind.Token, Shared: kind.Shared, Timeout: time.Second}
		for _, place := range []backend.Claim{place, strategytest.Kept(place, time.Minute)} {
			want(t, "release of a place", r.Driver.Release(t.Context(), place), backend.ErrLost)
			r.queued(t, "k", 1)
		}
		r.Release(t, c)
		y.served(t)
	}
}

// A server without free memory still releases a key and hands it over.
func TestReleaseWithoutMemory(t *testing.T) {
	for _, c := range []backend.Claim{claim("k"), shared()} {
		r := setup(t, &redistest.Options{Own: true, Real: true})
		r.Acquire(t, c)
		x := r.wait(t, r.another(t), fenced("k"), 1)
		r.Redis.ConfigSet(t.Context(), "maxmemory", "1")
		r.Release(t, c)
		if got := recordOf(t, r.Redis, "k").token; got != x.c.Token {
			t.Errorf("shared %t: %q has the key", c.Shared, got)
		}
		x.served(t)
		if left := r.left(t); !slices.Equal(left, []string{counter}) {
			t.Errorf("shared %t: left %q, want the counter", c.Shared, left)
		}
	}
}

// A user that may not publish still hands the key over. The waiter holds the key
// until its next poll, however short its term is.
func TestReleaseByAUserThatMayNotPublish(t *testing.T) {
	r := setup(t, &redistest.Options{Own: true, Real: true})
	c, short := claim("k"), claim("k")
	short.TTL = backend.MinTTL
	r.Acquire(t, c)
	r.wait(t, r.another(t), short, 1) // it polls three times a minute
	r.Forbid(t, "-publish")
	r.Release(t, c)
	if got := recordOf(t, r.Redis, "k").token; got != short.Token {
		t.Errorf("%q has the key", got)
	}
	if left := r.Left(t, "k"); left < 20*time.Second {
		t.Errorf("for %v", left)
	}
}

// A queue that cannot be read does not count as empty, but a release succeeds.
func TestQueueThatMayNotBeRead(t *testing.T) {
	r := setup(t, &redistest.Options{Own: true, Real: true})
	c := r.hold(t)
	r.Forbid(t, "-lindex", "-lrange")
	_, err := r.Driver.Inspect(t.Context(), "k")
	outage(t, "inspect", err)
	if err := r.Driver.Release(t.Context(), c); err != nil || r.Redis.Exists(t.Context(), "k").Val() != 0 {
		t.Errorf("release: %v", err)
	}
}

// A token that has the key already writes its record, even if its term cannot
// grow. Replicas confirm only what was written.
func TestConfirmationIsWritten(t *testing.T) {
	r := setup(t, &redistest.Options{Own: true, Real: true})
	c := claim("k")
	r.Acquire(t, c)
	for _, term := range []time.Duration{c.TTL, time.Hour} {
		r.Redis.PExpire(t.Context(), "k", term)
		before := r.changes(t)
		want(t, "wait", errOf(r.Driver.Wait(t.Context(), c)), nil)
		if r.changes(t) == before {
			t.Errorf("nothing was written with %v left", term)
		}
	}
	if left := r.Left(t, "k"); left <= time.Hour/2 {
		t.Errorf("shortened to %v", left)
	}
}

// changes returns how many writes the server has counted.
func (r rig) changes(t *testing.T) string {
	t.Helper()
	return r.Redis.InfoMap(t.Context(), "persistence").Item("Persistence", "rdb_changes_since_last_save")
}

// If a key of the queue has a value of another type, waits report it, no script
// changes it, and holds are not affected.
func TestQueueOfAnotherTypeIsReportedAndLeftAlone(t *testing.T) {
	for _, kind := range []string{"queue", "timeouts"} {
		r := setup(t, nil)
		foreign := "hasp:{k}:" + kind + ":k"
		holder := claim("k")
		r.Acquire(t, holder)
		r.Redis.Set(t.Context(), foreign, "foreign", 0)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		var held *backend.HeldError
		if _, err := r.Driver.Acquire(ctx, claim("k")); !errors.As(err, &held) {
			t.Errorf("%s: acquire: %v", kind, err)
		}
		if _, err := r.Driver.Wait(ctx, claim("k")); !errors.Is(err, backend.ErrInvalid) || !strings.Contains(err.Error(), foreign) {
			t.Errorf("%s: wait: %v", kind, err)
		}
		if s, err := r.Driver.Inspect(ctx, "k"); err != nil || s.Owner != holder.Owner || len(s.Waiters) > 0 {
			t.Errorf("%s: inspect: %+v, %v", kind, s, err)
		}
		if err := r.Driver.Release(ctx, holder); err != nil {
			t.Errorf("%s: release: %v", kind, err)
		}
		next := claim("k")
		switch _, err := r.Driver.Acquire(ctx, next); {
		case kind != "queue" && err != nil, kind == "queue" && !errors.Is(err, backend.ErrInvalid):
			t.Errorf("%s: acquire a free key: %v", kind, err)
		case err == nil:
			if err := r.Driver.Release(ctx, next); err != nil {
				t.Errorf("%s: release again: %v", kind, err)
			}
		}
		if got := r.Redis.Get(ctx, foreign).Val(); got != "foreign" {
			t.Errorf("%s: it holds %q", kind, got)
		}
		if left := r.Redis.Keys(ctx, "*").Val(); len(left) != 1 {
			t.Errorf("%s: left %q", kind, left)
		}
		r.Redis.Del(ctx, foreign)
		r.Acquire(t, claim("k"))
		r.Redis.FlushAll(ctx)
	}
}

// A client that subscribes to all channels by pattern does not count as a waiter.
func TestSubscriberByPatternIsNoReceiver(t *testing.T) {
	r := setup(t, nil)
	watch := r.Redis.PSubscribe(t.Context(), "*")
	defer watch.Close()
	want(t, "receive", errOf(watch.Receive(t.Context())), nil)
	c := r.hold(t)
	r.dead(t, 1, time.Hour)
	x := r.wait(t, r.another(t), claim("k"), 2)
	r.Release(t, c)
	x.served(t)
}

// A user without the right to the channels receives no messages. It polls, and is served in order.
func TestUserWithoutTheChannel(t *testing.T) {
	for name, rights := range map[string][]any{
		"no channels": {"resetchannels"},
		"no publish":  {"allchannels", "-publish"}, // polls find the grants
		"no pubsub":   {"resetchannels", "-@pubsub"},
		"no count":    {"allchannels", "-pubsub"}, // messages bring the grants
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := setup(t, &redistest.Options{Own: true, Real: true})
			o := r.app(t, append([]any{"~*", "+@all"}, rights...)...)
			r.Driver = r.driver(t, o)
			held := r.hold(t)
			var xs []*waiting
			for i := range 3 {
				xs = append(xs, r.wait(t, r.driver(t, o), claim("k"), i+1))
			}
			r.Release(t, held)
			for i, x := range xs {
				x.got(t)
				for _, later := range xs[i+1:] {
					later.waits(t)
				}
				x.release(t)
			}
		})
	}
}

// app makes a user with these rights, and returns options for it.
func (r rig) app(t *testing.T, rights ...any) *redis.Options {
	t.Helper()
	want(t, "acl setuser", r.Redis.Do(t.Context(), append([]any{"acl", "setuser", "app", "on", ">secret"}, rights...)...).Err(), nil)
	o := r.Server.ClientOptions()
	o.Username, o.Password = "app", "secret"
	return o
}

// A user without a right that is needed cannot queue. It leaves nothing behind that has
// no end, even if its process dies at once.
func TestUserWhoMayNotSetTheEndOfAQueue(t *testing.T) {
	for _, right := range []string{"-pexpireat", "-rpush"} {
		r := setup(t, &redistest.Options{Own: true, Real: true})
		d := r.driver(t, r.app(t, "~*", "&*", "+@all", right))
		r.hold(t)
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		_, err := d.Wait(ctx, backend.Claim{Key: "k", Token: "dies", Owner: "me", TTL: time.Second, Timeout: time.Second})
		// The first text is of Redis 7.0, the second of later servers.
		if err == nil || !strings.Contains(err.Error(), "can't run this command") && !strings.Contains(err.Error(), "ACL failure in script") {
			t.Errorf("%s: got %v", right, err)
		}
		for _, key := range r.Redis.Keys(t.Context(), "*").Val() {
			if key != "k" {
				t.Errorf("%s: left %s", right, key)
			}
		}
	}
}
