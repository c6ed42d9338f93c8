package main

import (
	"time"

	"github.com/hasplock/hasp/internal/crew"
	"github.com/hasplock/hasp/internal/faultproxy"
)

// mortal searches for a victim that may be killed.
func (n *nemesis) mortal(find victim) (turn, bool) {
	n.busy[spared] = true
	t, ok := find(n)
	if !ok {
		delete(n.busy, spared)
	}
	return t, ok
}

// killed kills a process. A new process takes its seat.
func killed(find victim) func(*nemesis) (injection, bool) {
	return func(n *nemesis) (injection, bool) {
		t, ok := n.mortal(find)
		if !ok {
			return injection{}, false
		}
		s := n.seats[t.proc.seat]
		s.proc.kill()
		return injection{from: true, key: t.key, seat: -1, heal: func() error { return n.fill(s) }}, true
	}
}

// stopped stops a process by SIGSTOP.
func stopped(find victim) func(*nemesis) (injection, bool) {
	return func(n *nemesis) (injection, bool) {
		t, ok := find(n)
		if !ok {
			return injection{}, false
		}
		p := t.proc.Process.Process
		if crew.Pause(p) != nil {
			return injection{}, false
		}
		return injection{from: true, key: t.key, seat: -1, heal: func() error { return crew.Resume(p) }}, true
	}
}

// jumped sets the wall clock of a process by a minute, and then back.
func jumped(find victim) func(*nemesis) (injection, bool) {
	return func(n *nemesis) (injection, bool) {
		d := time.Minute
		if n.rand.IntN(2) == 0 {
			d = -d
		}
		t, ok := find(n)
		if !ok {
			return injection{}, false
		}
		ahead := offset(t.proc.seat)
		t.proc.send(order{Op: "clock", Ahead: ahead + d})
		return injection{from: true, key: -1, seat: t.proc.seat, heal: func() error {
			t.proc.send(order{Op: "clock", Ahead: ahead})
			return nil
		}}, true
	}
}

// offset returns by how much the wall clock of a seat's process is ahead, if
// wall clocks can jump: a minute, nothing, or minus a minute.
func offset(seat int) time.Duration { return time.Duration(1-seat%3) * time.Minute }

// some draws k servers.
func (n *nemesis) some(k int) []int { return n.rand.Perm(len(n.store.servers))[:k] }

// linked disturbs the links of a client to all servers, or to a minority of them.
func linked(find victim, fail, heal func(*faultproxy.Proxy)) func(*nemesis) (injection, bool) {
	return func(n *nemesis) (injection, bool) {
		k := len(n.store.links[0])
		servers := n.rand.Perm(k)
		if k > 1 && n.rand.IntN(2) == 0 {
			servers = servers[:(k-1)/2]
		}
		t, ok := find(n)
		if !ok {
			return injection{}, false
		}
		all := n.store.links[t.proc.seat]
		for _, i := range servers {
			fail(all[i])
		}
		return injection{key: -1, seat: t.proc.seat, heal: func() error {
			if heal != nil {
				for _, i := range servers {
					heal(all[i])
				}
			}
			return nil
		}}, true
	}
}

// spoiled makes the next command of an operation fail, on one server, for any
// client.
func spoiled(op string, f faultproxy.Fault) func(*nemesis) (injection, bool) {
	return func(n *nemesis) (injection, bool) {
		at := n.rand.IntN(len(n.store.links[0]))
		texts := n.store.texts[op]
		for began := time.Now(); time.Since(began) < search; {
			seat, happened := n.trap(texts, at, f)
			if !happened {
				continue
			}

			n.busy[seat] = true
			n.mark()
			p := n.store.links[seat][at]
			return injection{key: -1, seat: seat, heal: func() error {
				switch f {
				case faultproxy.HoldRequest:
					p.Release()
				case faultproxy.HangReply:
					p.Cut()
				}
				return nil
			}}, true
		}
		return injection{}, false
	}
}

// trap waits up to 200 ms for a command to fail on the link of any client to a
// server, and returns the client's seat.
func (n *nemesis) trap(texts []string, at int, f faultproxy.Fault) (seat int, happened bool) {
	defer func() {
		for _, way := range n.store.links {
			way[at].Forgive()
		}
	}()
	for i, way := range n.store.links {
		if !n.busy[i] {
			for _, text := range texts {
				way[at].Fail(text, f)
			}
		}
	}
	for range 200 {
		for i, way := range n.store.links {
			if !n.busy[i] && way[at].Pending() < len(texts) {
				return i, true
			}
		}
		time.Sleep(time.Millisecond)
	}
	return 0, false
}
