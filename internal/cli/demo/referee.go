package demo

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hasplock/hasp/internal/cli/text"
	"github.com/hasplock/hasp/internal/crew"
)

// settleEvery is how often the referee handles the reports that are older than lag.
const settleEvery = 40 * time.Millisecond

// Reports of different workers arrive in any order. The referee keeps each report for lag after its
// event, so that it can sort reports by time.
const lag = 100 * time.Millisecond

// referee starts the workers of a demo, kills one, and keeps the timeline. Only the goroutine of
// run uses the fields.
type referee struct {
	*Demo
	timeline
	lines
	procs   []*crew.Process // by lane
	ready   int             // how many processes have reported that they are ready
	running int             // how many processes have not ended
	reports chan report     // filled by the goroutines that read from workers
	pending []report        // reports that are younger than lag
	live    sync.WaitGroup  // the goroutines that read from workers
}

// report is an event at a time, and a function that handles it.
type report struct {
	at     time.Time
	handle func() error
}

// run runs the workers until all have ended. When it returns, even with an error, no process and no
// goroutine is left.
func (r *referee) run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	r.reports = make(chan report)
	defer func() {
		cancel()
		for _, p := range r.procs {
			_ = p.Kill()
		}
		r.live.Wait()
	}()

	for i := range r.Workers {
		o := order{Turns: r.Increments}
		if i == r.victim() && !r.NoLock {
			o.Stall = r.Increments/3 + 1
		}
		if err := r.start(ctx, o); err != nil {
			return err
		}
	}
	return r.watch(ctx)
}

// victim is the lane of the worker that will be killed.
func (r *referee) victim() int { return r.Workers / 3 }

// start starts a worker process in the next lane, and sends it o.
func (r *referee) start(ctx context.Context, o order) error {
	i := len(r.procs)
	o.Demo = *r.Demo
	p, err := crew.Start(Role)
	if err != nil {
		return err
	}

	r.procs = append(r.procs, p)
	r.lanes = append(r.lanes, track{pid: p.Pid})
	r.running++
	r.live.Go(func() {
		for e := (event{}); p.Receive(&e) == nil; e = (event{}) {
			r.pass(ctx, report{e.At, func() error { return r.handle(ctx, i, e) }})
		}
		err := p.Wait()
		r.pass(ctx, report{time.Now(), func() error { return r.ended(i, err) }})
	})
	return p.Send(o)
}

// pass sends a report to watch, unless ctx ends first.
func (r *referee) pass(ctx context.Context, what report) {
	select {
	case r.reports <- what:
	case <-ctx.Done():
	}
}

func (r *referee) watch(ctx context.Context) error {
	tick := time.NewTicker(settleEvery)
	defer tick.Stop()

	for r.running > 0 {
		var err error
		select {
		case what := <-r.reports:
			r.pending = append(r.pending, what)
		case <-tick.C:
			err = r.settle(time.Now().Add(-lag))
		case <-ctx.Done():
			err = context.Cause(ctx)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// settle handles the reports of events before until, in order of time.
func (r *referee) settle(until time.Time) error {
	slices.SortStableFunc(r.pending, func(a, b report) int { return a.at.Compare(b.at) })
	for len(r.pending) > 0 && r.pending[0].at.Before(until) {
		what := r.pending[0]
		r.pending = r.pending[1:]
		if err := what.handle(); err != nil {
			return err
		}
	}
	return nil
}

// handle records an event of the worker in a lane.
func (r *referee) handle(ctx context.Context, i int, e event) error {
	at := e.At.Sub(r.began)
	switch e.Kind {
	case isReady:
		return r.begin(i)
	case isWaits:
		r.enter(i, waiting, at)
	case isHolds:
		takesOver := r.death != nil && r.death.heir < 0
		r.enter(i, holding, at)
		if takesOver {
			return r.note(at, fmt.Sprintf("worker %d takes over, %s after the kill", i+1, text.Duration(r.death.takeover)))
		}
	case isWrote:
		r.lanes[i].done++
		return r.wrote(&r.timeline, i, at, e.Number)
	case isStalls:
		return r.kill(ctx)
	case isFrees:
		r.enter(i, idle, at)
	case isFailed:
		r.lanes[i].failed = e.Error
	}
	return nil
}

// begin handles that the worker in a lane is ready. When all first workers are ready, it starts
// their turns. A later worker starts at once.
func (r *referee) begin(i int) error {
	start := r.procs[i : i+1]
	switch r.ready++; {
	case r.ready < r.Workers:
		return nil
	case r.ready == r.Workers:
		start = r.procs
		// Round removes the monotonic reading. The workers report wall clock times, with which this
		// time is compared.
		r.began = time.Now().Round(0)
	}

	for _, p := range start {
		if err := p.Send("start"); err != nil {
			return err
		}
	}
	return nil
}

// kill kills the worker that stalls. After lag, a new worker starts. It makes the remaining turns.
func (r *referee) kill(ctx context.Context) error {
	v, at := r.victim(), time.Now()
	r.pending = append(r.pending, report{at, func() error {
		at := at.Sub(r.began)
		r.timeline.kill(v, at)
		return errors.Join(
			r.note(at, fmt.Sprintf("worker %d (pid %d) is killed while it holds the lock", v+1, r.lanes[v].pid)),
			r.note(at, fmt.Sprintf("worker %d starts in its place; the key stays locked until the term ends", len(r.procs)+1)),
			r.start(ctx, order{Turns: r.Increments - r.lanes[v].done}))
	}})
	return r.procs[v].Kill()
}

// ended records the end of the worker in a lane. If the worker has failed, it returns the worker's
// error.
func (r *referee) ended(i int, err error) error {
	r.running--
	l := &r.lanes[i]
	if l.killed || err == nil {
		return nil
	}

	code := exitFailed
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() > 0 { // a signal did not end it
		code = exit.ExitCode()
	}
	why := cmp.Or(l.failed, err.Error())
	return failure{fmt.Errorf("worker %d: %s", i+1, strings.TrimPrefix(why, "hasp: ")), code}
}
