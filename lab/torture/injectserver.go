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

// slow delays replies by more than half a term.
func slow(k int) inject {
	return func(n *nemesis) *injection {
		d := n.span(0.5, 0.7)
		return onServers(k,
			links(func(p *faultproxy.Proxy) { p.Delay(d) }),
			links(func(p *faultproxy.Proxy) { p.Delay(0) }))(n)
	}
}

// command sends commands to a server, without a proxy. A semicolon separates them.
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

// ordered sends the commands in fail to k servers, and later those in heal, if there are any.
func ordered(k int, fail, heal string) inject {
	return onServers(k,
		func(n *nemesis, i int) { n.command(i, fail) },
		func(n *nemesis, i int) {
			if heal != "" {
				n.command(i, heal)
			}
		})
}

// paused makes servers pause clients. If a server pauses all clients, the pause ends only when its
// time has passed, because until then the server reads no command.
func paused(k int, clients string) inject {
	return func(n *nemesis) *injection {
		return ordered(k, fmt.Sprint("client pause ", n.lasts.Milliseconds(), " ", clients), "client unpause")(n)
	}
}

// succeeded calls failover, which makes a replica the successor of the server old. If dead is true,
// succeeded first kills that server. The function heal waits until that server is a replica.
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

// takenOver makes the replica of a key's master the new master.
func takenOver(dead bool) inject {
	return func(n *nemesis) *injection {
		c, key := n.store.cluster, n.rand.IntN(len(n.names))
		name := n.names[key]
		heal := succeeded(c.Master(name), dead, func() { c.Failover(name) })
		return &injection{key: key, seat: -1, heal: heal}
	}
}

// resharded moves the slot of a key. While the fault lasts, the move is incomplete.
func resharded(n *nemesis) *injection {
	key := n.rand.IntN(len(n.names))
	return &injection{key: key, seat: -1, heal: n.store.cluster.Move(n.names[key])}
}
