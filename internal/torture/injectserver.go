package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/hostclock"
	"github.com/hasplock/hasp/internal/redistest"
)

// everywhere is a fault of k servers. heal is called for each of them.
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

// links calls f for the links of all clients to a server.
func links(f func(*faultproxy.Proxy)) func(n *nemesis, i int) error {
	return func(n *nemesis, i int) error {
		for _, way := range n.store.links {
			f(way[i])
		}
		return nil
	}
}

func unreachable(k int) func(*nemesis) (injection, bool) {
	return everywhere(k, links((*faultproxy.Proxy).Down), links((*faultproxy.Proxy).Up))
}

// slow delays replies by more than half a term.
func slow(k int) func(*nemesis) (injection, bool) {
	return func(n *nemesis) (injection, bool) {
		d := n.span(0.5, 0.7)
		return everywhere(k,
			links(func(p *faultproxy.Proxy) { p.Delay(d) }),
			links(func(p *faultproxy.Proxy) { p.Delay(0) }))(n)
	}
}

// command sends a command to a server, without a proxy.
func (n *nemesis) command(i int, args ...any) error {
	if err := n.store.admin[i].Do(context.Background(), args...).Err(); err != nil {
		return fmt.Errorf("%v: %w", args, err)
	}
	return nil
}

// ordered sends a command to k servers.
func ordered(k int, args ...any) func(*nemesis) (injection, bool) {
	return everywhere(k, func(n *nemesis, i int) error { return n.command(i, args...) }, nil)
}

func flushed(k int) func(*nemesis) (injection, bool) { return ordered(k, "flushall") }

// paused makes servers pause clients. A server that pauses all clients ends the
// pause by itself, because it reads no command before.
func paused(k int, clients string) func(*nemesis) (injection, bool) {
	return everywhere(k,
		func(n *nemesis, i int) error { return n.command(i, "client", "pause", n.lasts.Milliseconds(), clients) },
		func(n *nemesis, i int) error { return n.command(i, "client", "unpause") })
}

// configured sets parameters of servers, and then their defaults.
func configured(k int, pairs ...string) func(*nemesis) (injection, bool) {
	set := func(pairs ...string) func(n *nemesis, i int) error {
		return func(n *nemesis, i int) error {
			for pair := range slices.Chunk(pairs, 2) {
				if err := n.command(i, "config", "set", pair[0], pair[1]); err != nil {
					return err
				}
			}
			return nil
		}
	}
	return everywhere(k, set(pairs...), set("maxmemory", "0", "maxmemory-policy", "noeviction"))
}

// demotedFor makes servers replicas of an unreachable master: they keep their
// data and refuse writes.
func demotedFor(k int) func(*nemesis) (injection, bool) {
	return everywhere(k,
		func(n *nemesis, i int) error { return n.command(i, "replicaof", "127.0.0.1", "1") },
		func(n *nemesis, i int) error { return n.command(i, "replicaof", "no", "one") })
}

// stepped steps the clocks of servers by less than the drift, all in one
// direction, and then back.
func stepped(k int) func(*nemesis) (injection, bool) {
	return func(n *nemesis) (injection, bool) {
		d := backend.Drift(term) / 2
		if n.rand.IntN(2) == 0 {
			d = -d
		}
		return skewed(k, d)(n)
	}
}

// skewed sets the clocks of servers by a duration, and then back.
func skewed(k int, by time.Duration) func(*nemesis) (injection, bool) {
	return everywhere(k,
		func(n *nemesis, i int) error { return n.store.servers[i].Skew(by) },
		func(n *nemesis, i int) error { return n.store.servers[i].Skew(0) })
}

// booted restarts servers with their clocks an hour behind, and then corrects
// the clocks.
func booted(k int) func(*nemesis) (injection, bool) {
	return everywhere(k,
		func(n *nemesis, i int) error {
			srv := n.store.servers[i]
			return errors.Join(srv.Stop(), srv.Skew(-time.Hour), srv.Start(true))
		},
		func(n *nemesis, i int) error { return n.store.servers[i].Skew(0) })
}

// failedOver makes the sentinels fail over to a replica. If dead, it kills the
// master first.
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

// takenOver makes the replica of a key's master its successor. If dead, it kills
// the master first.
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

// demoted waits until a server that was a master has become a replica.
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

// resharded moves the slot of a key. While the fault lasts, the move is
// incomplete.
func resharded(n *nemesis) (injection, bool) {
	key := n.rand.IntN(len(n.names))
	finish := n.store.cluster.Move(n.names[key])
	return injection{key: key, seat: -1, heal: func() error { finish(); return nil }}, true
}
