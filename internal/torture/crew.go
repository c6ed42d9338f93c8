package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"time"

	"github.com/hasplock/hasp/internal/hostclock"
)

// patience is for what must happen at last, however slow the machine.
const patience = 3 * time.Minute

// seat is a place for a client process. When one is killed another takes it.
type seat struct {
	n       int
	rec     *record
	url     string
	program string // or empty, for this one
	gen     int
	proc    *proc
}

// proc is a client process.
type proc struct {
	seat, gen int
	cmd       *exec.Cmd
	rec       *record
	fresh     bool          // it has not said that it is at work
	done      chan struct{} // closed when it has ended and all is recorded

	mu    sync.Mutex // guards tell
	tell  *json.Encoder
	heard chan report // what is not about a turn
}

// fill starts a process.
func (s *seat) fill(o order) error {
	program := s.program
	if program == "" {
		self, err := os.Executable()
		if err != nil {
			return err
		}
		program = self
	}
	p := &proc{seat: s.n, gen: s.gen, rec: s.rec, cmd: exec.Command(program), fresh: true, done: make(chan struct{}), heard: make(chan report, 8)}
	p.cmd.Env = append(os.Environ(), role+"=1")
	p.cmd.Stderr = os.Stderr
	in, err1 := p.cmd.StdinPipe()
	out, err2 := p.cmd.StdoutPipe()
	if err := errors.Join(err1, err2); err != nil {
		return err
	}
	if err := p.cmd.Start(); err != nil {
		return err
	}
	p.tell = json.NewEncoder(in)
	s.proc = p
	s.gen++
	go func() {
		defer close(p.done)
		reports := json.NewDecoder(out)
		for {
			var r report
			if reports.Decode(&r) != nil {
				_ = p.cmd.Wait()
				return
			}
			switch r.What {
			case began, idle, closed, broke:
				p.heard <- r
			default:
				if refused := s.rec.take(p, r); r.What == touch {
					p.send(order{Op: "touched", ID: r.ID, Refused: refused})
				}
			}
		}
	}()
	o.Op, o.URL, o.Owner = "start", s.url, p.String()
	o.Seed += uint64(s.n)<<32 + uint64(p.gen)
	p.send(o)
	return nil
}

func (p *proc) String() string { return fmt.Sprintf("client %d.%d", p.seat, p.gen) }

func (p *proc) send(o order) {
	p.mu.Lock()
	defer p.mu.Unlock()
	_ = p.tell.Encode(o) // a process that was killed does not read it
}

// hear waits for a report of a kind.
func (p *proc) hear(what string) (report, error) {
	select {
	case r := <-p.heard:
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

// kill ends the process as SIGKILL does, and returns when all it told is
// recorded.
func (p *proc) kill() {
	at := hostclock.Now()
	_ = p.cmd.Process.Kill()
	<-p.done
	p.rec.died(p, at)
}
