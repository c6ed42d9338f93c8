package redisstore

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redistest"
)

// taking takes a hold, or reports that the key is held.
var taking = NewHold(`
if redis.call('EXISTS', KEYS[1]) == 1 then return {0, 'held'} end
redis.call('SET', KEYS[1], ARGV[1], 'PX', 600000)
return {1, 'taken'}`)

// waits returns how often a server got WAIT.
func waits(t *testing.T, rdb *redis.Client) (n int) {
	t.Helper()
	for line := range strings.Lines(rdb.Info(t.Context(), "commandstats").Val()) {
		fmt.Sscanf(line, "cmdstat_wait:calls=%d,", &n)
	}
	return n
}

func TestReplicasConfirm(t *testing.T) {
	t.Parallel()
	set := redistest.StartSentinel(t, nil)
	s := opened(t, set.URL(), map[string]string{"replicas": "2"})
	if n := s.Replicas(); n != 2 {
		t.Errorf("%d replicas", n)
	}
	master, replica := set.Master().Client(), set.Servers[2]
	calls := make([]Call, 20)
	for i := range calls {
		calls[i] = Call{[]string{fmt.Sprint("each", i)}, []string{"v"}}
	}
	hold := func(ctx context.Context) (any, error) {
		return s.Send(ctx, "k", true, "set", "k", "v", "px", "600000", "nx")
	}
	run := func(ctx context.Context) (any, error) { return s.Run(ctx, taking, Call{[]string{"r"}, []string{"v"}}) }

	// Twice, because at first the server does not know the script.
	for range 2 {
		master.Del(t.Context(), "k", "r")
		if v, err := hold(t.Context()); v != "OK" || err != nil {
			t.Errorf("hold: got %v, %v", v, err)
		}
		if v, err := run(t.Context()); fmt.Sprint(v) != "[1 taken]" || err != nil {
			t.Errorf("run: got %v, %v", v, err)
		}
		if got, err := replica.Client().Get(t.Context(), "r").Result(); got != "v" {
			t.Errorf("a replica has %q, %v", got, err)
		}
		before := waits(t, master)
		for i := range calls {
			master.Del(t.Context(), calls[i].Keys[0])
		}
		s.RunEach(t.Context(), taking, calls, func(i int, v any, err error) {
			if fmt.Sprint(v) != "[1 taken]" || err != nil {
				t.Errorf("runeach: %d: got %v, %v", i, v, err)
			}
		})
		if n := waits(t, master) - before; n != 1 && n != 2 {
			t.Errorf("asked %d times to wait", n)
		}
	}
	// A command that takes nothing needs no replica.
	before := waits(t, master)
	expect(t, s, "do", "v", "get", "k")
	if _, err := s.Run(t.Context(), counting, Call{[]string{"n"}, []string{"1"}}); err != nil {
		t.Error(err)
	}
	if n := waits(t, master) - before; n != 0 {
		t.Errorf("asked %d times to wait", n)
	}

	replica.Pause()
	defer replica.Resume()
	unknown := func(what string, err error) {
		t.Helper()
		if err == nil || errors.Is(err, backend.ErrHeld) || errors.Is(err, backend.ErrLost) || errors.Is(err, backend.ErrInvalid) {
			t.Errorf("%s: got %v, want an outage", what, err)
		}
		if !strings.Contains(fmt.Sprint(err), "1 of 2 replicas") {
			t.Errorf("%s: %v", what, err)
		}
	}
	// All at the same time, because each takes as long as a call without a deadline waits.
	master.Del(t.Context(), "each0")
	var wg sync.WaitGroup
	wg.Go(func() {
		_, err := s.Send(t.Context(), "k2", true, "set", "k2", "v", "px", "600000", "nx")
		unknown("hold", err)
		if n := master.Exists(t.Context(), "k2").Val(); n != 1 {
			t.Error("the master did not get the command")
		}
	})
	wg.Go(func() {
		_, err := s.Run(t.Context(), taking, Call{[]string{"r2"}, []string{"v"}})
		unknown("run", err)
	})
	wg.Go(func() {
		s.RunEach(t.Context(), taking, calls, func(i int, v any, err error) {
			if i == 0 {
				unknown("runeach", err)
			} else if fmt.Sprint(v) != "[0 held]" || err != nil {
				t.Errorf("runeach: %d: got %v, %v", i, v, err)
			}
		})
	})
	wg.Wait()
	// Without the replicas it is still known that a key is held, once the server has
	// given up the WAIT for earlier writes of the connection.
	eventually(t, "held", func(ctx context.Context) error {
		if v, err := hold(ctx); v != nil || err != nil {
			return fmt.Errorf("hold: got %v, %v", v, err)
		}
		if v, err := run(ctx); fmt.Sprint(v) != "[0 held]" || err != nil {
			return fmt.Errorf("run: got %v, %v", v, err)
		}
		return nil
	})
}

// replicasConfirm tests the same on a cluster, whose slots move.
func replicasConfirm(t *testing.T, set *redistest.Cluster) {
	t.Helper()
	s := opened(t, set.URL(), map[string]string{"replicas": "1"})
	var calls []Call
	for i := range 30 {
		calls = append(calls, Call{[]string{fmt.Sprint("each", i)}, []string{"v"}})
	}
	s.RunEach(t.Context(), taking, calls, func(i int, v any, err error) {
		if fmt.Sprint(v) != "[1 taken]" || err != nil {
			t.Errorf("runeach: %d: got %v, %v", i, v, err)
		}
	})
	finish := set.Move("w")
	if v, err := s.Send(t.Context(), "w", true, "set", "w", "v", "px", "600000", "nx"); v != "OK" || err != nil {
		t.Errorf("half-way: got %v, %v", v, err)
	}
	finish()
	master := set.Master("w")
	before := waits(t, master.Client())
	if v, err := s.Run(t.Context(), taking, Call{[]string{"{w}r"}, []string{"v"}}); fmt.Sprint(v) != "[1 taken]" || err != nil {
		t.Errorf("moved: got %v, %v", v, err)
	}
	if n := waits(t, master.Client()) - before; n < 1 {
		t.Error("the new master was not asked to wait")
	}
}

func TestRefused(t *testing.T) {
	for _, c := range []struct {
		reply any
		want  bool
	}{
		{nil, true}, {int64(0), true}, {int64(-1), true}, {[]any{int64(0), "x"}, true}, {[]any{int64(-1)}, true}, {[]any{nil, "x"}, true},
		{int64(1), false}, {"OK", false}, {"0", false}, {[]any{int64(1), "x"}, false}, {[]any{"0"}, false}, {[]any{}, false},
	} {
		if got := tookNothing(c.reply); got != c.want {
			t.Errorf("%#v: got %v", c.reply, got)
		}
	}
}

func TestPatienceEndsBeforeTheCall(t *testing.T) {
	for left, most := range map[time.Duration]int64{time.Hour: 2400, time.Second: 800, time.Millisecond: 1, -time.Second: 1} {
		if got := patience(time.Now().Add(left)); got < 1 || got > most {
			t.Errorf("%v: got %dms", left, got)
		}
	}
}

// Holds that wait for a slow replica must not delay renewals: healthy leases would be lost.
func TestRenewalsDoNotQueueBehindHoldsThatWaitForReplicas(t *testing.T) {
	t.Parallel()
	set := redistest.StartSentinel(t, nil)
	// The pool is smaller than the number of callers on any machine.
	s, probe := prepared(t, set.URL(), map[string]string{"replicas": "2"}, 2)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	await.Must(t, probe(ctx))
	master, replica := set.Master().Client(), set.Servers[2]
	s.RunEach(ctx, taking, []Call{{[]string{"known"}, []string{"v"}}}, func(_ int, _ any, err error) {
		await.Must(t, err)
	})

	replica.Pause()
	resume := sync.OnceFunc(replica.Resume)
	defer resume()
	var calls sync.WaitGroup
	hold := func(i int) {
		calls.Go(func() {
			if v, err := s.Run(ctx, taking, Call{[]string{fmt.Sprint("k", i)}, []string{"v"}}); fmt.Sprint(v) != "[1 taken]" || err != nil {
				t.Errorf("hold %d: got %v, %v", i, v, err)
			}
		})
	}
	hold(0)
	at := await.Value(s.find(ctx, ""))
	eventually(t, "the hold waits for the replica", func(ctx context.Context) error {
		if info := master.Info(ctx, "clients").Val(); !strings.Contains(info, "blocked_clients:1\r") {
			return errors.New(info)
		}
		return nil
	})

	// From here on commands travel together. The command of a caller that leaves is not sent.
	const callers = 100
	for i := range callers {
		hold(1 + i)
	}
	left, leave := context.WithCancel(ctx)
	gone := make(chan error, 1)
	go func() {
		_, err := s.Run(left, taking, Call{[]string{"left"}, []string{"v"}})
		gone <- err
	}()
	eventually(t, "all callers wait", func(context.Context) error {
		at.holds.mu.Lock()
		defer at.holds.mu.Unlock()
		if n := len(at.holds.waiting); n != callers+1 {
			return fmt.Errorf("%d callers", n)
		}
		return nil
	})
	leave()
	if err := <-gone; !errors.Is(err, context.Canceled) {
		t.Errorf("a caller that left: got %v", err)
	}

	calls.Go(func() {
		s.RunEach(ctx, taking, []Call{{[]string{"renewed"}, []string{"v"}}}, func(_ int, v any, err error) {
			if fmt.Sprint(v) != "[1 taken]" || err != nil {
				t.Errorf("renewal: got %v, %v", v, err)
			}
		})
	})
	eventually(t, "a renewal reaches the server", func(ctx context.Context) error {
		return master.Get(ctx, "renewed").Err()
	})

	before := waits(t, master)
	resume()
	calls.Wait()
	if n := master.Exists(t.Context(), "left").Val(); n != 0 {
		t.Error("the command of a caller that had left was sent")
	}
	// The hold that waited, the renewal, and the other holds together.
	if n := waits(t, master) - before; n > 3 {
		t.Errorf("the server was asked %d times to wait for its replicas", n)
	}
	eventually(t, "no hold waits", func(context.Context) error {
		at.holds.mu.Lock()
		defer at.holds.mu.Unlock()
		if len(at.holds.flights)+len(at.holds.waiting) > 0 {
			return fmt.Errorf("%d callers wait", len(at.holds.waiting))
		}
		return nil
	})
}
