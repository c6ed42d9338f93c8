package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redistest"
)

// onServers returns a fault of k servers. The functions fail and heal disturb and repair a server.
func onServers(k int, fail, heal func(n *nemesis, i int)) inject {
	return func(n *nemesis) *injection {
		servers := n.rand.Perm(len(n.store.addrs))[:k]
		for _, i := range servers {
			fail(n, i)
		}
		return ofAll(func() {
			for _, i := range servers {
				heal(n, i)
			}
		})
	}
}

func restarted(k int, data bool) inject {
	return onServers(k,
		func(n *nemesis, i int) { n.store.servers[i].Kill() },
		func(n *nemesis, i int) { n.Check(n.store.servers[i].Start(data)) })
}

func frozen(k int) inject {
	return onServers(k,
		func(n *nemesis, i int) { n.store.servers[i].Pause() },
		func(n *nemesis, i int) { n.store.servers[i].Resume() })
}

// links returns a function that calls the function do with each client's link to a server.
func links(do func(*faultproxy.Proxy)) func(n *nemesis, i int) {
	return func(n *nemesis, i int) {
		for _, all := range n.store.links {
			do(all[i])
		}
	}
}

func unreachable(k int) inject {
	return onServers(k, links((*faultproxy.Proxy).Down), links((*faultproxy.Proxy).Up))
}

// slow returns a fault that delays replies by more than half a term.
func slow(k int) inject {
	return func(n *nemesis) *injection {
		d := n.span(0.5, 0.7)
		return onServers(k,
			links(func(p *faultproxy.Proxy) { p.Delay(d) }),
			links(func(p *faultproxy.Proxy) { p.Delay(0) }))(n)
	}
}

// command sends the given commands to a server without a proxy. Semicolons separate the commands.
func (n *nemesis) command(i int, commands string) {
	for command := range strings.SplitSeq(commands, ";") {
		var args []any
		for word := range strings.FieldsSeq(command) {
			args = append(args, word)
		}
		if err := n.store.admin[i].Do(context.Background(), args...).Err(); err != nil {
			n.Check(fmt.Errorf("%s: %w", command, err))
		}
	}
}

// ordered returns a fault that sends the commands in fail to k servers, and later those in heal.
func ordered(k int, fail, heal string) inject {
	return onServers(k,
		func(n *nemesis, i int) { n.command(i, fail) },
		func(n *nemesis, i int) {
			if heal != "" {
				n.command(i, heal)
			}
		})
}

// paused returns a fault in which servers pause clients. If a server pauses all clients, it reads
// no command during the pause. So the pause ends only when its time has passed.
func paused(k int, clients string) inject {
	return func(n *nemesis) *injection {
		return ordered(k, fmt.Sprint("client pause ", n.lasts.Milliseconds(), " ", clients), "client unpause")(n)
	}
}

// succeeded calls failover, which promotes a replica of the server old. If dead is true, succeeded
// first kills the server old. The function heal waits until this server is a replica.
func succeeded(old *redistest.Server, dead bool, failover func()) (heal func()) {
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

func failedOver(dead bool) inject {
	return func(n *nemesis) *injection {
		s := n.store.sentinel
		return ofAll(succeeded(s.Master(), dead, s.Failover))
	}
}

// takenOver returns a fault that promotes the replica of a key's master.
func takenOver(dead bool) inject {
	return func(n *nemesis) *injection {
		c, key := n.store.cluster, n.rand.IntN(keys)
		name := n.names[key]
		return ofKey(key, succeeded(c.Master(name), dead, func() { c.Failover(name) }))
	}
}

// resharded begins to move the slot of a key. While the fault lasts, the move is incomplete.
func resharded(n *nemesis) *injection {
	key := n.rand.IntN(keys)
	return ofKey(key, n.store.cluster.Move(n.names[key]))
}
