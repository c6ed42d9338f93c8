package main

import (
	"time"

	"github.com/hasplock/hasp/internal/faultproxy"
)

// fault is a kind of failure.
type fault struct {
	name        string
	class       string  // two faults at the same time have different classes
	thins       bool    // a minority loses locks, so a lease that only a quorum granted may be lost
	least, most float64 // the bounds of the length, as multiples of the term
	inject      inject

	at       []int64         // when the fault was injected
	recovery []time.Duration // the time to recovery after each injection
}

// Classes of faults.
const (
	process = "process"
	link    = "link"
	server  = "server"
	alone   = "alone" // of a server; no other fault prolongs such a fault
)

type catalog []*fault

// add adds a fault whose length in terms is between least and most.
func (c *catalog) add(class string, least, most float64, name string, inject inject) *fault {
	f := &fault{name: name, class: class, least: least, most: most, inject: inject}
	*c = append(*c, f)
	return f
}

func (c *catalog) processes() {
	c.add(process, 0, 0.2, "holder killed", killed(holders))
	c.add(process, 0, 0.2, "waiter killed", killed(waiters))
	c.add(process, 1.2, 3, "holder stopped past its term", stopped(holders))
	c.add(process, 0.5, 3, "waiter stopped", stopped(waiters))
}

// links adds the faults that disturb all connections of one client, or one request of any client.
func (c *catalog) links() {
	for _, v := range []struct {
		name string
		who  victims
	}{{"holder's", holders}, {"waiter's", waiters}} {
		c.add(link, 0.5, 0.5, v.name+" connections cut", linked(v.who, (*faultproxy.Proxy).Cut, nil))
		c.add(link, 0.6, 3, v.name+" link stalled", linked(v.who, (*faultproxy.Proxy).Stall, (*faultproxy.Proxy).Flow))
		c.add(link, 0.6, 3, v.name+" link cut one way, to the server", linked(v.who, (*faultproxy.Proxy).StallRequests, (*faultproxy.Proxy).Flow))
		c.add(link, 0.6, 3, v.name+" link cut one way, from the server", linked(v.who, (*faultproxy.Proxy).StallReplies, (*faultproxy.Proxy).Flow))
		c.add(link, 0.6, 3, v.name+" link down", linked(v.who, (*faultproxy.Proxy).Down, (*faultproxy.Proxy).Up))
	}

	// The proxies do not know what a request asks for, so they spoil any request.
	c.add(link, 0.5, 0.5, "a request: its reply is lost", spoiled(faultproxy.LoseReply))
	c.add(link, 0.6, 2, "a request: its reply never comes", spoiled(faultproxy.HangReply))
	c.add(link, 0.5, 0.5, "a request is lost", spoiled(faultproxy.LoseRequest))
	c.add(link, 0.6, 3, "a request is delivered late", spoiled(faultproxy.HoldRequest))
}

// evictKeys and refuseWrites let a server run out of memory, so that it evicts keys or refuses
// writes. enoughMemory restores the defaults.
const (
	evictKeys    = "config set maxmemory 1; config set maxmemory-policy allkeys-random"
	refuseWrites = "config set maxmemory 1; config set maxmemory-policy noeviction"
	enoughMemory = "config set maxmemory 0; config set maxmemory-policy noeviction"
)

// servers adds the faults of n independent servers. Each fault disturbs a minority or a majority of
// them.
func (c *catalog) servers(n int, losing bool) {
	minority, majority := (n-1)/2, n/2+1
	if losing {
		c.add(server, 0.5, 1, of(n, majority, "emptied by FLUSHALL"), ordered(majority, "flushall", ""))
		c.add(server, 0.2, 1, of(n, majority, "restarted without data"), restarted(majority, false))
		c.add(server, 0.6, 2, of(n, majority, "evicting keys"), ordered(majority, evictKeys, enoughMemory))
		return
	}
	c.processes()
	c.links()
	for _, k := range []int{minority, majority} {
		if k == 0 {
			continue
		}
		add := func(least, most float64, what string, inject inject) {
			c.add(server, least, most, of(n, k, what), inject)
		}
		add(0.2, 2, "restarted with data", restarted(k, true))
		add(0.6, 3, "stopped", frozen(k))
		add(0.6, 3, "unreachable", unreachable(k))
		add(0.6, 2, "slow to answer", slow(k))
		// A replica of an unreachable master keeps its data and refuses writes.
		add(0.6, 2, "a read-only replica", ordered(k, "replicaof 127.0.0.1 1", "replicaof no one"))
		add(0.6, 2, "out of memory, noeviction", ordered(k, refuseWrites, enoughMemory))
		add(0.6, 2, "CLIENT PAUSE", paused(k, "all"))
		c.commands(n, k)
	}

	if minority > 0 {
		c.add(server, 0.2, 2, of(n, minority, "restarted without data"), restarted(minority, false)).thins = true
		c.add(server, 0.5, 0.5, of(n, minority, "emptied by FLUSHALL"), ordered(minority, "flushall", "")).thins = true
		c.add(server, 0.6, 2, of(n, minority, "evicting keys"), ordered(minority, evictKeys, enoughMemory)).thins = true
	}
}

// commands adds the faults that the harness causes by commands to k of n servers.
func (c *catalog) commands(n, k int) {
	c.add(server, 0.5, 0.5, of(n, k, "CLIENT KILL of normal connections"), ordered(k, "client kill type normal", ""))
	c.add(server, 0.5, 0.5, of(n, k, "CLIENT KILL of subscribers"), ordered(k, "client kill type pubsub", ""))
	c.add(server, 0.5, 0.5, of(n, k, "SCRIPT FLUSH"), ordered(k, "script flush", ""))
	c.add(server, 0.6, 2, of(n, k, "CLIENT PAUSE of writes"), paused(k, "write"))
}

// set adds the faults of servers that form one Redis.
func (c *catalog) set(s *store, losing bool) {
	switch {
	case losing && s.sentinel != nil:
		c.add(server, 0.5, 1, "Sentinel fails over", failedOver(false))
		c.add(server, 0.5, 1, "the master is killed and Sentinel fails over", failedOver(true))
		return
	case losing:
		c.add(server, 0.5, 1, "the key's master is killed and its replica takes over", takenOver(true))
		return
	}
	c.processes()
	c.commands(len(s.servers), len(s.servers))
	if s.cluster != nil {
		c.add(server, 0.5, 1, "the key's master hands over to its replica", takenOver(false))
		c.add(server, 0.5, 2, "the key's slot moves to another master", resharded)
	}
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
