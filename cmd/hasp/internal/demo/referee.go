package demo

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/cmd/hasp/internal/text"
)

// killAfter is the time between the stall of a holder and its kill, so that the
// view shows for a moment that it holds the lock.
const killAfter = 400 * time.Millisecond

// frameEvery is how often the view is drawn and the queue is read.
const frameEvery = 40 * time.Millisecond

// referee starts the workers of a demo, kills one, and keeps the timeline. Only
// the goroutine of run uses its fields; the others send it functions to call.
type referee struct {
	*Demo
	timeline
	view    view
	procs   []*process        // by lane
	running int               // processes that have not ended
	killAt  <-chan time.Time  // nil until the victim has stalled
	calls   chan func() error // for the goroutine of run
	live    sync.WaitGroup    // goroutines that read from workers and from the store
}

// process is one worker process.
type process struct {
	lane   int
	owner  string // the label of its locks, by which the referee finds it in the queue
	cmd    *exec.Cmd
	in     io.WriteCloser
	stderr bytes.Buffer
	ready  bool
}

// run runs all workers to their end. When it returns, no process and no
// goroutine is left, whether or not it returns an error.
func (r *referee) run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	r.calls = make(chan func() error)
	defer func() {
		cancel()
		for _, p := range r.procs {
			_ = p.cmd.Process.Kill()
			p.in.Close()
		}
		r.live.Wait()
	}()

	for i := range r.Workers {
		o := order{Turns: r.Increments}
		if i == r.victim() && !r.NoLock {
			o.Stall = r.Increments/3 + 1
		}
		if err := r.start(ctx, o); err != nil {
			return failed(err)
		}
	}
	if r.ordered {
		client, err := r.Store.Open(ctx, nil)
		if err != nil {
			return err
		}
		r.live.Go(func() {
			defer client.Close()
			r.readQueues(ctx, client)
		})
	}
	return r.watch(ctx)
}

// victim is the lane of the worker that will be killed.
func (r *referee) victim() int { return r.Workers / 3 }

// start starts a worker process in the next lane, and sends it o.
func (r *referee) start(ctx context.Context, o order) error {
	lane := len(r.procs)
	o.Owner = fmt.Sprintf("hasp demo %d worker %d", os.Getpid(), lane+1)
	o.Store, o.NoLock, o.Key, o.TTL, o.File, o.Work = r.Store, r.NoLock, r.key, r.TTL, r.file, r.Work
	line, err := json.Marshal(o)
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}

	p := &process{lane: lane, owner: o.Owner, cmd: exec.Command(self, WorkerCommand)}
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
	r.running++
	r.addLane(p.cmd.Process.Pid)
	r.live.Go(func() { r.listen(ctx, p, out) })
	_, err = p.in.Write(append(line, '\n'))
	return err
}

// listen reads the reports of a worker until it has ended.
func (r *referee) listen(ctx context.Context, p *process, out io.Reader) {
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		var e event
		if json.Unmarshal(lines.Bytes(), &e) == nil {
			r.call(ctx, func() error { return r.handle(p, e) })
		}
	}
	err := p.cmd.Wait()
	r.call(ctx, func() error { return r.ended(p, err) })
}

// call has the goroutine of run call f, unless ctx ends first.
func (r *referee) call(ctx context.Context, f func() error) {
	select {
	case r.calls <- f:
	case <-ctx.Done():
	}
}

// readQueues reads the queue of the key again and again until ctx ends. It
// ignores errors: if the store fails, a worker reports it.
func (r *referee) readQueues(ctx context.Context, client *hasp.Client) {
	tick := time.NewTicker(frameEvery)
	defer tick.Stop()
	for ctx.Err() == nil {
		asked := time.Now()
		if status, err := client.Inspect(ctx, r.key); err == nil {
			r.call(ctx, func() error { r.setQueue(asked, status.Waiters); return nil })
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
		}
	}
}

// watch calls functions, kills the victim and draws, until the last worker has
// ended.
func (r *referee) watch(ctx context.Context) error {
	tick := time.NewTicker(frameEvery)
	defer tick.Stop()
	for r.running > 0 {
		select {
		case f := <-r.calls:
			if err := f(); err != nil {
				return err
			}
		case <-r.killAt:
			if err := r.kill(ctx); err != nil {
				return failed(err)
			}
		case <-tick.C:
			if !r.began.IsZero() {
				r.view.draw(&r.timeline)
			}
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// handle records an event of a worker in the timeline.
func (r *referee) handle(p *process, e event) error {
	i, at := p.lane, e.At.Sub(r.began)
	switch e.Kind {
	case isReady:
		p.ready = true
		return failed(r.begin(p))
	case isWaits:
		r.enter(i, waiting, at)
	case isHolds:
		takesOver := r.killed != nil && r.killed.heir < 0
		r.enter(i, holding, at)
		if takesOver {
			r.view.note(at, fmt.Sprintf("worker %d takes over, %s after the kill", i+1, text.Duration(r.killed.takeover)))
		}
	case isWrote:
		r.lanes[i].done++
		r.number = append(r.number, point{at, e.Number})
		r.view.wrote(&r.timeline, i, at, e.Number)
	case isStalls:
		r.killAt = time.After(killAfter)
	case isFrees:
		r.enter(i, idle, at)
	}
	return nil
}

// begin lets p start its turns. The first workers wait until all are ready.
func (r *referee) begin(p *process) error {
	start := []*process{p}
	if r.began.IsZero() {
		if slices.ContainsFunc(r.procs, func(p *process) bool { return !p.ready }) {
			return nil
		}
		start = r.procs
		// Without the monotonic reading: workers report wall clock times.
		r.began = time.Now().Round(0)
	}
	for _, p := range start {
		if _, err := p.in.Write([]byte{'\n'}); err != nil {
			return err
		}
	}
	return nil
}

// setQueue records the owners in the queue as lanes. It ignores an owner that is
// not a worker's.
func (r *referee) setQueue(asked time.Time, owners []string) {
	r.queue, r.queueAt = r.queue[:0], asked.Sub(r.began)
	for _, owner := range owners {
		i := slices.IndexFunc(r.procs, func(p *process) bool { return p.owner == owner })
		if i >= 0 {
			r.queue = append(r.queue, i)
		}
	}
}

// kill kills the worker that stalls, and starts another for its remaining turns.
func (r *referee) kill(ctx context.Context) error {
	v := r.victim()
	if err := r.procs[v].cmd.Process.Kill(); err != nil {
		return err
	}
	at := r.now()
	r.timeline.kill(v, at)
	r.view.note(at, fmt.Sprintf("worker %d (pid %d) is killed while it holds the lock", v+1, r.lanes[v].pid))
	r.view.note(at, fmt.Sprintf("worker %d starts in its place; the key stays locked until the term ends", len(r.procs)+1))
	return r.start(ctx, order{Turns: r.Increments - r.lanes[v].done})
}

// ended records the end of a worker, and returns its error, if it has failed.
func (r *referee) ended(p *process, err error) error {
	r.running--
	l := &r.lanes[p.lane]
	l.ended = true
	if l.killed || err == nil {
		return nil
	}
	code := p.cmd.ProcessState.ExitCode()
	if code < 0 { // a signal ended it
		code = exitFailed
	}
	why, _, _ := strings.Cut(p.stderr.String(), "\n")
	return &Error{code, fmt.Errorf("worker %d: %s", p.lane+1, strings.TrimPrefix(cmp.Or(why, err.Error()), "hasp: "))}
}

// Summary is the outcome of a demo. Times are in the unit that the JSON name
// says.
type Summary struct {
	OK          bool    `json:"ok"`       // the number is right, and the workers agree
	Expected    int     `json:"expected"` // the number, if no increment is lost
	Number      int     `json:"number"`
	Store       string  `json:"store"`   // the strategy, or "none"
	Workers     int     `json:"workers"` // without the one that starts after the kill
	Seconds     float64 `json:"seconds"`
	HeldAtOnce  int     `json:"held_at_once"` // the most workers that held the lock at one time
	MedianHold  float64 `json:"median_hold_ms"`
	LongestWait float64 `json:"longest_wait_ms"`
	Killed      int     `json:"killed_worker,omitempty"` // from 1
	KilledPID   int     `json:"killed_pid,omitempty"`
	Heir        int     `json:"heir_worker,omitempty"` // the next worker that held the lock, from 1
	Takeover    float64 `json:"takeover_ms,omitempty"` // from the kill until then
}

func (r *referee) summary(number int) Summary {
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
	s := Summary{
		OK:         number == r.expected() && r.done() == r.expected(),
		Expected:   r.expected(),
		Number:     number,
		Store:      cmp.Or(r.Store.Strategy, "none"),
		Workers:    r.Workers,
		Seconds:    r.timeline.end().Seconds(),
		HeldAtOnce: r.heldAtOnce(),
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
