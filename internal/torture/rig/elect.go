package rig

import (
	"slices"

	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/internal/torture/hosts"
)

// electorate are servers that can replace a master by themselves. They do so only during
// some faults, because a master on a busy machine looks dead.
type electorate interface {
	Elect(on bool)                                   // lets them replace a master, or forbids it
	Elected(old *redistest.Server, unasked []string) // waits until they have replaced it; it does not ask those at the addresses unasked
	Settled()                                        // waits until all agree, and each server is a master or a replica in step
}

// electorate returns the servers that elect a master.
func (s *store) electorate() electorate {
	if s.cluster != nil {
		return s.cluster
	}
	return s.sentinel
}

// outage says what happens to a master besides the cut.
type outage struct {
	dead  bool // its host loses power
	split bool // half of the clients, and a sentinel if there are any, stay with it
}

// elected cuts a master off and waits until the others have replaced it by themselves. A
// master that lives does not know that it was replaced.
func elected(o outage) inject {
	return func(n *nemesis) *injection {
		s, a := n.store, n.store.apart
		old := n.someMaster()
		side := a.servers[slices.Index(s.servers, old):][:1:1] // no spare capacity: append must not overwrite a.servers
		unasked := []string{old.Addr}
		if o.split {
			side = append(side, n.shuffled(a.clients)[:seats/2]...)
			if s.sentinel != nil {
				// The hosts of the sentinels follow those of the servers.
				side = append(side, a.servers[len(s.servers)])
				unasked = append(unasked, s.sentinel.Sentinels[0].Addr)
			}
		}

		rest := slices.DeleteFunc(a.all(), func(h *hosts.Host) bool { return slices.Contains(side, h) })
		s.electorate().Elect(true)
		lift := a.Impose(cutOff, hosts.Between(side, rest)...)
		if o.dead {
			a.Mute(side[0].Port)
			old.Kill()
		}
		s.electorate().Elected(old, unasked)

		return ofAll(func() {
			if o.dead {
				n.Check(old.Start(true))
			}
			// Forbid elections before the cut ends. Otherwise a busy machine could start
			// another one.
			s.electorate().Elect(false)
			lift()
			s.electorate().Settled()
		})
	}
}

// someMaster returns the master, or in a cluster the master of a random key.
func (n *nemesis) someMaster() *redistest.Server {
	if c := n.store.cluster; c != nil {
		return c.Master(n.names[n.rand.IntN(len(n.names))])
	}
	return n.store.sentinel.Master()
}
