package main

import (
	"fmt"
	"time"

	"github.com/hasplock/hasp/internal/clock"
	"github.com/hasplock/hasp/internal/crew"
)

// patience is how long torture waits for steps that must happen on any machine, however slow.
const patience = 3 * time.Minute

// seat is a place for a client process. When this process is killed, a new one takes the place.
type seat struct {
	*run
	n    int
	gen  int // how many processes the seat has had
	proc *proc
}

type proc struct {
	*crew.Process
	seat, gen int
	rec       *record
	fresh     bool          // the process has not reported that it is at work
	done      chan struct{} // closed when the process has ended and its reports are recorded
	reports   chan report   // reports that are not about a turn
}

func (s *seat) fill() {
	child, err := crew.Start("client")
	s.Check(err)
	p := &proc{Process: child, seat: s.n, gen: s.gen, rec: s.rec, fresh: true, done: make(chan struct{}), reports: make(chan report, 8)}
	s.proc = p
	s.gen++
	go p.record()

	o := order{Op: "start", URL: s.store.urls[s.n], Owner: p.String(), Seed: s.seed + uint64(s.n)<<32 + uint64(p.gen),
		Keys: s.names, Bare: 0.3, Term: s.term, Plant: s.plant, Passed: s.n%2 == 1, Steady: s.n == spared}
	if s.losing {
		o.Bare = 0 // when the store loses locks, only the fence protects the resource
	}
	p.send(o)
}

// record records reports until the process has ended. It answers each use of the resource.
func (p *proc) record() {
	defer close(p.done)
	defer p.Wait()
	for {
		var r report
		if p.Receive(&r) != nil {
			return
		}
		switch r.What {
		case began, idle, closed, broke:
			p.reports <- r
		default:
			p.rec.take(p, r)
			if r.What == touch {
				p.send(order{Op: "touched"})
			}
		}
	}
}

func (p *proc) String() string { return fmt.Sprintf("client %d.%d", p.seat, p.gen) }

func (p *proc) send(o order) { _ = p.Send(o) } // fails if the process was killed

// await waits for a report of a kind.
func (s *seat) await(what string) (r report) {
	p := s.proc
	select {
	case r = <-p.reports:
		if r.What == broke {
			s.Fatalf("%s: %s", p, r.Err)
		}
		if r.What != what {
			s.Fatalf("%s: %s before %s", p, r.What, what)
		}
	case <-p.done:
		s.Fatalf("%s ended", p)
	case <-time.After(patience):
		s.Fatalf("%s is not %s after %v", p, what, patience)
	}
	return r
}

// kill ends the process as SIGKILL does, and returns when all its reports are recorded.
func (p *proc) kill() {
	at := clock.Now()
	_ = p.Kill()
	<-p.done
	p.rec.died(p, at)
}
