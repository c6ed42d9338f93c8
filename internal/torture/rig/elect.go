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
	Elected(old *redistest.Server, without []string) // waits until those that are not at some addresses have replaced it
	Settled()                                        // waits until all agree, and each server is a master or a replica in step
}

// electorate returns the servers that elect a master.
func (s *store) electorate() electorate {
	if s.cluster != nil {
		return s.cluster
	}
	return s.sentinel
}

// elected cuts a master off until the others have replaced it by themselves. If dead, its
// host has lost power. If split, half of the clients are left with it, and a sentinel if
// there are any. While the fault lasts, the old master does not know that it is replaced.
func elected(dead, split bool) inject {
	return func(n *nemesis) *injection {
		s, a := n.store, n.store.apart
		old := n.someMaster()
		side := a.servers[slices.Index(s.servers, old):][:1:1]
		without := []string{old.Addr}
		if split {
			side = append(side, n.shuffled(a.clients)[:seats/2]...)
			if s.sentinel != nil {
				// The hosts of the sentinels follow those of the servers.
				side = append(side, a.servers[len(s.servers)])
				without = append(without, s.sentinel.Sentinels[0].Addr)
			}
		}

		rest := slices.DeleteFunc(a.all(), func(h *hosts.Host) bool { return slices.Contains(side, h) })
		s.electorate().Elect(true)
		lift := a.Impose(cutOff, hosts.Between(side, rest)...)
		if dead {
			a.Mute(side[0].Port)
			old.Kill()
		}
		s.electorate().Elected(old, without)

		return ofAll(func() {
			if dead {
				n.Check(old.Start(true))
			}
			// In this order: without the cut, a busy machine must not make them elect.
			s.electorate().Elect(false)
			lift()
			s.electorate().Settled()
		})
	}
}

// someMaster returns the master, or that of a key of a cluster.
func (n *nemesis) someMaster() *redistest.Server {
	if c := n.store.cluster; c != nil {
		return c.Master(n.names[n.rand.IntN(len(n.names))])
	}
	return n.store.sentinel.Master()
}
