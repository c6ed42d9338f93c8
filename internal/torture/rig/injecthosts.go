package rig

import (
	"slices"
	"time"

	"github.com/hasplock/hasp/internal/torture/hosts"
)

// These are the faults of links between hosts. Flap and Jitter are for a term of
// hostTerms*term; scaled adapts them to other terms.
var (
	cutOff    = hosts.Fault{Cut: true}
	flapping  = hosts.Fault{Flap: hostTerms * term / 4}
	lossy     = hosts.Fault{Loss: 0.2}
	distant   = hosts.Fault{Delay: 100 * time.Millisecond}
	scrambled = hosts.Fault{Jitter: hostTerms * term / 20, Twice: 0.2}
	narrow    = hosts.Fault{Rate: 10_000}
)

// clientHosts adds the faults of the links of one client's host.
func (c *catalog) clientHosts(s *store) {
	for _, v := range []struct {
		name string
		who  victims
	}{{"holder's", holders}, {"waiter's", waiters}} {
		add := func(what string, inject inject) { c.add(link, 0.6, 3, v.name+" "+what, inject) }
		add("host cut off", disturbed(v.who, cutOff, bothWays))
		add("host cut off one way, to the servers", disturbed(v.who, cutOff, toServers))
		add("host cut off one way, from the servers", disturbed(v.who, cutOff, fromServers))
		if s.size() >= leastNodes {
			add("host cut off from a minority of the servers", disturbed(v.who, cutOff, bothWaysOfFew))
		}
		add("link flaps", disturbed(v.who, flapping, bothWays))
		add("link loses a fifth of the packets", disturbed(v.who, lossy, bothWays))
		add("link takes 200 ms there and back", disturbed(v.who, distant, bothWays))
		add("link reorders and repeats packets", disturbed(v.who, scrambled, bothWays))
		add("link carries 10 kB/s", disturbed(v.who, narrow, bothWays))
		c.add(process, 0.6, 2, v.name+" host loses power, and boots", unpluggedClient(v.who))
	}
}

// network adds the faults of many links at once.
func (c *catalog) network(s *store) {
	for _, v := range []struct {
		name  string
		fault hosts.Fault
	}{{"flaps", flapping}, {"loses a fifth of the packets", lossy}, {"takes 200 ms there and back", distant},
		{"reorders and repeats packets", scrambled}, {"carries 10 kB/s", narrow}} {
		c.add(link, 1, 3, "every link "+v.name, everywhere(v.fault))
	}
	c.add(link, 0.5, 0.5, "the network forgets idle connections", forgotten(0.25))
	c.add(link, 0.5, 0.5, "the network forgets all connections", forgotten(0))
	c.add(server, 0.6, 3, "half of the clients cut off", split(0))

	n := s.size()
	minority, majority := halves(n)
	switch {
	case s.service != nil:
		c.add(server, 0.6, 3, "the master and its replica cut off from each other", replicaCutOff(hosts.Between))
		c.add(server, 0.6, 3, "the replica cut off one way, from the master", replicaCutOff(hosts.From))
		return
	case s.sentinel != nil, s.cluster != nil:
		c.add(server, 0.6, 3, "a minority of the servers unreachable", unreachable(minority))
		c.add(server, 0.6, 3, "every server unreachable", unreachable(n))
		return
	case minority > 0:
		c.add(server, 0.6, 3, "two halves with a bridge, which is one server", bridged)
		c.add(server, 0.6, 3, "half of the clients left with a minority of the servers", split(minority))
		c.add(server, 0.6, 3, "every server unreachable", unreachable(n))
		c.add(server, 0.6, 2, of(n, minority, "lost power, and booted with data"), unplugged(minority, true))
		// An etcd member that has lost its data cannot rejoin, so only Redis boots without data.
		if s.other == nil {
			c.add(server, 0.6, 2, of(n, minority, "lost power, and booted without data"), unplugged(minority, false)).thins = true
		}
	}
	c.add(server, 0.6, 2, of(n, majority, "lost power, and booted with data"), unplugged(majority, true))
	if s.other != nil {
		c.hostsOfOthers(s)
	}
}

// hostsOfOthers adds the faults of the links of servers that this package does not know, and
// of the links between them.
func (c *catalog) hostsOfOthers(s *store) {
	n := s.size()
	minority, majority := halves(n)
	for _, k := range []int{minority, majority} {
		if k > 0 {
			c.add(server, 0.6, 3, of(n, k, "unreachable"), unreachable(k))
			c.add(server, 0.6, 2, of(n, k, "slow to answer"), slow(k))
		}
	}
	if minority == 0 {
		return
	}

	c.add(server, 0.6, 3, "a minority: cut off from everybody", isolated(minority))
	c.add(server, 0.6, 3, "a minority: cut off from the other servers, not from the clients", membersCutOff(random(minority), hosts.Between))
	c.add(server, 0.6, 3, "no two servers reach each other", scattered)

	if s.other.Leader != nil {
		c.add(server, 0.6, 3, "the leader cut off from the other servers, not from the clients", membersCutOff(leading, hosts.Between))
		c.add(server, 0.6, 3, "the leader cut off one way, to the other servers", membersCutOff(leading, hosts.From))
		c.add(server, 0.6, 3, "the leader cut off one way, from the other servers", membersCutOff(leading, against))
	}
}

// direction returns the pairs of a client's host and those of servers.
type direction func(n *nemesis, client []*hosts.Host) []hosts.Pair

func bothWays(n *nemesis, client []*hosts.Host) []hosts.Pair {
	return hosts.Between(client, n.store.apart.remote())
}

func toServers(n *nemesis, client []*hosts.Host) []hosts.Pair {
	return hosts.From(client, n.store.apart.remote())
}

func fromServers(n *nemesis, client []*hosts.Host) []hosts.Pair {
	return hosts.From(n.store.apart.remote(), client)
}

func bothWaysOfFew(n *nemesis, client []*hosts.Host) []hosts.Pair {
	all := n.shuffled(n.store.apart.servers)
	return hosts.Between(client, all[:(len(all)-1)/2])
}

// shuffled returns the hosts in another order.
func (n *nemesis) shuffled(all []*hosts.Host) []*hosts.Host {
	all = slices.Clone(all)
	n.rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	return all
}

// host returns the host of a turn's process.
func (n *nemesis) host(t *turn) []*hosts.Host { return n.store.apart.clients[t.proc.seat:][:1] }

// scaled returns f with its times adapted to the term of this run.
func (n *nemesis) scaled(f hosts.Fault) hosts.Fault {
	scale := func(d time.Duration) time.Duration {
		return time.Duration(float64(d) * float64(n.term) / (hostTerms * float64(term)))
	}
	f.Flap, f.Jitter = scale(f.Flap), scale(f.Jitter)
	return f
}

// disturbed disturbs the links of a client's host.
func disturbed(who victims, f hosts.Fault, which direction) inject {
	return onVictim(who, func(n *nemesis, t *turn) *injection {
		return ofSeat(t.proc.seat, n.store.apart.Impose(n.scaled(f), which(n, n.host(t))...))
	})
}

// unpluggedClient ends a process without a packet of the host to anybody. A new process
// takes its seat when the host has booted.
func unpluggedClient(who victims) inject {
	return onVictim(mortal(who), func(n *nemesis, t *turn) *injection {
		boot := n.store.apart.Impose(cutOff, hosts.Between(n.host(t), n.store.apart.all())...)
		t.proc.kill()
		return &injection{from: true, key: t.key, seat: -1, heal: func() {
			boot()
			n.seats[t.proc.seat].fill()
		}}
	})
}

// unplugged kills k servers without a packet of their hosts to anybody, and starts them
// again with or without their data.
func unplugged(k int, data bool) inject {
	return func(n *nemesis) *injection {
		a, servers := n.store.apart, n.rand.Perm(n.store.size())[:k]
		var boots []func()
		for _, i := range servers {
			boots = append(boots, a.Impose(cutOff, hosts.Between(a.servers[i:][:1], a.all())...))
		}
		for _, i := range servers {
			n.store.kill(i)
		}
		return ofAll(func() {
			for j, i := range servers {
				n.Check(n.store.restart(i, data))
				boots[j]()
			}
		})
	}
}

// everywhere disturbs every link.
func everywhere(f hosts.Fault) inject {
	return func(n *nemesis) *injection {
		all := n.store.apart.all()
		return ofAll(n.store.apart.Impose(n.scaled(f), hosts.From(all, all)...))
	}
}

// forgotten makes the network forget connections that were idle for a share of a term, as a
// firewall does.
func forgotten(idle float64) inject {
	return func(n *nemesis) *injection {
		// Without its connections, this process would wait a minute for the next command.
		n.store.apart.Forget(n.span(idle, idle), n.store.apart.Own().Addr)
		return ofAll(nil)
	}
}

// split cuts the network in two. Half of the clients reach only some of the servers, and the other
// half reaches only the rest.
func split(some int) inject {
	return func(n *nemesis) *injection {
		a := n.store.apart
		servers, clients := n.shuffled(a.servers), n.shuffled(a.clients)
		half := len(clients) / 2
		pairs := append(hosts.Between(clients[half:], servers[:some]), hosts.Between(clients[:half], append(servers[some:], a.dns...))...)
		pairs = append(pairs, hosts.Between(servers[:some], servers[some:])...)
		return ofAll(a.Impose(cutOff, pairs...))
	}
}

// bridged makes two halves, each with half of the clients, and with half of the servers
// but one. The one, the bridge, reaches everybody. The halves do not reach each other.
func bridged(n *nemesis) *injection {
	a := n.store.apart
	servers, clients := n.shuffled(a.servers)[1:], n.shuffled(a.clients)
	left := append(clients[:len(clients)/2:len(clients)/2], servers[:len(servers)/2]...)
	right := append(clients[len(clients)/2:], servers[len(servers)/2:]...)
	return ofAll(a.Impose(cutOff, hosts.Between(left, right)...))
}

// chosen returns the servers that a fault disturbs and the other servers, or nil if there is no
// victim.
type chosen func(n *nemesis) (some, others []*hosts.Host)

// random chooses k servers.
func random(k int) chosen {
	return func(n *nemesis) (some, others []*hosts.Host) {
		all := n.shuffled(n.store.apart.servers)
		return all[:k], all[k:]
	}
}

// leading chooses the leader.
func leading(n *nemesis) (some, others []*hosts.Host) {
	all, i := n.store.apart.servers, n.store.other.Leader()
	if i < 0 {
		return nil, nil
	}
	return all[i : i+1], slices.Delete(slices.Clone(all), i, i+1)
}

// against returns the pairs from others to some, so that only that direction is cut.
func against(some, others []*hosts.Host) []hosts.Pair { return hosts.From(others, some) }

// membersCutOff cuts links between servers. The clients reach all servers.
func membersCutOff(choose chosen, which func(some, others []*hosts.Host) []hosts.Pair) inject {
	return func(n *nemesis) *injection {
		some, others := choose(n)
		if some == nil {
			return nil
		}
		return ofAll(n.store.apart.Impose(cutOff, which(some, others)...))
	}
}

// isolated cuts k servers off from the other servers and from all clients.
func isolated(k int) inject {
	return func(n *nemesis) *injection {
		a := n.store.apart
		return ofAll(a.Impose(cutOff, hosts.Between(n.shuffled(a.servers)[:k], a.all())...))
	}
}

// scattered cuts all links between servers.
func scattered(n *nemesis) *injection {
	a := n.store.apart
	return ofAll(a.Impose(cutOff, hosts.From(a.servers, a.servers)...))
}

// replicaCutOff cuts the links between the master and its replica.
func replicaCutOff(which func(from, to []*hosts.Host) []hosts.Pair) inject {
	return func(n *nemesis) *injection {
		a, master := n.store.apart, int(n.store.service.master.Load())
		return ofAll(a.Impose(cutOff, which(a.servers[master:][:1], a.servers[1-master:][:1])...))
	}
}

// wires returns the pairs of the hosts of some servers and all clients.
func (n *nemesis) wires(servers ...int) (all []hosts.Pair) {
	for _, i := range servers {
		all = append(all, hosts.Between(n.store.apart.servers[i:][:1], n.store.apart.clients)...)
	}
	return all
}
