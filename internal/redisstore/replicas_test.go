package redisstore

import (
	"fmt"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redistest"
)

// waits returns how often a server got WAIT.
func waits(t *testing.T, rdb *redis.Client) (n int) {
	t.Helper()
	stats := rdb.Info(t.Context(), "commandstats").Val()
	fmt.Sscanf(InfoField(stats, "cmdstat_wait"), "calls=%d,", &n)
	return n
}

func holdByCommand(t *testing.T, s *Store, key string) Reply {
	return reply(s.Send(t.Context(), key, true, "set", key, "v", "px", "600000", "nx"))
}

func holdByScript(t *testing.T, s *Store, key string) Reply {
	return reply(s.Run(t.Context(), taking, on(key)))
}

func TestReplicasConfirm(t *testing.T) {
	t.Parallel()
	set := redistest.StartSentinel(t, nil)
	s := opened(t, set.URL(), map[string]string{"replicas": "2"})
	if n := s.Replicas(); n != 2 {
		t.Errorf("%d replicas", n)
	}
	master, replica := set.Master().Client(), set.Servers[2]
	many := numbered("each", 20)

	// Twice, because at first the server does not know the script.
	for range 2 {
		await.Must(t, master.FlushDB(t.Context()).Err())
		wants(t, "hold", "OK", holdByCommand(t, s, "k"))
		wants(t, "run", taken, holdByScript(t, s, "r"))
		if got, err := replica.Client().Get(t.Context(), "r").Result(); got != "1" {
			t.Errorf("a replica has %q, %v", got, err)
		}
		before := waits(t, master)
		for i, r := range each(t.Context(), s, taking, many...) {
			wants(t, many[i], taken, r)
		}
		if n := waits(t, master) - before; n != 1 && n != 2 {
			t.Errorf("asked %d times to wait", n)
		}
	}
	// A command that takes nothing needs no replica.
	before := waits(t, master)
	for _, way := range ways {
		wants(t, way.name, int64(1), way.add(t.Context(), s, way.name))
	}
	if n := waits(t, master) - before; n != 0 {
		t.Errorf("asked %d times to wait", n)
	}

	replica.Pause()
	defer replica.Resume()
	unknown := func(r Reply) {
		t.Helper()
		wantsOutage(t, r.Err, "1 of 2 replicas")
	}
	// All at the same time, because each takes as long as a call without a deadline waits.
	var wg sync.WaitGroup
	wg.Go(func() {
		unknown(holdByCommand(t, s, "k2"))
		if n := master.Exists(t.Context(), "k2").Val(); n != 1 {
			t.Error("the master did not get the command")
		}
	})
	wg.Go(func() { unknown(holdByScript(t, s, "r2")) })
	wg.Go(func() {
		replies := each(t.Context(), s, taking, append(many, "new")...)
		unknown(replies[len(many)])
		for i, key := range many {
			wants(t, key, held, replies[i])
		}
	})
	wg.Wait()
	// Without the replicas it is still known that a key is held, once the server has
	// given up the WAIT for earlier writes of the connection.
	until(t, "the command is answered", func() bool {
		r := holdByCommand(t, s, "k")
		return r.Value == nil && r.Err == nil
	})
	until(t, "the script is answered", func() bool {
		r := holdByScript(t, s, "r")
		return reflect.DeepEqual(r.Value, held) && r.Err == nil
	})
}

// replicasConfirm tests the same on a cluster, whose slots move.
func replicasConfirm(t *testing.T, set *redistest.Cluster) {
	t.Helper()
	s := opened(t, set.URL(), map[string]string{"replicas": "1"})
	many := numbered("each", 30)
	for i, r := range each(t.Context(), s, taking, many...) {
		wants(t, many[i], taken, r)
	}
	finish := set.Move("w")
	wants(t, "half-way", "OK", holdByCommand(t, s, "w"))
	finish()
	master := set.Master("w").Client()
	before := waits(t, master)
	wants(t, "moved", taken, holdByScript(t, s, "{w}r"))
	if n := waits(t, master) - before; n < 1 {
		t.Error("the new master was not asked to wait")
	}
	early := await.Timeout(t, 30*time.Second) // go-redis itself asks for the slots once a minute
	until(t, "the new map of slots", func() bool {
		at := await.Value(s.find(t.Context(), "w"))
		return early.Err() == nil && at.addr == set.Master("w").Addr
	})
}

func TestRepliesThatTookNothing(t *testing.T) {
	one, none := int64(1), int64(0)
	for want, replies := range map[bool][]any{
		true:  {nil, none, -one, []any{none, "x"}, []any{-one}, []any{nil, "x"}},
		false: {one, "OK", "0", []any{one, "x"}, []any{"0"}, []any{}},
	} {
		for _, r := range replies {
			if tookNothing(r) != want {
				t.Errorf("%#v: got %v", r, !want)
			}
		}
	}
}

func TestPatienceEndsBeforeTheCall(t *testing.T) {
	for left, most := range map[time.Duration]int64{
		hour: 2400, time.Second: 800, time.Millisecond: 1, -time.Second: 1,
	} {
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
	s, probe, err := Prepare(set.URL(), map[string]string{"replicas": "2"}, 2)
	await.Must(t, err)
	defer s.Close()
	ctx := await.Timeout(t, time.Minute)
	await.Must(t, probe(ctx))
	master, replica := set.Master().Client(), set.Servers[2]
	wants(t, "known", taken, each(ctx, s, taking, "known")[0])

	replica.Pause()
	resume := sync.OnceFunc(replica.Resume)
	defer resume()
	var calls sync.WaitGroup
	holds := func(key string) {
		calls.Go(func() { wants(t, key, taken, reply(s.Run(ctx, taking, on(key)))) })
	}
	holds("first")
	until(t, "the hold waits for the replica", func() bool {
		return strings.Contains(master.Info(ctx, "clients").Val(), "blocked_clients:1\r")
	})

	// From here on commands travel together.
	const callers = 100
	for _, key := range numbered("k", callers) {
		holds(key)
	}
	until(t, "all callers wait", func() bool {
		_, waiting := progress(s.one.holds)
		return waiting == callers
	})

	calls.Go(func() { wants(t, "renewal", taken, each(ctx, s, taking, "renewed")[0]) })
	until(t, "a renewal reaches the server", func() bool {
		return master.Exists(ctx, "renewed").Val() == 1
	})

	before := waits(t, master)
	resume()
	calls.Wait()
	// The hold that waited, the renewal, and the other holds together.
	if n := waits(t, master) - before; n > 3 {
		t.Errorf("the server was asked %d times to wait for its replicas", n)
	}
	until(t, "no hold waits", func() bool {
		flights, waiting := progress(s.one.holds)
		return flights+waiting == 0
	})
}
