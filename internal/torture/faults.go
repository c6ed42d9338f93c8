package main

import (
	"time"

	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redistest"
)

// faults returns the faults of a strategy's store and clients: those that take
// locks away if losing, and otherwise those that do not.
func (s *store) faults(losing bool) []fault {
	switch {
	case losing && s.dir != "":
		return nil
	case losing:
		return losses(s)
	case s.dir != "":
		return append(processFaults(s), fileFaults(s)...)
	case s.service != nil:
		return append(append(processFaults(s), linkFaults()...), setFaults(s)...)
	case s.sentinel != nil || s.cluster != nil:
		return append(processFaults(s), setFaults(s)...)
	}
	return append(append(processFaults(s), linkFaults()...), serverFaults(s)...)
}

func processFaults(s *store) (all []fault) {
	add := func(least, most float64, name string, inject func(n *nemesis) (injection, bool)) {
		all = append(all, fault{name: name, class: process, least: least, most: most, inject: inject})
	}
	add(0, 0.2, "holder killed", killed((*nemesis).holder))
	add(0, 0.2, "waiter killed", killed((*nemesis).waiter))
	add(1.2, 3, "holder stopped past its term", stopped((*nemesis).holder))
	add(0.5, 3, "waiter stopped", stopped((*nemesis).waiter))
	if s.jumps {
		add(0.5, 2, "holder's wall clock jumps by a minute", jumped((*nemesis).holder))
		add(0.5, 2, "waiter's wall clock jumps by a minute", jumped((*nemesis).waiter))
	}
	if s.strategy == fairlock {
		add(0, 0.2, "head of the queue killed", killed((*nemesis).first))
		add(1.2, 3, "head of the queue stopped", stopped((*nemesis).first))
	}
	return all
}

func fileFaults(s *store) (all []fault) {
	add := func(least, most float64, name string, inject func(n *nemesis) (injection, bool)) {
		all = append(all, fault{name: name, class: link, least: least, most: most, inject: inject})
	}
	add(0.5, 2, "a process cannot write, as by its limit", limited)
	add(0, 0.2, "a process dies within a write", torn)
	if s.small {
		add(0.5, 2, "the disk is full", full)
	}
	return all
}

// linkFaults are the faults of the links of one client.
func linkFaults() (all []fault) {
	add := func(least, most float64, name string, inject func(n *nemesis) (injection, bool)) {
		all = append(all, fault{name: name, class: link, least: least, most: most, inject: inject})
	}
	for _, v := range []struct {
		name string
		find victim
	}{{"holder's", (*nemesis).holder}, {"waiter's", (*nemesis).waiter}} {
		add(0.5, 0.5, v.name+" connections cut", linked(v.find, (*faultproxy.Proxy).Cut, nil))
		add(0.6, 3, v.name+" link stalled", linked(v.find, (*faultproxy.Proxy).Stall, (*faultproxy.Proxy).Flow))
		add(0.6, 3, v.name+" link cut one way, to the server", linked(v.find, (*faultproxy.Proxy).StallRequests, (*faultproxy.Proxy).Flow))
		add(0.6, 3, v.name+" link cut one way, from the server", linked(v.find, (*faultproxy.Proxy).StallReplies, (*faultproxy.Proxy).Flow))
		add(0.6, 3, v.name+" link down", linked(v.find, (*faultproxy.Proxy).Down, (*faultproxy.Proxy).Up))
		add(0.6, 3, v.name+" bytes trickle", linked(v.find,
			func(p *faultproxy.Proxy) { p.Trickle(term / 2) },
			func(p *faultproxy.Proxy) { p.Trickle(0) }))
	}
	for _, op := range []string{acquire, renew, release} {
		add(0.5, 0.5, op+": reply lost", spoiled(op, faultproxy.LoseReply))
		add(0.6, 2, op+": reply never comes", spoiled(op, faultproxy.HangReply))
		add(0.5, 0.5, op+": request lost", spoiled(op, faultproxy.LoseRequest))
		add(0.6, 3, op+": request delivered late", spoiled(op, faultproxy.HoldRequest))
	}
	return all
}

// serverFaults are the faults of one server, or of a minority and a majority of
// the servers.
func serverFaults(s *store) (all []fault) {
	add := func(least, most float64, name string, inject func(n *nemesis) (injection, bool)) {
		all = append(all, fault{name: name, class: server, least: least, most: most, inject: inject})
	}
	n := len(s.servers)
	counts := []int{1}
	if n > 1 {
		counts = []int{(n - 1) / 2, n/2 + 1}
	}
	for _, k := range counts {
		add(0.2, 2, of(n, k, "restarted with data"), restarted(k, true))
		add(0.6, 3, of(n, k, "stopped"), frozen(k))
		add(0.6, 3, of(n, k, "unreachable"), unreachable(k))
		add(0.6, 2, of(n, k, "slow to answer"), slow(k))
		add(0.6, 2, of(n, k, "a read-only replica"), demotedFor(k))
		add(0.6, 2, of(n, k, "out of memory, noeviction"), configured(k, "maxmemory", "1", "maxmemory-policy", "noeviction"))
		add(0.5, 0.5, of(n, k, "CLIENT KILL of normal connections"), ordered(k, "client", "kill", "type", "normal"))
		add(0.5, 0.5, of(n, k, "CLIENT KILL of subscribers"), ordered(k, "client", "kill", "type", "pubsub"))
		add(0.5, 0.5, of(n, k, "SCRIPT FLUSH"), ordered(k, "script", "flush"))
		add(0.6, 2, of(n, k, "CLIENT PAUSE"), paused(k, "all"))
		add(0.6, 2, of(n, k, "CLIENT PAUSE of writes"), paused(k, "write"))
		if s.skews {
			add(0.5, 2, of(n, k, "clock steps by less than the drift"), stepped(k))
		}
	}
	if n > 1 {
		k := (n - 1) / 2
		add(0.2, 2, of(n, k, "restarted without data"), restarted(k, false))
		add(0.5, 0.5, of(n, k, "emptied by FLUSHALL"), flushed(k))
		add(0.6, 2, of(n, k, "evicting keys"), configured(k, "maxmemory", "1", "maxmemory-policy", "allkeys-random"))
		for i := len(all) - 3; i < len(all); i++ {
			all[i].thins = true
		}
	}
	return all
}

// setFaults are the faults of servers that form one Redis.
func setFaults(s *store) (all []fault) {
	add := func(least, most float64, name string, inject func(n *nemesis) (injection, bool)) {
		all = append(all, fault{name: name, class: server, least: least, most: most, inject: inject})
	}
	n := len(s.servers)
	add(0.5, 0.5, "every server: CLIENT KILL of normal connections", ordered(n, "client", "kill", "type", "normal"))
	add(0.5, 0.5, "every server: CLIENT KILL of subscribers", ordered(n, "client", "kill", "type", "pubsub"))
	add(0.5, 0.5, "every server: SCRIPT FLUSH", ordered(n, "script", "flush"))
	add(0.6, 2, "every server: CLIENT PAUSE of writes", paused(n, "write"))
	if s.service != nil {
		add(0.5, 2, "the replica stopped", withReplica((*redistest.Server).Pause, (*redistest.Server).Resume))
		add(0.5, 1, "the master hands over to its replica, and the address follows", moved(false))
		add(0.5, 1, "the master is killed, and the address leads to its replica", moved(true))
	}
	if s.cluster != nil {
		add(0.5, 1, "the key's master hands over to its replica", takenOver(false))
		add(0.5, 2, "the key's slot moves to another master", resharded)
	}
	return all
}

// losses are the faults that take locks away.
func losses(s *store) (all []fault) {
	add := func(least, most float64, name string, inject func(n *nemesis) (injection, bool)) {
		all = append(all, fault{name: name, class: server, loses: true, least: least, most: most, inject: inject})
	}
	switch n := len(s.servers); {
	case s.service != nil:
	case s.sentinel != nil:
		add(0.5, 1, "Sentinel fails over", failedOver(false))
		add(0.5, 1, "the master is killed and Sentinel fails over", failedOver(true))
	case s.cluster != nil:
		add(0.5, 1, "the key's master is killed and its replica takes over", takenOver(true))
	default:
		most := n/2 + 1
		add(0.5, 1, of(n, most, "emptied by FLUSHALL"), flushed(most))
		add(0.2, 1, of(n, most, "restarted without data"), restarted(most, false))
		add(0.6, 2, of(n, most, "evicting keys"), configured(most, "maxmemory", "1", "maxmemory-policy", "allkeys-random"))
		if s.skews {
			add(0.5, 2, of(n, most, clockBack), skewed(most, -time.Minute))
			add(0.5, 2, of(n, most, bootedBack), booted(most))
		}
		if s.skews && n > 1 {
			// A lease that had a bare majority has it no more when one of them has
			// ended its term, and the others do not know.
			add(0.5, 2, of(n, (n-1)/2, clockBack), skewed((n-1)/2, -time.Minute))
			add(0.5, 2, of(n, (n-1)/2, bootedBack), booted((n-1)/2))
		}
	}
	return all
}

// clockBack sets the clock back first. The opposite order is not tested: if a
// server's clock was ahead and then it loses its data, it cannot make larger
// fences.
const clockBack = "clock set back by a minute, and forward again"

// bootedBack is a machine that does not know the time when it boots.
const bootedBack = "restarted with the clock an hour behind, and set right"

// of names a fault of k servers of n.
func of(n, k int, what string) string {
	switch {
	case n == 1:
		return "the server: " + what
	case k <= (n-1)/2:
		return "a minority: " + what
	}
	return "a majority: " + what
}
