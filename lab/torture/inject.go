package main

import (
	"slices"
	"time"

	"github.com/hasplock/hasp/internal/crew"
	"github.com/hasplock/hasp/internal/faultproxy"
)

// onAll returns a fault of the store, after which each key must be granted. If heal is nil, the store
// heals by itself.
func onAll(fail, heal func() error) inject {
	return func(n *nemesis) *injection {
		n.Check(fail())
		return ofAll(func() {
			if heal != nil {
				n.Check(heal())
			}
		})
	}
}

// onVictim returns a fault of one client. The function do disturbs the client.
func onVictim(who victims, do func(n *nemesis, t *lockCall) *injection) inject {
	return func(n *nemesis) *injection {
		t := n.find(who)
		if t == nil {
			return nil
		}
		return do(n, t)
	}
}

// killed returns a fault that kills the process of a victim. A new process takes its seat.
func killed(who victims) inject {
	return onVictim(mortal(who), func(n *nemesis, t *lockCall) *injection {
		t.proc.kill()
		in := ofKey(t.key, n.seats[t.proc.seat].fill)
		in.from = true
		return in
	})
}

// stopped returns a fault that stops the process of a victim by SIGSTOP.
func stopped(who victims) inject {
	return onVictim(who, func(n *nemesis, t *lockCall) *injection {
		p := t.proc.Process.Process
		if crew.Pause(p) != nil {
			return nil
		}
		in := ofKey(t.key, func() { n.Check(crew.Resume(p)) })
		in.from = true
		return in
	})
}

// linked returns a fault of a client's links to all servers, or to a minority of the servers.
func linked(who victims, fail, heal func(*faultproxy.Proxy)) inject {
	return onVictim(who, func(n *nemesis, t *lockCall) *injection {
		links := n.store.links[t.proc.seat]
		servers := n.rand.Perm(len(links))
		if len(links) > 1 && n.rand.IntN(2) == 0 {
			servers = servers[:(len(links)-1)/2]
		}
		each := func(do func(*faultproxy.Proxy)) {
			for _, i := range servers {
				do(links[i])
			}
		}

		each(fail)
		in := ofSeat(t.proc.seat, nil)
		if heal != nil {
			in.heal = func() { each(heal) }
		}
		return in
	})
}

// spoiled returns a fault that spoils the next request of any client to one server.
func spoiled(f faultproxy.Fault) inject {
	return func(n *nemesis) (in *injection) {
		at := n.rand.IntN(len(n.store.links[0]))
		repeatUntil(search, 0, func() bool { in = n.trap(at, f); return in != nil })
		return in
	}
}

// trap waits up to 200 ms until a request fails on the link of any client to the server whose index
// is the argument at. It returns nil if no request fails.
func (n *nemesis) trap(at int, f faultproxy.Fault) *injection {
	var free []int // seats that no fault affects
	for seat, links := range n.store.links {
		if !n.busy[seat] {
			free = append(free, seat)
			defer links[at].Forgive()
			links[at].Fail("", f)
		}
	}

	hit := -1
	repeatUntil(200*time.Millisecond, time.Millisecond, func() bool {
		hit = slices.IndexFunc(free, func(seat int) bool { return n.store.links[seat][at].Pending() == 0 })
		return hit >= 0
	})
	if hit < 0 {
		return nil
	}

	seat := free[hit]
	n.busy[seat] = true
	n.mark()
	return ofSeat(seat, func() {
		switch p := n.store.links[seat][at]; f {
		case faultproxy.HoldRequest:
			p.Release()
		case faultproxy.HangReply:
			p.Cut()
		}
	})
}
