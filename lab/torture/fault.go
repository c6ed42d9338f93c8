package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/hasplock/hasp/internal/clock"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redistest"
)

// fault is a kind of failure.
type fault struct {
	name        string
	least, most float64 // the bounds of the length, as multiples of the term
	takes       loss
	inject      inject

	recovery []time.Duration // from the end of each injected fault to the awaited grants
}

// loss says which locks a fault may take away.
type loss int

const (
	nothing  loss = iota
	minority      // the locks on a minority, so a lease that only a quorum granted may be lost
	locks         // any lock, so two callers may hold a key
)

// inject is a function that starts a fault. It returns the function that ends the fault, or nil if
// it found no victim.
type inject func(r *run) (heal func())

type catalog []*fault

func (c *catalog) add(name string, least, most float64, takes loss, inject inject) {
	*c = append(*c, &fault{name: name, least: least, most: most, takes: takes, inject: inject})
}

// strike is a fault of the process in a seat. It returns nil if the process is no victim.
type strike func(*seat) (heal func())

// ofHolder returns a fault of a process that will hold a contended key for a while.
func ofHolder(fail strike) inject {
	return func(r *run) (heal func()) {
		repeatUntil(3*time.Second, time.Millisecond, func() bool {
			name := r.rec.holder(clock.Now() + int64(r.term/3))
			i := slices.IndexFunc(r.seats, func(s *seat) bool { return s.String() == name })
			if i >= 0 {
				r.victim = r.seats[i]
				heal = fail(r.victim)
			}
			return i >= 0
		})
		return heal
	}
}

// ofWaiter returns a fault of any process, because most callers of each process wait.
func ofWaiter(fail strike) inject {
	return func(r *run) (heal func()) {
		r.victim = r.seats[r.rand.IntN(seats)]
		return fail(r.victim)
	}
}

// processes adds the faults of one client's process.
func (c *catalog) processes() {
	c.add("holder killed", 0, 0.2, nothing, ofHolder(killed))
	c.add("waiter killed", 0, 0.2, nothing, ofWaiter(killed))
	c.add("holder stopped past its term", 1.2, 3, nothing, ofHolder(paused))
	c.add("waiter stopped", 0.5, 3, nothing, ofWaiter(paused))
}

// killed kills a process. A new process takes its seat.
func killed(s *seat) (heal func()) {
	if s.String() == spared {
		return nil
	}
	s.kill()
	return s.fill
}

// paused stops a process by SIGSTOP.
func paused(s *seat) (heal func()) {
	s.run.Check(s.Pause())
	return func() { s.run.Check(s.Resume()) }
}

// links adds the faults that disturb one client's links to all servers, or to a minority of them.
func (c *catalog) links() {
	add := func(name string, least, most float64, fail, heal func(*faultproxy.Proxy)) {
		c.add("holder's "+name, least, most, nothing, ofHolder(linked(fail, heal)))
		c.add("waiter's "+name, least, most, nothing, ofWaiter(linked(fail, heal)))
	}

	add("connections cut", 0.5, 0.5, (*faultproxy.Proxy).Cut, (*faultproxy.Proxy).Up)
	add("connections dead in silence", 0.5, 0.5, (*faultproxy.Proxy).Forget,
		(*faultproxy.Proxy).Up)
	add("link stalled", 0.6, 3, (*faultproxy.Proxy).Stall, (*faultproxy.Proxy).Flow)
	add("link down", 0.6, 3, (*faultproxy.Proxy).Down, (*faultproxy.Proxy).Up)
}

func linked(fail, heal func(*faultproxy.Proxy)) strike {
	return func(s *seat) func() {
		r := s.run
		links := slices.Clone(r.store.links[s.n])
		r.rand.Shuffle(len(links), func(i, j int) { links[i], links[j] = links[j], links[i] })
		if len(links) > 1 && r.rand.IntN(2) == 0 {
			links = links[:(len(links)-1)/2]
		}
		each(links, fail)
		return func() { each(links, heal) }
	}
}

func each(links []*faultproxy.Proxy, do func(*faultproxy.Proxy)) {
	for _, p := range links {
		do(p)
	}
}

// step disturbs or repairs the server with the index i.
type step func(r *run, i int)

// onServers returns a fault of k servers. The steps fail and heal disturb and repair one. If heal
// is nil, the servers heal by themselves.
func onServers(k int, fail, heal step) inject {
	return func(r *run) func() {
		servers := r.rand.Perm(len(r.store.addrs))[:k]
		for _, i := range servers {
			fail(r, i)
		}
		return func() {
			for _, i := range servers {
				if heal != nil {
					heal(r, i)
				}
			}
		}
	}
}

// The steps of Redis servers.

func kill(r *run, i int)    { r.store.servers[i].Kill() }
func restart(r *run, i int) { r.Check(r.store.servers[i].Start(true)) }
func empty(r *run, i int)   { r.Check(r.store.servers[i].Start(false)) }
func pause(r *run, i int)   { r.store.servers[i].Pause() }
func resume(r *run, i int)  { r.store.servers[i].Resume() }

func flushAll(r *run, i int) {
	r.Check(r.store.admin[i].FlushAll(context.Background()).Err())
}

// memory limits the memory of a server. A server without memory refuses writes.
func memory(limit string) step {
	return func(r *run, i int) {
		r.Check(r.store.admin[i].ConfigSet(context.Background(), "maxmemory", limit).Err())
	}
}

// through returns a step that calls the function do with each client's link to a server.
func through(do func(*faultproxy.Proxy)) step {
	return func(r *run, i int) {
		for _, links := range r.store.links {
			do(links[i])
		}
	}
}

// redis adds the faults of n independent Redis servers. Each fault of the servers disturbs a
// minority or a majority of them.
func (c *catalog) redis(n int) {
	c.processes()
	c.links()
	for _, k := range []int{(n - 1) / 2, n/2 + 1} {
		if k == 0 {
			continue
		}
		takes := locks
		if k <= (n-1)/2 {
			takes = minority
		}
		add := func(what string, least, most float64, takes loss, fail, heal step) {
			name := fmt.Sprintf("%d of %d servers: %s", k, n, what)
			c.add(name, least, most, takes, onServers(k, fail, heal))
		}
		add("emptied by FLUSHALL", 0.5, 1, takes, flushAll, nil)
		add("restarted without data", 0.2, 1, takes, kill, empty)
		add("restarted with data", 0.2, 2, nothing, kill, restart)
		add("stopped", 0.6, 3, nothing, pause, resume)
		add("unreachable", 0.6, 3, nothing, through((*faultproxy.Proxy).Down),
			through((*faultproxy.Proxy).Up))
		add("out of memory", 0.6, 2, nothing, memory("1"), memory("0"))
	}
}

// set adds the faults of servers that form one Redis.
func (c *catalog) set(s *store) {
	c.processes()
	takes := locks
	if s.cluster != nil { // the master hands over without a loss
		takes = nothing
	}
	c.add("a replica takes over", 0.5, 1, takes, promoted(false))
	c.add("the master is killed and a replica takes over", 0.5, 1, locks, promoted(true))
	if s.cluster != nil {
		c.add("the key's slot moves to another master", 0.5, 2, nothing, func(r *run) func() {
			// until heal, the move is incomplete
			return s.cluster.Move(names[r.rand.IntN(keys)])
		})
	}
}

// promoted returns a fault that promotes a replica of the master, or of a key's master. If dead is
// true, that master is killed first.
func promoted(dead bool) inject {
	return func(r *run) func() {
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
		return func() {
			if dead {
				old.Restart()
			}
			old.Demoted()
		}
	}
}
