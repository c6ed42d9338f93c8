package main

import (
	"fmt"
	"time"

	"github.com/hasplock/hasp/internal/crew"
	"github.com/hasplock/hasp/internal/hostclock"
)

// patience is the time for steps that must happen on any machine.
const patience = 3 * time.Minute

// seat is a place for a client process. When the process is killed, another
// takes its place.
type seat struct {
	n       int
	rec     *record
	url     string
	program string // the binary; if empty, this one
	gen     int    // how many processes the seat has had
	proc    *proc
}

// proc is a client process.
type proc struct {
	*crew.Process
	seat, gen int
	rec       *record
	fresh     bool          // it has not reported that it is at work
	done      chan struct{} // closed when it has ended and its reports are recorded
	reports   chan report   // those that are not about a turn
}

// fill starts a process.
func (s *seat) fill(o order) error {
	child, err := crew.Start(s.program, "client")
	if err != nil {
		return err
	}
	p := &proc{Process: child, seat: s.n, gen: s.gen, rec: s.rec, fresh: true, done: make(chan struct{}), reports: make(chan report, 8)}
	s.proc = p
	s.gen++
	go p.record()
	o.Op, o.URL, o.Owner = "start", s.url, p.String()
	o.Seed += uint64(s.n)<<32 + uint64(p.gen)
	p.send(o)
	return nil
}

// record records reports until the process has ended, and answers those about
// the resource.
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
			if refused := p.rec.take(p, r); r.What == touch {
				p.send(order{Op: "touched", ID: r.ID, Refused: refused})
			}
		}
	}
}

func (p *proc) String() string { return fmt.Sprintf("client %d.%d", p.seat, p.gen) }

func (p *proc) send(o order) { _ = p.Send(o) } // fails if the process was killed

// await waits for a report of a kind.
func (p *proc) await(what string) (report, error) {
	select {
	case r := <-p.reports:
		if r.What == broke {
			return r, fmt.Errorf("%s: %s", p, r.Err)
		}
		if r.What != what {
			return r, fmt.Errorf("%s: %s before %s", p, r.What, what)
		}
		return r, nil
	case <-p.done:
		return report{}, fmt.Errorf("%s ended", p)
	case <-time.After(patience):
		return report{}, fmt.Errorf("%s is not %s after %v", p, what, patience)
	}
}

// kill ends the process as SIGKILL does, and returns when all its reports are
// recorded.
func (p *proc) kill() {
	at := hostclock.Now()
	_ = p.Kill()
	<-p.done
	p.rec.died(p, at)
}
