package fairlock_test

import (
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
	"github.com/hasplock/hasp/internal/strategytest"
)

// The keys of the queue of "k".
const (
	queueKey    = "hasp:{k}:queue:k"
	timeoutsKey = "hasp:{k}:timeouts:k"
)

// another returns one more driver on the same Redis. It polls after a time that no test waits for.
func (r rig) another(t *testing.T) Driver {
	d := await.Value(fairlock.NewDriver(r.Server.Client(), &fairlock.Options{Window: 10 * time.Minute})).(Driver)
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

// wait begins a Wait for c on a driver of its own, and returns when the claim is in the queue.
func (r rig) wait(t *testing.T, c backend.Claim) *waiting {
	t.Helper()
	return r.waitOn(t, r.another(t), c)
}

// waitOn is wait with the driver d.
func (r rig) waitOn(t *testing.T, d Driver, c backend.Claim) *waiting {
	t.Helper()
	before := int(r.Redis.ZCard(t.Context(), timeoutsKey).Val())
	x := &waiting{c: c, d: d, done: make(chan error, 1)}
	go func() {
		var err error
		x.grant, err = d.Wait(t.Context(), c)
		x.done <- err
	}()
	r.queued(t, before+1)
	return x
}

// queued returns when n wait for "k".
func (r rig) queued(t *testing.T, n int) {
	t.Helper()
	defer func() {
		for _, key := range []string{queueKey, timeoutsKey} {
			if r.Redis.TTL(t.Context(), key).Val() == -1 {
				t.Errorf("%s has no end", key)
			}
		}
	}()
	atLast(t, fmt.Sprintf("%d in the queue", n), func() bool {
		return r.Redis.ZCard(t.Context(), timeoutsKey).Val() == int64(n)
	})
}

// left returns the keys in the Redis.
func (r rig) left(t *testing.T) []string { return r.Redis.Keys(t.Context(), "*").Val() }

func (x *waiting) got(t *testing.T) backend.Grant {
	t.Helper()
	await.Return(t, "a wait", func() { await.Must(t, <-x.done) })
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
		x := r.wait(t, fenced("k"))
		next := r.wait(t, claim("k"))
		r.Release(t, c)
		if n == 500 {
			if got := recordOf(t, r.Redis, "k").token; got != "" {
				t.Errorf("%q has the key", got)
			}
			continue
		}
		x.got(t)
		r.queued(t, n+1)
		// So does an acquire that finds the key free, and a waiter that queues at the end.
		r.Redis.Del(t.Context(), "k") // no waiter notices
		want(t, "acquire", errOf(r.Driver.Acquire(t.Context(), claim("k"))), backend.ErrHeld)
		next.served(t)
		want(t, "wait", errOf(r.another(t).Wait(t.Context(), claim("k"))), nil)
	}
}

// If all waiters of a key are dead, an attempt gets the key, as a caller that waits does. The dead
// keep their places, and the mark says so to the release. A reader joins others in the same way.
func TestAttemptPassesTheDead(t *testing.T) {
	for _, flags := range []string{"0", "2"} {
		r := onServer(t)
		r.deadOf(t, 2, "PUBLISH", flags, time.Hour)
		c := r.hold(t)
		if got := recordOf(t, r.Redis, "k").mark; got != "+" {
			t.Errorf("the mark is %q", got)
		}
		r.Release(t, c)
		r.Acquire(t, sharedFenced())
		r.Acquire(t, shared())
		r.refused(t, claim("k"), true)
		if n := r.Redis.ZCard(t.Context(), timeoutsKey).Val(); n != 2 {
			t.Errorf("%d places are left", n)
		}
	}
}

// A report reads the first 1,000 entries of a queue, because a longer script would block the server.
func TestReportOfALongQueue(t *testing.T) {
	r := onServer(t)
	r.hold(t)
	r.dead(t, 1001, time.Hour)
	if n := len(r.status(t).Waiters); n != 1000 {
		t.Errorf("inspect: %d waiters", n)
	}
}

// Entries without a place are no waiters, and do not pile up: those of dead clients, those whose
// caller has given up, and those that cannot be read. They keep no caller from the key.
func TestEntriesWithoutAPlace(t *testing.T) {
	r := setup(t, nil)
	c := r.hold(t)
	r.dead(t, 40, -time.Second)
	r.Redis.RPush(t.Context(), queueKey, "odd", "almost PUBLISH channel 1 term 0 an entry", "gone PUBLISH channel 1 1000 0 an entry")
	x := r.wait(t, claim("k"))
	if s := r.status(t); !slices.Equal(s.Waiters, []string{x.c.Owner}) {
		t.Errorf("inspect: %+v", s)
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
	for name, free := range map[string]func(r rig, c backend.Claim){
		"by a message": func(r rig, c backend.Claim) { r.Release(t, c) },
		"in a reply": func(r rig, _ backend.Claim) { // a client that subscribes again polls
			r.Do(t, "del", "k")
			r.Do(t, "client", "kill", "type", "pubsub")
		},
	} {
		for _, kind := range []backend.Claim{fenced("k"), sharedFenced()} {
			t.Run(fmt.Sprint(name, ", shared: ", kind.Shared), func(t *testing.T) {
				r := onServer(t)
				c := r.hold(t)
				x := r.wait(t, kind)
				d := r.another(t)
				next, last := r.waitOn(t, d, claim("k")), r.waitOn(t, d, shared())
				r.Redis.Set(t.Context(), counter, "x", 0)
				free(r, c)
				next.served(t)
				last.served(t)
				await.Return(t, "the fenced wait", func() {
					if err := <-x.done; !errors.Is(err, backend.ErrInvalid) || !strings.Contains(err.Error(), strconv.Quote(counter)) {
						t.Errorf("got %v", err)
					}
				})
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
		r.waitOn(t, d, kind)
		y := r.waitOn(t, d, claim("k"))
		place := backend.Claim{Key: "k", Token: kind.Token, Shared: kind.Shared, Timeout: time.Second}
		for _, place := range []backend.Claim{place, strategytest.Kept(place, time.Minute)} {
			want(t, "release of a place", r.Driver.Release(t.Context(), place), backend.ErrLost)
			r.queued(t, 1)
		}
		r.Release(t, c)
		y.served(t)
	}
}

// A server without free memory still releases a key and hands it over.
func TestReleaseWithoutMemory(t *testing.T) {
	for _, c := range []backend.Claim{claim("k"), shared()} {
		r := onServer(t)
		r.Acquire(t, c)
		x := r.wait(t, fenced("k"))
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
	r := onServer(t)
	c, short := claim("k"), claim("k")
	short.TTL = backend.MinTTL
	r.Acquire(t, c)
	r.wait(t, short) // it polls every 200 s
	r.Forbid(t, "-publish")
	r.Release(t, c)
	if got := recordOf(t, r.Redis, "k").token; got != short.Token {
		t.Errorf("%q has the key", got)
	}
	if left := r.Left(t, "k"); left < 20*time.Second {
		t.Errorf("for %v", left)
	}
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
			r := onServer(t)
			o := r.app(t, append([]any{"~*", "+@all"}, rights...)...)
			r.Driver = r.driver(t, o)
			held := r.hold(t)
			var xs []*waiting
			for range 3 {
				xs = append(xs, r.waitOn(t, r.driver(t, o), claim("k")))
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
	r.Do(t, append([]any{"acl", "setuser", "app", "on", ">secret"}, rights...)...)
	o := r.Server.ClientOptions()
	o.Username, o.Password = "app", "secret"
	return o
}

// A user without a right that is needed cannot queue. It leaves nothing behind that has
// no end, even if its process dies at once.
func TestUserWhoMayNotSetTheEndOfAQueue(t *testing.T) {
	for _, right := range []string{"-pexpireat", "-rpush"} {
		r := onServer(t)
		d := r.driver(t, r.app(t, "~*", "&*", "+@all", right))
		r.hold(t)
		_, err := d.Wait(t.Context(), backend.Claim{Key: "k", Token: "dies", Owner: "me", TTL: time.Second, Timeout: time.Second})
		// The first text is of Redis 7.0, the second of later servers.
		if err == nil || !strings.Contains(err.Error(), "can't run this command") && !strings.Contains(err.Error(), "ACL failure in script") {
			t.Errorf("%s: got %v", right, err)
		}
		if left := r.left(t); len(left) != 1 {
			t.Errorf("%s: left %q", right, left)
		}
	}
}

// If a key of the queue has a value of another type, waits report it, no script changes it, and
// holds are not affected.
func TestQueueOfAnotherTypeIsReportedAndLeftAlone(t *testing.T) {
	for _, foreign := range []string{queueKey, timeoutsKey} {
		r := setup(t, nil)
		d := r.Driver
		ctx := t.Context()
		holder := r.hold(t)
		r.Redis.Set(ctx, foreign, "foreign", 0)
		want(t, "acquire a held key", errOf(d.Acquire(ctx, claim("k"))), backend.ErrHeld)
		if _, err := d.Wait(ctx, claim("k")); !errors.Is(err, backend.ErrInvalid) || !strings.Contains(err.Error(), foreign) {
			t.Errorf("%s: wait: %v", foreign, err)
		}
		if s := r.status(t); s.Owner != holder.Owner || len(s.Waiters) > 0 {
			t.Errorf("%s: inspect: %+v", foreign, s)
		}
		r.Release(t, holder)

		next := claim("k")
		if foreign == queueKey {
			want(t, "acquire a free key", errOf(d.Acquire(ctx, next)), backend.ErrInvalid)
		} else {
			r.Acquire(t, next)
			r.Release(t, next)
		}
		if got := r.Redis.Get(ctx, foreign).Val(); got != "foreign" || len(r.left(t)) != 1 {
			t.Errorf("%s: it holds %q, left %q", foreign, got, r.left(t))
		}
		r.Redis.Del(ctx, foreign)
		r.Acquire(t, next)
	}
}

// A queue that cannot be read does not count as empty, but a release succeeds.
func TestQueueThatMayNotBeRead(t *testing.T) {
	r := onServer(t)
	c := r.hold(t)
	r.Forbid(t, "-lindex", "-lrange")
	outage(t, "inspect", errOf(r.Driver.Inspect(t.Context(), "k")))
	r.Release(t, c)
	r.Acquire(t, c)
}
