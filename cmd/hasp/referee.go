package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hasplock/hasp"
)

// lastSight is how long a holder hangs before it is killed, so that a person
// sees it hold.
const lastSight = 400 * time.Millisecond

// frames is how often the view is drawn.
const frames = 40 * time.Millisecond

// referee runs the workers of a demo, kills one, and keeps the timeline. All
// of it belongs to the goroutine of referee, but for the channels.
type referee struct {
	*demo
	timeline
	view   view
	procs  []*process
	events chan event
	ends   chan end
	queues chan queue
	live   sync.WaitGroup // goroutines that read from workers and from the store
}

// process is one worker, and its lane.
type process struct {
	lane   int
	cmd    *exec.Cmd
	in     io.WriteCloser
	stderr bytes.Buffer
	failed event // what it told before it ended, if it failed
	ready  bool
}

// queue is what a look into the store told.
type queue struct {
	at     time.Time // when it began
	owners []string
}

// end is that of a worker process.
type end struct {
	lane int
	err  error
}

// referee sees the demo through. Whatever it returns, no process and no
// goroutine is left.
func (r *referee) referee(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	r.events, r.ends, r.queues = make(chan event), make(chan end), make(chan queue)
	defer func() {
		cancel()
		for _, p := range r.procs {
			_ = p.cmd.Process.Kill()
			p.in.Close()
		}
		r.live.Wait()
	}()
	for i := range r.workers {
		o := order{Worker: i + 1, Turns: r.increments}
		if i == r.victim() && !r.noLock {
			o.Stall = r.increments/3 + 1
		}
		if err := r.start(ctx, o, 0); err != nil {
			return err
		}
	}
	if r.ordered {
		client, err := r.store.Open(ctx, &hasp.Options{Owner: owner("hasp demo")})
		if err != nil {
			return err
		}
		r.live.Go(func() {
			defer client.Close()
			r.look(ctx, client)
		})
	}
	return r.watch(ctx)
}

// look passes on who waits, until ctx ends. A store that does not tell is the
// workers' to complain of.
func (r *referee) look(ctx context.Context, client *hasp.Client) {
	tick := time.NewTicker(frames)
	defer tick.Stop()
	for ctx.Err() == nil {
		began := time.Now()
		if status, err := client.Inspect(ctx, r.key); err == nil {
			select {
			case r.queues <- queue{began, status.Waiters}:
			case <-ctx.Done():
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
		}
	}
}

// line takes a queue into the timeline.
func (r *referee) line(q queue) {
	r.queue, r.looked = r.queue[:0], q.at.Sub(r.began)
	for _, o := range q.owners {
		i := slices.IndexFunc(r.procs, func(p *process) bool {
			return strings.HasSuffix(o, fmt.Sprintf("/%d/%s", p.cmd.Process.Pid, doing(p.lane+1)))
		})
		if i >= 0 {
			r.queue = append(r.queue, i)
		}
	}
}

// victim is the lane of the worker that will be killed.
func (r *referee) victim() int { return r.workers / 3 }

// start starts a worker process, in a lane of its own.
func (r *referee) start(ctx context.Context, o order, insted int) error {
	o.Store, o.NoLock, o.Key, o.TTL, o.File, o.Work = r.store, r.noLock, r.key, r.ttl, r.file, r.work
	text, err := json.Marshal(o)
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	p := &process{lane: len(r.procs), cmd: exec.Command(self, "demo-worker")}
	p.cmd.Stderr = &p.stderr
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		return err
	}
	if err := p.cmd.Start(); err != nil {
		return err
	}
	r.procs = append(r.procs, p)
	r.lanes = append(r.lanes, lane{pid: p.cmd.Process.Pid, insted: insted})
	r.live.Go(func() { r.listen(ctx, p, out) })
	_, err = p.in.Write(append(text, '\n'))
	return err
}

// listen passes on what a worker tells, and then that it has ended.
func (r *referee) listen(ctx context.Context, p *process, out io.Reader) {
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		var e event
		if json.Unmarshal(lines.Bytes(), &e) != nil {
			continue
		}
		e.worker = p.lane
		select {
		case r.events <- e:
		case <-ctx.Done():
		}
	}
	err := p.cmd.Wait()
	select {
	case r.ends <- end{p.lane, err}:
	case <-ctx.Done():
	}
}

// watch drives the view until the last worker has ended.
func (r *referee) watch(ctx context.Context) error {
	tick := time.NewTicker(frames)
	defer tick.Stop()
	var kill <-chan time.Time
	for running := len(r.procs); running > 0; {
		select {
		case e := <-r.events:
			if e.What == isStalls {
				kill = time.After(lastSight)
			}
			if err := r.take(e); err != nil {
				return err
			}
		case x := <-r.ends:
			running--
			if err := r.ended(x); err != nil {
				return err
			}
		case q := <-r.queues:
			r.line(q)
		case <-kill:
			if err := r.kill(ctx); err != nil {
				return err
			}
			running++ // the one in its place
		case <-tick.C:
			if !r.began.IsZero() {
				r.view.draw(&r.timeline)
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// take takes what a worker tells into the timeline.
func (r *referee) take(e event) error {
	i, p := e.worker, r.procs[e.worker]
	at := e.At.Sub(r.began)
	switch e.What {
	case isReady:
		p.ready = true
		return r.begin(p)
	case isWaits:
		r.enter(i, waiting, at)
	case isHolds:
		first := r.killed != nil && r.killed.heir < 0
		r.enter(i, holding, at)
		if first {
			r.view.note(at, fmt.Sprintf("worker %d takes over, %s after the kill", i+1, short(r.killed.takeover)))
		}
	case isWrote:
		r.lanes[i].done++
		r.number = append(r.number, point{at, e.Number})
		r.view.wrote(&r.timeline, i, at, e.Number)
	case isFrees:
		r.enter(i, idle, at)
	case isFailed:
		p.failed = e
	}
	return nil
}

// begin gives the start when all are ready, or to one that comes later.
func (r *referee) begin(p *process) error {
	if !r.began.IsZero() {
		_, err := p.in.Write([]byte{'\n'})
		return err
	}
	for _, p := range r.procs {
		if !p.ready {
			return nil
		}
	}
	r.began = time.Now().Round(0) // by the wall clock, which all processes share
	for _, p := range r.procs {
		if _, err := p.in.Write([]byte{'\n'}); err != nil {
			return err
		}
	}
	return nil
}

// kill kills the holder that hangs, and starts another for what it left.
func (r *referee) kill(ctx context.Context) error {
	v := r.victim()
	if err := r.procs[v].cmd.Process.Kill(); err != nil {
		return err
	}
	at := r.now()
	r.timeline.kill(v, at)
	heir := len(r.procs)
	r.view.note(at, fmt.Sprintf("worker %d (pid %d) is killed while it holds: locked until its term ends", v+1, r.lanes[v].pid))
	r.view.note(at, fmt.Sprintf("worker %d starts in its place, and waits as the others do", heir+1))
	return r.start(ctx, order{Worker: heir + 1, Turns: r.increments - r.lanes[v].done}, v+1)
}

// ended notes the end of a worker, which is an error unless all is done.
func (r *referee) ended(x end) error {
	p, l := r.procs[x.lane], &r.lanes[x.lane]
	l.ended = true
	switch {
	case l.killed:
		return nil
	case p.failed.What != "":
		return codeError{p.failed.Code, fmt.Errorf("worker %d: %s", x.lane+1, strings.TrimPrefix(p.failed.Text, "hasp: "))}
	case x.err != nil:
		first, _, _ := strings.Cut(p.stderr.String(), "\n")
		return codeError{exitFailed, errors.Join(fmt.Errorf("worker %d ended: %w", x.lane+1, x.err), errors.New(first))}
	}
	return nil
}

// summary is the outcome, for people and programs.
type summary struct {
	OK          bool    `json:"ok"`
	Expected    int     `json:"expected"`
	Number      int     `json:"number"`
	Store       string  `json:"store"`
	Workers     int     `json:"workers"`
	Seconds     float64 `json:"seconds"`
	HeldAtOnce  int     `json:"held_at_once"`
	MedianHold  float64 `json:"median_hold_ms"`
	LongestWait float64 `json:"longest_wait_ms"`
	Killed      int     `json:"killed_worker,omitempty"`
	KilledPID   int     `json:"killed_pid,omitempty"`
	Heir        int     `json:"heir_worker,omitempty"`
	Takeover    float64 `json:"takeover_ms,omitempty"`
}

func (r *referee) summary(number int) summary {
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
	s := summary{
		OK:         number == r.expected() && r.done() == r.expected(),
		Expected:   r.expected(),
		Number:     number,
		Store:      r.place,
		Workers:    r.workers,
		Seconds:    r.timeline.end().Seconds(),
		HeldAtOnce: r.crowd(),
	}
	if h := r.lengths(holding); len(h) > 0 {
		s.MedianHold = ms(h[len(h)/2])
	}
	if w := r.lengths(waiting); len(w) > 0 {
		s.LongestWait = ms(w[len(w)-1])
	}
	if k := r.killed; k != nil {
		s.Killed, s.KilledPID = k.lane+1, r.lanes[k.lane].pid
		if k.heir >= 0 {
			s.Heir, s.Takeover = k.heir+1, ms(k.takeover)
		}
	}
	return s
}
