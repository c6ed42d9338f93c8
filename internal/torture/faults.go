package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/hasplock/hasp/internal/hostclock"
	"github.com/hasplock/hasp/internal/redistest"
)

// faultsFor lists what a strategy's store and clients can suffer: what takes
// no lock away, or what may.
func faultsFor(s *store, losing bool) []fault {
	var all []fault
	add := func(class string, least, most float64, name string, inject func(n *nemesis) (injection, bool)) {
		all = append(all, fault{name: name, class: class, loses: losing, least: least, most: most, inject: inject})
	}
	n := len(s.servers)
	if losing && s.sentinel != nil {
		add(server, 0.5, 1, "Sentinel fails over", failedOver(false))
		add(server, 0.5, 1, "the master is killed and Sentinel fails over", failedOver(true))
		return all
	}
	if losing && s.cluster != nil {
		add(server, 0.5, 1, "the key's master is killed and its replica takes over", takenOver(true))
		return all
	}
	if losing {
		if n == 0 {
			return nil
		}
		most := n/2 + 1
		add(server, 0.5, 1, of(n, most, "emptied by FLUSHALL"), flushed(most))
		add(server, 0.2, 1, of(n, most, "restarted without data"), restarted(most, false))
		if n == 1 {
			add(server, 0.2, 1, "the server evicts keys", configured("maxmemory", "1", "maxmemory-policy", "allkeys-random"))
		}
		return all
	}

	add(process, 0, 0.2, "holder killed", killed((*nemesis).holder))
	add(process, 0, 0.2, "waiter killed", killed((*nemesis).waiter))
	add(process, 1.2, 3, "holder stopped past its term", stopped((*nemesis).holder))
	add(process, 0.5, 3, "waiter stopped", stopped((*nemesis).waiter))
	if s.ordered != nil {
		add(process, 0, 0.2, "head of the queue killed", killed((*nemesis).first))
		add(process, 1.2, 3, "head of the queue stopped", stopped((*nemesis).first))
	}
	if s.dir != "" {
		add(link, 0.5, 2, "a process cannot write, as on a full disk", full)
		return all
	}

	if s.cluster != nil {
		add(server, 0.5, 1, "the key's master hands over to its replica", takenOver(false))
		add(server, 0.5, 2, "the key's slot moves to another master", resharded)
	}
	if s.links == nil {
		return all
	}

	add(link, 0.5, 0.5, "holder's connections cut", linked((*nemesis).holder, (*redistest.Proxy).Cut, nil))
	add(link, 0.5, 0.5, "waiter's connections cut", linked((*nemesis).waiter, (*redistest.Proxy).Cut, nil))
	add(link, 0.6, 3, "holder's link stalled", linked((*nemesis).holder, (*redistest.Proxy).Stall, (*redistest.Proxy).Flow))
	add(link, 0.6, 3, "waiter's link stalled", linked((*nemesis).waiter, (*redistest.Proxy).Stall, (*redistest.Proxy).Flow))
	add(link, 0.6, 3, "holder's link down", linked((*nemesis).holder, (*redistest.Proxy).Down, (*redistest.Proxy).Up))
	add(link, 0.6, 3, "waiter's link down", linked((*nemesis).waiter, (*redistest.Proxy).Down, (*redistest.Proxy).Up))
	for _, op := range []string{acquire, renew, release} {
		add(link, 0.5, 0.5, op+": reply lost", spoiled(op, redistest.LoseReply))
		add(link, 0.6, 2, op+": reply never comes", spoiled(op, redistest.HangReply))
		add(link, 0.5, 0.5, op+": request lost", spoiled(op, redistest.LoseRequest))
		add(link, 0.6, 3, op+": request delivered late", spoiled(op, redistest.HoldRequest))
	}

	counts := []int{1}
	if n > 1 {
		counts = []int{n / 2, n/2 + 1}
	}
	for _, k := range counts {
		add(server, 0.2, 2, of(n, k, "restarted with data"), restarted(k, true))
		add(server, 0.6, 3, of(n, k, "stopped"), frozen(k))
		add(server, 0.6, 3, of(n, k, "unreachable"), unreachable(k))
		add(server, 0.6, 2, of(n, k, "slow to answer"), slow(k))
		add(server, 0.5, 0.5, of(n, k, "CLIENT KILL of normal connections"), told(k, "client", "kill", "type", "normal"))
		add(server, 0.5, 0.5, of(n, k, "CLIENT KILL of subscribers"), told(k, "client", "kill", "type", "pubsub"))
		add(server, 0.5, 0.5, of(n, k, "SCRIPT FLUSH"), told(k, "script", "flush"))
		add(server, 0.6, 2, of(n, k, "CLIENT PAUSE"), paused(k, "all"))
		add(server, 0.6, 2, of(n, k, "CLIENT PAUSE of writes"), paused(k, "write"))
	}
	if n == 1 {
		add(server, 0.6, 2, "the server is out of memory, noeviction", configured("maxmemory", "1", "maxmemory-policy", "noeviction"))
	} else {
		add(server, 0.2, 2, of(n, n/2, "restarted without data"), restarted(n/2, false))
		add(server, 0.5, 0.5, of(n, n/2, "emptied by FLUSHALL"), flushed(n/2))
		all[len(all)-2].thins, all[len(all)-1].thins = true, true
	}
	return all
}

// of names a fault of k servers of n.
func of(n, k int, what string) string {
	switch {
	case n == 1:
		return "the server: " + what
	case k <= n/2:
		return "a minority: " + what
	}
	return "a majority: " + what
}

type victim func(*nemesis) (turn, bool)

// killed has a process die, and another take its seat.
func killed(who victim) func(*nemesis) (injection, bool) {
	return func(n *nemesis) (injection, bool) {
		t, ok := who(n)
		if !ok {
			return injection{}, false
		}
		s := n.seats[t.proc.seat]
		s.proc.kill()
		return injection{from: true, key: t.key, seat: -1, heal: func() error { return n.fill(s) }}, true
	}
}

// stopped has a process stand still.
func stopped(who victim) func(*nemesis) (injection, bool) {
	return func(n *nemesis) (injection, bool) {
		t, ok := who(n)
		if !ok {
			return injection{}, false
		}
		p := t.proc.cmd.Process
		if stop(p) != nil {
			return injection{}, false
		}
		return injection{from: true, key: t.key, seat: -1, heal: func() error { return cont(p) }}, true
	}
}

// some draws k servers.
func (n *nemesis) some(k int) []int { return n.rand.Perm(len(n.store.servers))[:k] }

// linked does something to the way of a client to the servers, or to a minority
// of them.
func linked(who victim, fail, heal func(*redistest.Proxy)) func(*nemesis) (injection, bool) {
	return func(n *nemesis) (injection, bool) {
		k := len(n.store.servers)
		if k > 1 && n.rand.IntN(2) == 0 {
			k /= 2
		}
		servers := n.some(k)
		t, ok := who(n)
		if !ok {
			return injection{}, false
		}
		all := n.store.links[t.proc.seat]
		for _, i := range servers {
			fail(all[i])
		}
		return injection{key: -1, seat: t.proc.seat, heal: func() error {
			if heal != nil {
				for _, i := range servers {
					heal(all[i])
				}
			}
			return nil
		}}, true
	}
}

// spoiled has the next command of an operation fail, on one server, whoever's
// it is.
func spoiled(op string, f redistest.Fault) func(*nemesis) (injection, bool) {
	return func(n *nemesis) (injection, bool) {
		at := n.rand.IntN(len(n.store.servers))
		texts := n.store.texts[op]
		for began := time.Now(); time.Since(began) < search; {
			seat, happened := n.trap(texts, at, f)
			if !happened {
				continue
			}
			n.busy[seat] = true
			n.mark()
			p := n.store.links[seat][at]
			return injection{key: -1, seat: seat, heal: func() error {
				switch f {
				case redistest.HoldRequest:
					p.Release()
				case redistest.HangReply:
					p.Cut()
				}
				return nil
			}}, true
		}
		return injection{}, false
	}
}

// trap waits a while for a command to fail on the way of any client to a
// server, and returns whose it was.
func (n *nemesis) trap(texts []string, at int, f redistest.Fault) (seat int, happened bool) {
	defer func() {
		for _, way := range n.store.links {
			way[at].Forgive()
		}
	}()
	for i, way := range n.store.links {
		if !n.busy[i] {
			for _, text := range texts {
				way[at].Fail(text, f)
			}
		}
	}
	for range 200 {
		for i, way := range n.store.links {
			if !n.busy[i] && way[at].Pending() < len(texts) {
				return i, true
			}
		}
		time.Sleep(time.Millisecond)
	}
	return 0, false
}

// everywhere is a fault of k servers that ends for all of them.
func everywhere(k int, fail, heal func(n *nemesis, i int) error) func(*nemesis) (injection, bool) {
	return func(n *nemesis) (injection, bool) {
		servers := n.some(k)
		each := func(f func(*nemesis, int) error) (err error) {
			for _, i := range servers {
				if f != nil {
					err = errors.Join(err, f(n, i))
				}
			}
			return err
		}
		if err := each(fail); err != nil {
			n.fail("harness", hostclock.Now(), err.Error())
			return injection{}, false
		}
		return injection{key: -1, seat: -1, heal: func() error { return each(heal) }}, true
	}
}

func restarted(k int, data bool) func(*nemesis) (injection, bool) {
	return everywhere(k,
		func(n *nemesis, i int) error { return n.store.servers[i].Stop() },
		func(n *nemesis, i int) error { return n.store.servers[i].Start(data) })
}

func frozen(k int) func(*nemesis) (injection, bool) {
	return everywhere(k,
		func(n *nemesis, i int) error { n.store.servers[i].Pause(); return nil },
		func(n *nemesis, i int) error { n.store.servers[i].Resume(); return nil })
}

// links does something to all ways to a server.
func links(f func(*redistest.Proxy)) func(n *nemesis, i int) error {
	return func(n *nemesis, i int) error {
		for _, way := range n.store.links {
			f(way[i])
		}
		return nil
	}
}

func unreachable(k int) func(*nemesis) (injection, bool) {
	return everywhere(k, links((*redistest.Proxy).Down), links((*redistest.Proxy).Up))
}

// slow has replies come more than half a term late.
func slow(k int) func(*nemesis) (injection, bool) {
	return func(n *nemesis) (injection, bool) {
		d := n.span(0.5, 0.7)
		return everywhere(k,
			links(func(p *redistest.Proxy) { p.Delay(d) }),
			links(func(p *redistest.Proxy) { p.Delay(0) }))(n)
	}
}

// tell sends a command to a server, past the proxies.
func (n *nemesis) tell(i int, args ...any) error {
	if err := n.store.admin[i].Do(context.Background(), args...).Err(); err != nil {
		return fmt.Errorf("%v: %w", args, err)
	}
	return nil
}

func told(k int, args ...any) func(*nemesis) (injection, bool) {
	return everywhere(k, func(n *nemesis, i int) error { return n.tell(i, args...) }, nil)
}

func flushed(k int) func(*nemesis) (injection, bool) { return told(k, "flushall") }

// paused has servers answer nobody for a while. One that pauses everybody goes
// on by itself and hears nobody before.
func paused(k int, what string) func(*nemesis) (injection, bool) {
	return everywhere(k,
		func(n *nemesis, i int) error { return n.tell(i, "client", "pause", n.lasts.Milliseconds(), what) },
		func(n *nemesis, i int) error { return n.tell(i, "client", "unpause") })
}

// configured sets parameters of the server, and afterwards those it began with.
func configured(pairs ...string) func(*nemesis) (injection, bool) {
	set := func(pairs ...string) func(n *nemesis, i int) error {
		return func(n *nemesis, i int) error {
			for pair := range slices.Chunk(pairs, 2) {
				if err := n.tell(i, "config", "set", pair[0], pair[1]); err != nil {
					return err
				}
			}
			return nil
		}
	}
	return everywhere(1, set(pairs...), set("maxmemory", "0", "maxmemory-policy", "noeviction"))
}

// failedOver has sentinels make a replica the master.
func failedOver(dead bool) func(*nemesis) (injection, bool) {
	return func(n *nemesis) (injection, bool) {
		old := n.store.sentinel.Master()
		if dead {
			old.Kill()
		}
		n.store.sentinel.Failover()
		return injection{key: -1, seat: -1, heal: func() error {
			if dead {
				if err := old.Start(true); err != nil {
					return err
				}
			}
			return n.demoted(old)
		}}, true
	}
}

// takenOver has the replica of a key's master take its place.
func takenOver(dead bool) func(*nemesis) (injection, bool) {
	return func(n *nemesis) (injection, bool) {
		key := n.rand.IntN(len(n.names))
		old := n.store.cluster.Master(n.names[key])
		if dead {
			old.Kill()
		}
		n.store.cluster.Failover(n.names[key])
		return injection{key: key, seat: -1, heal: func() error {
			if dead {
				if err := old.Start(true); err != nil {
					return err
				}
			}
			return n.demoted(old)
		}}, true
	}
}

// demoted waits until a server that was a master knows that it is none.
func (n *nemesis) demoted(old *redistest.Server) error {
	rdb := n.store.admin[slices.Index(n.store.servers, old)]
	for began := time.Now(); ; time.Sleep(5 * time.Millisecond) {
		role, err := rdb.Do(context.Background(), "role").Slice()
		if err == nil && len(role) > 0 && role[0] == "slave" {
			return nil
		}
		if time.Since(began) > patience {
			return fmt.Errorf("%s is still a master: %v", old.Addr, err)
		}
	}
}

// resharded has the slot of a key move, and stand half-way for a while.
func resharded(n *nemesis) (injection, bool) {
	key := n.rand.IntN(len(n.names))
	finish := n.store.cluster.Move(n.names[key])
	return injection{key: key, seat: -1, heal: func() error { finish(); return nil }}, true
}

// full keeps a process from writing to files.
func full(n *nemesis) (injection, bool) {
	t, ok := n.holder()
	if !ok {
		return injection{}, false
	}
	lift, err := limitFiles(t.proc.cmd.Process.Pid)
	if err != nil {
		n.fail("harness", hostclock.Now(), err.Error())
		return injection{}, false
	}
	return injection{key: -1, seat: t.proc.seat, heal: lift}, true
}
