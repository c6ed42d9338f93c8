//go:build linux || darwin || freebsd || netbsd || openbsd || dragonfly

package fairlock_test

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/fairlock"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/crew"
	"github.com/hasplock/hasp/internal/redistest"
)

// These tests kill and stop processes.

func TestMain(m *testing.M) {
	crew.Main(crew.Roles{"play": play})
	os.Exit(redistest.Main(m))
}

// play makes n Clients lock "k", each with a place of its own, and prints the
// outcomes. A holder keeps and renews its lease; the others unlock.
func play(args []string) error {
	role, url := args[0], args[1]
	n, _ := strconv.Atoi(args[2])
	for i := range n {
		c, err := hasp.Open(context.Background(), url, &hasp.Options{Owner: fmt.Sprint(role, " ", i)})
		if err != nil {
			return err
		}
		go func() {
			lease, err := c.Lock(context.Background(), "k")
			if err != nil {
				fmt.Println(i, "error", err)
				return
			}
			fmt.Println(i, "got it")
			if role != "holder" {
				if err := lease.Unlock(context.Background()); err != nil {
					fmt.Println(i, "error", err)
				}
			}
		}()
	}
	crew.AwaitEnd()
	return nil
}

// start starts a process that runs play.
func start(t *testing.T, role, url string, n int) *crew.Child {
	t.Helper()
	return crew.Test(t, "play", role, url, strconv.Itoa(n))
}

// url returns the URL of a Client of r's server, with that window.
func (r rig) url(window time.Duration) string {
	return fmt.Sprintf("fairlock+%s?window=%v&timeout=20s", r.Server.URL(), window)
}

// unsubscribed returns when the server has noticed that n of the clients that wait
// for "k" have no subscription any more.
func (r rig) unsubscribed(t *testing.T, n int) {
	t.Helper()
	atLast(t, fmt.Sprintf("%d channels without a subscriber", n), func() bool {
		gone := 0
		for _, channel := range r.Redis.ZRange(t.Context(), clientsKey, 0, -1).Val() {
			if r.Redis.PubSubNumSub(t.Context(), channel).Val()[channel] == 0 {
				gone++
			}
		}
		return gone >= n
	})
}

// holders returns the owners that hold "k" one after another, until done returns true.
func (r rig) holders(t *testing.T, what string, done func(s backend.Status) bool) (owners []string) {
	t.Helper()
	atLast(t, what, func() bool {
		s, err := r.Driver.Inspect(t.Context(), "k")
		if err != nil {
			t.Fatal(err)
		}
		if s.Held && !slices.Contains(owners, s.Owner) {
			owners = append(owners, s.Owner)
		}
		return done(s)
	})
	return owners
}

// Ten waiters whose processes were killed are before a living one. The window is
// long, so the dead still have their places.
func TestLivingWaiterBehindTenThatWereKilled(t *testing.T) {
	t.Parallel()
	r := setup(t, nil)
	c := r.hold(t)
	var cs []*crew.Child
	for i := range 2 {
		cs = append(cs, start(t, "dead", r.url(time.Minute), 5))
		r.queued(t, "k", 5*(i+1))
	}
	x := r.wait(t, r.another(t), claim("k"), 11)
	for _, c := range cs {
		c.End()
	}
	r.unsubscribed(t, 10)
	began := time.Now()
	r.Release(t, c)
	x.got(t)
	t.Logf("the waiter behind the ten got the key %v after the release", time.Since(began))
	if n := r.Redis.ZCard(t.Context(), queueKey).Val(); n != 10 {
		t.Errorf("%d are in the queue, want the ten", n)
	}
	x.release(t)
}

// A client that subscribes to all channels by pattern does not count as a waiter.
func TestSubscriberByPatternIsNoReceiver(t *testing.T) {
	t.Parallel()
	r := setup(t, nil)
	watch := r.Redis.PSubscribe(t.Context(), "*")
	defer watch.Close()
	want(t, "receive", errOf(watch.Receive(t.Context())), nil)
	c := r.hold(t)
	head := start(t, "dead", r.url(time.Minute), 1)
	r.queued(t, "k", 1)
	x := r.wait(t, r.another(t), claim("k"), 2)
	head.End()
	r.unsubscribed(t, 1)
	r.Release(t, c)
	x.served(t)
}

// Of several stopped waiters only the first is handed the key. When its term has
// ended, the windows of the others have passed.
func TestOnlyTheFirstStoppedWaiterIsHandedTheKey(t *testing.T) {
	t.Parallel()
	const window = time.Second
	r := setup(t, nil)
	c := r.hold(t)
	var stopped []*crew.Child
	for i := range 3 {
		stopped = append(stopped, start(t, fmt.Sprint("stopped", i), r.url(window), 1))
		r.queued(t, "k", i+1)
	}
	d := fairlock.New(r.Server.Client(), &fairlock.Options{Window: window})
	t.Cleanup(func() { d.Close() })
	x := r.wait(t, d, claim("k"), 4)
	for _, s := range stopped {
		await.Must(t, s.Pause())
	}
	r.Release(t, c)
	owners := r.holders(t, "the living one holds the key", func(s backend.Status) bool { return s.Owner == x.c.Owner })
	x.got(t)
	if len(owners) > 2 {
		t.Errorf("the key was handed to %q", owners)
	}
	// When the stopped processes continue, they queue again and are served.
	for _, s := range stopped {
		await.Must(t, s.Resume())
	}
	r.queued(t, "k", 3)
	x.release(t)
	for i, s := range stopped {
		if got := s.Line(t); got != "0 got it" {
			t.Errorf("stopped %d: %s", i, got)
		}
	}
}

func TestFirstWaiterFollowsAHolderThatIsKilled(t *testing.T) {
	t.Parallel()
	r := setup(t, nil)
	holder := start(t, "holder", r.url(time.Second)+"&ttl=6s", 1)
	if got := holder.Line(t); got != "0 got it" {
		t.Fatal(got)
	}
	d := r.another(t)
	x, y := r.wait(t, d, claim("k"), 1), r.wait(t, d, claim("k"), 2)
	holder.End()
	x.served(t)
	y.served(t)
}

// All waiters are killed. What they leave in the Redis expires.
func TestNothingRemainsOfWaitersThatWereKilled(t *testing.T) {
	t.Parallel()
	r := setup(t, nil)
	c := r.hold(t)
	a, b := start(t, "dead", r.url(500*time.Millisecond), 3), start(t, "dead", r.url(time.Second), 2)
	r.queued(t, "k", 5)
	a.End()
	b.End()
	atLast(t, "nothing but the hold", func() bool {
		return slices.Equal(r.Redis.Keys(t.Context(), "*").Val(), []string{"k"})
	})
	r.Release(t, c)
}

// A user without the right to the channels receives no messages. It polls, and is
// served in order.
func TestUserWithoutTheChannel(t *testing.T) {
	for name, c := range map[string]struct {
		window time.Duration
		rights []any
	}{
		"no channels": {time.Minute, []any{"resetchannels"}},
		"no publish":  {6 * time.Second, []any{"allchannels", "-publish"}}, // polls find the grants
		"no pubsub":   {time.Minute, []any{"resetchannels", "-@pubsub"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := setup(t, &redistest.Options{Own: true, Real: true})
			args := append([]any{"acl", "setuser", "app", "on", ">secret", "~*", "+@all"}, c.rights...)
			want(t, "acl setuser", r.Redis.Do(t.Context(), args...).Err(), nil)
			url := strings.Replace(r.url(c.window), "redis://", "redis://app:secret@", 1)
			o := r.Server.ClientOptions()
			o.Username, o.Password = "app", "secret"
			r.Driver = r.driver(t, o)
			held := r.hold(t)
			var cs []*crew.Child
			for i := range 3 {
				cs = append(cs, start(t, fmt.Sprint("waiter", i), url, 1))
				r.queued(t, "k", i+1)
			}
			r.Release(t, held)
			owners := r.holders(t, "all were served", func(s backend.Status) bool { return !s.Held && len(s.Waiters) == 0 })
			if !slices.IsSorted(owners) {
				t.Errorf("served in order %q", owners)
			}
			for i, c := range cs {
				if got := c.Line(t); got != "0 got it" {
					t.Errorf("waiter %d: %s", i, got)
				}
			}
		})
	}
}

// A user without a right that is needed cannot queue. It leaves nothing behind that has
// no end, even if its process dies at once.
func TestUserWhoMayNotSetTheEndOfAQueue(t *testing.T) {
	r := setup(t, &redistest.Options{Own: true, Real: true})
	want(t, "acl setuser", r.Redis.Do(t.Context(), "acl", "setuser", "app", "on", ">secret", "~*", "&*", "+@all", "-pexpireat").Err(), nil)
	r.hold(t)
	before := r.Redis.Keys(t.Context(), "*").Val()
	o := r.Server.ClientOptions()
	o.Username, o.Password = "app", "secret"
	d := r.driver(t, o)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	_, err := d.Wait(ctx, backend.Claim{Key: "k", Token: "dies", Owner: "me", TTL: time.Second, Timeout: time.Second})
	// The first text is of Redis 7.0, the second of later servers.
	if err == nil || !strings.Contains(err.Error(), "can't run this command") && !strings.Contains(err.Error(), "ACL failure in script") {
		t.Errorf("got %v", err)
	}
	if after := r.Redis.Keys(t.Context(), "*").Val(); len(after) != len(before) {
		t.Errorf("keys %q, and before %q", after, before)
	}
}
