package rig

import (
	"golang.org/x/net/dns/dnsmessage"

	"github.com/hasplock/hasp/internal/torture/hosts"
)

// dns adds the faults of a master and its replica behind a name, and those of the name.
func (c *catalog) dns() {
	const half = "half of the clients still get the old address"
	c.add(server, 0.5, 1, "the master hands over to its replica, and the name follows", moved)
	c.add(server, 0.5, 1, "the master is killed, and the name leads to its replica", replaced)
	c.add(server, 0.5, 1, "the master's host loses power, and the name leads to its replica", masterUnplugged)
	c.add(server, 1, 3, "the master hands over to its replica, and the name follows late", cached(moved, seats))
	c.add(server, 1, 3, "the master hands over to its replica, and "+half, cached(moved, seats/2))
	c.add(server, 1, 3, "the master is killed, and "+half, cached(replaced, seats/2))
	c.add(server, 1, 3, "the master's host loses power, and "+half, cached(masterUnplugged, seats/2))
	c.add(server, 1, 3, "the master is cut off from its replica, which takes over, and "+half, cached(deposed, seats/2))

	// Without a new connection, no client asks for the name.
	c.add(link, 0.6, 3, "every connection ends, and the name does not exist", nameless(dnsmessage.RCodeNameError))
	c.add(link, 0.6, 3, "every connection ends, and the name server answers SERVFAIL", nameless(dnsmessage.RCodeServerFailure))
	c.add(link, 0.6, 3, "every connection ends, and the name server answers late", namedLate)
	c.add(link, 0.6, 3, "every connection ends, and the name server is cut off", namesCutOff)
}

// cached makes some clients get the old address until the end of a fault that moves the name.
func cached(move inject, clients int) inject {
	return func(n *nemesis) *injection {
		s := n.store
		drop := s.service.dns.keep(n.shuffled(s.apart.clients)[:clients])
		in := move(n)
		in.heal = after(in.heal, drop)
		return in
	}
}

// after returns a function that calls both functions.
func after(first, then func()) func() {
	return func() {
		first()
		then()
	}
}

// deposed makes the replica the master although the old master runs and does not notice. Until
// the fault ends, no replica confirms the old master's holds.
func deposed(n *nemesis) *injection {
	s, old, next := n.store, n.store.master(), n.store.replica()
	lift := s.apart.Impose(cutOff, hosts.Between(s.apart.servers[old:][:1], s.apart.servers[next:][:1])...)
	n.command(next, "replicaof no one")
	s.lead(next)
	return ofAll(func() {
		lift()
		s.follow(old, next)
	})
}

// nameless ends all connections, and makes the clients get no address for new ones.
func nameless(code dnsmessage.RCode) inject {
	return func(n *nemesis) *injection {
		lift := n.store.service.dns.fail(code, 0)
		n.disconnect()
		return ofAll(lift)
	}
}

// namedLate is like nameless, but the clients get the address late.
func namedLate(n *nemesis) *injection {
	lift := n.store.service.dns.fail(dnsmessage.RCodeSuccess, n.span(0.2, 2))
	n.disconnect()
	return ofAll(lift)
}

// namesCutOff is like nameless, but nothing reaches the name server.
func namesCutOff(n *nemesis) *injection {
	a := n.store.apart
	lift := a.Impose(cutOff, hosts.Between(a.dns, a.all())...)
	n.disconnect()
	return ofAll(lift)
}

// disconnect ends the connections of all clients. A server that another fault has killed has
// none.
func (n *nemesis) disconnect() {
	for i, srv := range n.store.servers {
		if srv.Runs() {
			n.command(i, killNormal+"; "+killSubscribers)
		}
	}
}
