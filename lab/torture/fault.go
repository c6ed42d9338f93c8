package main

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/hasplock/hasp/internal/clock"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redistest"
)

// fault is a kind of failure.
type fault struct {
	least, most float64 // the bounds of the length, as multiples of the term
	name        string
	inject      inject
	thins       bool // a minority loses locks, so a lease that only a quorum granted may be lost

	at       []int64         // when the fault was injected
	recovery []time.Duration // the time to recovery after each injection
}

// inject is a function that starts a fault. It returns nil if it found no victim.
type inject func(r *run) *injection

// injection is a fault that was injected. Recovery is the time until all awaited grants have come.
type injection struct {
	heal   func() // may be nil
	client string // must get a key again; may be empty
	from   bool   // recovery counts from the beginning of the fault, not from its end
}

type catalog []*fault

// add adds a fault whose length in terms is between least and most.
func (c *catalog) add(least, most float64, name string, inject inject) {
	*c = append(*c, &fault{least: least, most: most, name: name, inject: inject})
}

// victims returns the turns that a fault may disturb, the best first.
type victims func(r *run) []lockCall

// holders returns the callers that will hold their keys for a while.
func holders(r *run) []lockCall {
	all, _ := r.rec.seen()
	return slices.DeleteFunc(all,
		func(h lockCall) bool { return h.plan-clock.Now() <= int64(r.term/3) })
}

func waiters(r *run) []lockCall {
	_, all := r.rec.seen()
	return all
}

// find returns the seat of a victim that has or wants a contended key, or nil if none comes within
// three seconds.
func (r *run) find(who victims) (victim *seat) {
	repeatUntil(3*time.Second, time.Millisecond, func() bool {
		for _, t := range who(r) {
			for _, s := range r.seats {
				if t.key < keys && s.String() == t.client {
					victim = s
				}
			}
		}
		r.at = clock.Now()
		return victim != nil
	})

	return victim
}

// processes adds the faults of one client's process.
func (c *catalog) processes() {
	c.add(0, 0.2, "holder killed", killed(holders))
	c.add(0, 0.2, "waiter killed", killed(waiters))
	c.add(1.2, 3, "holder stopped past its term", paused(holders))
	c.add(0.5, 3, "waiter stopped", paused(waiters))
}

// killed returns a fault that kills the process of a victim. A new process takes its seat.
func killed(who victims) inject {
	return func(r *run) *injection {
		s := r.find(who)
		if s == nil || s.String() == spared {
			return nil
		}
		s.kill()
		return &injection{heal: s.fill, from: true}
	}
}

// paused returns a fault that stops the process of a victim by SIGSTOP.
func paused(who victims) inject {
	return func(r *run) *injection {
		s := r.find(who)
		if s == nil || s.Pause() != nil {
			return nil
		}
		return &injection{heal: func() { r.Check(s.Resume()) }, from: true}
	}
}

// links adds the faults that disturb one client's links to all servers, or to a minority of them.
func (c *catalog) links() {
	add := func(least, most float64, name string, fail, heal func(*faultproxy.Proxy)) {
		c.add(least, most, "holder's "+name, linked(holders, fail, heal))
		c.add(least, most, "waiter's "+name, linked(waiters, fail, heal))
	}

	add(0.5, 0.5, "connections cut", (*faultproxy.Proxy).Cut, nil)
	add(0.5, 0.5, "connections dead in silence", (*faultproxy.Proxy).Forget, nil)
	add(0.6, 3, "link stalled", (*faultproxy.Proxy).Stall, (*faultproxy.Proxy).Flow)
	add(0.6, 3, "link cut one way, to the server", (*faultproxy.Proxy).StallRequests,
		(*faultproxy.Proxy).Flow)
	add(0.6, 3, "link cut one way, from the server", (*faultproxy.Proxy).StallReplies,
		(*faultproxy.Proxy).Flow)
	add(0.6, 3, "link down", (*faultproxy.Proxy).Down, (*faultproxy.Proxy).Up)
}

func linked(who victims, fail, heal func(*faultproxy.Proxy)) inject {
	return func(r *run) *injection {
		s := r.find(who)
		if s == nil {
			return nil
		}
		links := slices.Clone(r.store.links[s.n])
		r.rand.Shuffle(len(links), func(i, j int) { links[i], links[j] = links[j], links[i] })
		if len(links) > 1 && r.rand.IntN(2) == 0 {
			links = links[:(len(links)-1)/2]
		}
		each := func(do func(*faultproxy.Proxy)) {
			for _, p := range links {
				do(p)
			}
		}
		each(fail)
		in := &injection{client: s.String()}
		if heal != nil {
			in.heal = func() { each(heal) }
		}
		return in
	}
}

// step disturbs or repairs the server with the index i.
type step func(r *run, i int)

// onServers returns a fault of k servers. The steps fail and heal disturb and repair one. If heal
// is nil, the servers heal by themselves.
func onServers(k int, fail, heal step) inject {
	return func(r *run) *injection {
		servers := r.rand.Perm(len(r.store.addrs))[:k]
		for _, i := range servers {
			fail(r, i)
		}
		return &injection{heal: func() {
			for _, i := range servers {
				if heal != nil {
					heal(r, i)
				}
			}
		}}
	}
}

// The steps of Redis servers.

func kill(r *run, i int)    { r.store.servers[i].Kill() }
func restart(r *run, i int) { r.Check(r.store.servers[i].Start(true)) }
func empty(r *run, i int)   { r.Check(r.store.servers[i].Start(false)) }
func pause(r *run, i int)   { r.store.servers[i].Pause() }
func resume(r *run, i int)  { r.store.servers[i].Resume() }

// through returns a step that calls the function do with each client's link to a server.
func through(do func(*faultproxy.Proxy)) step {
	return func(r *run, i int) {
		for _, links := range r.store.links {
			do(links[i])
		}
	}
}

// command returns a step that sends commands without a proxy. Semicolons separate the commands.
func command(commands string) step {
	return func(r *run, i int) {
		for command := range strings.SplitSeq(commands, ";") {
			var args []any
			for word := range strings.FieldsSeq(command) {
				args = append(args, word)
			}
			if err := r.store.admin[i].Do(context.Background(), args...).Err(); err != nil {
				r.Fatalf("%s: %v", command, err)
			}
		}
	}
}

// A server that runs out of memory evicts keys or refuses writes.
var (
	evictKeys    = command("config set maxmemory 1; config set maxmemory-policy allkeys-random")
	refuseWrites = command("config set maxmemory 1; config set maxmemory-policy noeviction")
	enoughMemory = command("config set maxmemory 0; config set maxmemory-policy noeviction")
	flushAll     = command("flushall")
)

// servers adds the faults of n independent servers. Each fault disturbs a minority or a majority of
// them.
func (c *catalog) servers(n int, losing bool) {
	for _, k := range []int{(n - 1) / 2, n/2 + 1} {
		few := k <= (n-1)/2
		add := func(least, most float64, what string, fail, heal step) {
			c.add(least, most, of(n, k, what), onServers(k, fail, heal))
			(*c)[len(*c)-1].thins = few && !losing
		}
		if k > 0 && few != losing {
			add(0.5, 1, "emptied by FLUSHALL", flushAll, nil)
			add(0.2, 1, "restarted without data", kill, empty)
			add(0.6, 2, "evicting keys", evictKeys, enoughMemory)
		}
		if k == 0 || losing {
			continue
		}
		add(0.2, 2, "restarted with data", kill, restart)
		add(0.6, 3, "stopped", pause, resume)
		add(0.6, 3, "unreachable", through((*faultproxy.Proxy).Down),
			through((*faultproxy.Proxy).Up))
		add(0.6, 2, "out of memory, noeviction", refuseWrites, enoughMemory)
		c.commands(n, k)
	}

	if !losing {
		c.processes()
		c.links()
	}
}

// commands adds the faults that the harness causes by commands to k of n servers.
func (c *catalog) commands(n, k int) {
	add := func(what, text string) {
		c.add(0.5, 0.5, of(n, k, what), onServers(k, command(text), nil))
	}
	add("CLIENT KILL of normal connections", "client kill type normal")
	add("CLIENT KILL of subscribers", "client kill type pubsub")
}

// of returns the name of a fault of k servers out of n.
func of(n, k int, what string) string {
	switch {
	case n == 1:
		return "the server: " + what
	case k <= (n-1)/2:
		return "a minority: " + what
	case k == n:
		return "every server: " + what
	}

	return "a majority: " + what
}

// set adds the faults of servers that form one Redis.
func (c *catalog) set(s *store, losing bool) {
	switch {
	case losing && s.sentinel != nil:
		c.add(0.5, 1, "Sentinel fails over", promoted(false))
		c.add(0.5, 1, "the master is killed and Sentinel fails over", promoted(true))
	case losing:
		c.add(0.5, 1, "the key's master is killed and its replica takes over", promoted(true))
	default:
		c.processes()
		c.commands(len(s.servers), len(s.servers))
	}

	if s.cluster != nil && !losing {
		c.add(0.5, 1, "the key's master hands over to its replica", promoted(false))
		c.add(0.5, 2, "the key's slot moves to another master", func(r *run) *injection {
			// until heal, the move is incomplete
			return &injection{heal: s.cluster.Move(names[r.rand.IntN(keys)])}
		})
	}
}

// promoted returns a fault that promotes a replica of the master, or of a key's master. If dead is
// true, that master is killed first.
func promoted(dead bool) inject {
	return func(r *run) *injection {
		var old *redistest.Server
		failover := func() { r.store.sentinel.Failover() }
		if r.store.sentinel != nil {
			old = r.store.sentinel.Master()
		} else {
			key := names[r.rand.IntN(keys)]
			old = r.store.cluster.Master(key)
			failover = func() { r.store.cluster.Failover(key) }
		}
		if dead {
			old.Kill()
		}
		failover()
		return &injection{heal: func() {
			if dead {
				old.Restart()
			}
			old.Demoted()
		}}
	}
}
