// Package rig is the body of the command torture: the clients, the faults, and the
// checks. A program in a module of its own gives it strategies whose stores it does not
// know.
package rig

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9/logging"

	"github.com/hasplock/hasp/internal/crew"
	"github.com/hasplock/hasp/internal/torture/hosts"
	"github.com/hasplock/hasp/internal/walljump"
)

// term is the term of all leases. It is short, so that much happens in little
// time.
const term = 300 * time.Millisecond

// strategies are all strategies, those on one Redis first.
var strategies = []string{"spinlock", "pubsublock", fairlock, redlock, filelock}

// Program is a program whose main function calls [Main].
type Program struct {
	Command string     // runs it
	Package string     // of it
	More    []Strategy // if there are any, the program has no others
}

// Main runs the command, and ends the program.
func Main(program Program) {
	if crew.Role() != "" {
		work(crew.Parent(), program.More)
	}

	var p plan
	o := options{Program: program, patience: patience}
	if len(program.More) > 0 {
		o.place, strategies = onOther, nil
		for _, s := range program.More {
			strategies = append(strategies, s.Name)
			if s.Client == nil {
				p.usual = append(p.usual, s.Name)
			}
		}
		if len(p.usual) == 0 {
			p.usual = strategies
		}
	}
	names := flag.String("strategy", "", "comma-separated `names` of strategies; if empty, all of hasp that can use the store")
	flag.IntVar(&p.parallel, "parallel", 1, "how many runs to make at a time")
	flag.Uint64Var(&o.seed, "seed", rand.Uint64N(1_000_000)+1, "decides which faults happen; by default a new one")
	flag.DurationVar(&o.time, "time", time.Minute, "length for each strategy; faults that take locks away last a third of it in addition")
	flag.StringVar(&o.place, "on", cmp.Or(o.place, onServer), "`store`: redis, sentinel, cluster or service; with each process on a host of its own, which needs root: hosts, hosts-sentinel, hosts-cluster, hosts-service or hosts-name")
	flag.IntVar(&o.nodes, "nodes", leastNodes, "how many servers redlock has; 1, 2 and 4 set allow_unsafe_nodes")
	flag.DurationVar(&o.far, "far", 0, "with -on hosts: how long a packet takes to every second client and back, without a fault")
	flag.BoolVar(&p.clocks, "clocks", true, "make the wall clocks of clients jump; this builds the clients again")
	flag.Func("faults", "regular expression of the `names` of faults", func(text string) (err error) {
		o.only, err = regexp.Compile(text)
		return err
	})
	flag.StringVar(&o.plant, "plant", "", "plant a `bug`: release, renewal, wake-up or slots; on hosts also reply, queue, subscription or name")
	fileVar(&o.history, "history", os.O_TRUNC, "write all reports of the clients to a `file`, as lines of JSON")
	fileVar(&o.results, "results", os.O_APPEND, "append the results to a `file`, as lines of JSON")
	optional := flag.Bool("optional", false, "with -on hosts: end without an error where hosts cannot be made")
	tables := flag.Bool("document", false, "run nothing; write the tables of "+page+" from the files of results in the arguments")
	flag.Parse()
	if *tables {
		exit(0, document(flag.Args()))
	}
	if flag.NArg() > 0 {
		exit(2, fmt.Errorf("unknown argument %q", flag.Arg(0)))
	}
	if err := p.check(*names, o); err != nil {
		exit(2, err)
	}
	if o.apart() {
		if err := hosts.Apart(); err != nil && *optional {
			fmt.Fprintln(os.Stderr, "torture:", err)
			exit(0, nil)
		} else if err != nil {
			exit(2, err)
		}
		resolveBy(ownNames)
	}
	logging.Disable() // go-redis logs servers that are down

	kept, err := p.carryOut(o)
	switch {
	case errors.Is(err, errInterrupted):
		fmt.Fprintln(os.Stderr, "torture:", err)
		exit(130, nil) // as a shell reports the end by SIGINT
	case err == nil && kept && o.plant != "":
		fmt.Println("the planted bug was not found")
		exit(1, nil)
	case !kept:
		exit(1, err)
	}
	exit(0, err)
}

// exit ends the program. The status after an error is 2.
func exit(status int, err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "torture:", err)
		status = 2
	}
	os.Exit(status)
}

// errInterrupted means that a signal ended the runs early.
var errInterrupted = errors.New("interrupted")

// fileVar defines a flag that opens a file for writing.
func fileVar(to **os.File, name string, mode int, usage string) {
	flag.Func(name, usage, func(path string) (err error) {
		*to, err = os.OpenFile(path, os.O_CREATE|os.O_WRONLY|mode, 0o666)
		return err
	})
}

// plan says which runs are made.
type plan struct {
	strategies []string
	usual      []string // the strategies of a program that has its own: those of hasp, if it has any
	parallel   int      // runs at a time
	clocks     bool     // the wall clocks of clients jump
}

// choose sets the strategies to those of a comma-separated list.
func (p *plan) choose(names, place string) error {
	p.strategies = strings.FieldsFunc(names, func(r rune) bool { return r == ',' })
	for _, name := range p.strategies {
		if err := oneOf("strategy", name, strategies); err != nil {
			return err
		}
	}
	switch {
	case len(p.strategies) > 0:
	case len(p.usual) > 0:
		p.strategies = p.usual
	case place == onServer:
		p.strategies = strategies
	case place == onHosts:
		p.strategies = strategies[:4]
	default:
		p.strategies = strategies[:3]
	}
	return nil
}

// carryOut makes all runs and prints their verdicts in order.
func (p plan) carryOut(o options) (kept bool, err error) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if p.clocks && !o.apart() {
		dir, err := os.MkdirTemp("", "torture-")
		if err != nil {
			return false, err
		}
		defer os.RemoveAll(dir)
		o.program = jumper(ctx, o.Package, dir)
	}
	fmt.Printf("%s, %d CPUs, seed %d\n", runtime.Version(), runtime.NumCPU(), o.seed)
	interrupted := ctx.Err
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()

	kept = true
	injected := 0
	for _, j := range p.start(ctx, o) {
		<-j.done
		fmt.Print(j.out.String())
		if j.res != nil {
			injected += j.res.Injected
			kept = kept && len(j.res.Violations) == 0
		}
		if j.err != nil {
			cancel() // the other runs end early
			err = cmp.Or(err, fmt.Errorf("%s, seed %d: %w", j.strategy, j.seed, j.err))
		}
	}
	switch {
	case interrupted() != nil:
		err = errInterrupted
	case injected == 0 && err == nil:
		err = errors.New("no fault was injected: the strategy has none of that name, or the time was too short")
	}
	return kept, err
}

// start starts all runs, and returns them in order: each strategy without faults
// that take locks away, and then with them.
func (p plan) start(ctx context.Context, o options) (jobs []*job) {
	o.whole = o.time
	for _, o.strategy = range p.strategies {
		o.term = o.usualTerm()
		for _, o.losing = range []bool{false, true} {
			j := &job{options: o, done: make(chan struct{})}
			if o.losing {
				j.time /= 3
			}
			jobs = append(jobs, j)
		}
	}
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
	return jobs
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
		// A line is one write, so those of two runs do not mix.
		j.err = errors.Join(j.err, json.NewEncoder(j.results).Encode(j.res))
	}
}

// jumper builds this program again, for clients whose wall clocks can jump. If
// that fails, it returns "", and the clients have the host's clock.
func jumper(ctx context.Context, pkg, dir string) (program string) {
	fmt.Println("building clients whose wall clocks can jump; the first time takes minutes")
	program = filepath.Join(dir, "client.exe")
	if err := walljump.Build(ctx, pkg, program); err != nil {
		fmt.Printf("the wall clocks of clients do not jump: %v; run it in the module, or give -clocks=false\n", err)
		return ""
	}
	return program
}
