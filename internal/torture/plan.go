package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"sync"

	"github.com/hasplock/hasp/internal/walljump"
)

// plan says which runs are made and which files are written.
type plan struct {
	strategies       []string
	parallel         int
	clocks           bool // the wall clocks of clients jump
	history, results string
}

// carryOut does all runs and prints their verdicts in order.
func (p plan) carryOut(ctx context.Context, o options, only string) (kept bool, err error) {
	if only != "" {
		if o.only, err = regexp.Compile(only); err != nil {
			return false, err
		}
	}
	for _, f := range []struct {
		name  string
		flags int
		to    *io.Writer
	}{{p.history, os.O_TRUNC, &o.log}, {p.results, os.O_APPEND, &o.results}} {
		if f.name == "" {
			continue
		}
		file, err := os.OpenFile(f.name, os.O_CREATE|os.O_WRONLY|f.flags, 0o666)
		if err != nil {
			return false, err
		}
		defer file.Close()
		*f.to = &lines{w: file}
	}
	if p.clocks {
		var remove func()
		o.program, remove = jumper(ctx)
		defer remove()
	}
	fmt.Printf("%s, %d CPUs, seed %d\n", runtime.Version(), runtime.NumCPU(), o.seed)
	var jobs []*job
	o.whole = o.time
	for _, o.strategy = range p.strategies {
		for _, o.losing = range []bool{false, true} {
			j := &job{options: o, done: make(chan struct{})}
			if o.losing {
				j.time /= 3
			}
			jobs = append(jobs, j)
		}
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		slots := make(chan struct{}, max(p.parallel, 1))
		for _, j := range jobs {
			slots <- struct{}{}
			go func() {
				j.work(ctx)
				<-slots
			}()
		}
	}()
	kept = true
	some := false
	for _, j := range jobs {
		<-j.done
		some = some || j.res != nil && j.res.Injected > 0
		fmt.Print(j.out.String())
		kept = kept && (j.res == nil || len(j.res.Violations) == 0)
		if j.err != nil {
			cancel() // the other runs end early
			err = cmp.Or(err, fmt.Errorf("%s, seed %d: %w", j.strategy, j.seed, j.err))
		}
	}
	if !some && err == nil {
		err = cmp.Or(ctx.Err(), errors.New("no fault was injected: the strategy has none of that name, or the time was too short"))
	}
	return kept, err
}

// job is one run of the plan.
type job struct {
	options
	out  strings.Builder
	res  *result
	err  error
	done chan struct{} // closed when the run has been made
}

func (j *job) work(ctx context.Context) {
	defer close(j.done)
	if j.err = ctx.Err(); j.err != nil {
		return
	}
	j.res, j.err = do(ctx, j.options, &j.out)
	if j.res != nil && j.results != nil {
		j.err = errors.Join(j.err, json.NewEncoder(j.results).Encode(j.res))
	}
}

// jumper builds this program again, for clients whose wall clocks can jump. If
// that fails, the clients have the host's clock.
func jumper(ctx context.Context) (program string, remove func()) {
	dir, err := os.MkdirTemp("", "torture-")
	if err != nil {
		fmt.Println("the wall clocks of clients do not jump:", err)
		return "", func() {}
	}
	program = filepath.Join(dir, "client.exe")
	fmt.Println("building clients whose wall clocks can jump; the first time takes minutes")
	if err := walljump.Build(ctx, "github.com/hasplock/hasp/internal/torture", program); err != nil {
		fmt.Println("the wall clocks of clients do not jump:", err)
		program = ""
	}
	return program, func() { os.RemoveAll(dir) }
}

// lines is a file to which several goroutines write whole lines.
type lines struct {
	mu sync.Mutex // guards w
	w  io.Writer
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Write(b)
}
