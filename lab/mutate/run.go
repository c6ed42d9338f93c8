//go:build unix

package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

// stage is some tests of one package, on one kind of Redis.
type stage struct{ Dir, Run, Skip, Redis string }

func (s stage) String() string {
	return fmt.Sprintf("HASP_TEST_REDIS=%s go test -run '%s' -skip '%s' ./%s", s.Redis, s.Run, s.Skip, s.Dir)
}

// stages returns the tests that should find a bug in a package, its own first.
func (p pkg) stages() []stage {
	s := []stage{{p.dir, "", "Conformance", "process"}}
	if *own {
		return s
	}
	s = append(s, p.more...)
	if p.dir != "filelock" {
		s = append(s, stage{"lab/simulate", "", "", "inprocess"})
	}
	return s
}

// runner builds and tests mutants.
type runner struct {
	root string
	dir  string             // for what it builds
	keep func(record) error // appends to the file of results

	mu        sync.Mutex         // guards baselines; held while a stage is measured
	baselines map[stage]baseline // how each stage runs without a bug
}

// baseline says how a stage runs without a bug.
type baseline struct {
	Takes time.Duration
	Quick string // matches the quickest tests, which take a tenth of the time
}

// baseline returns how a stage runs without a bug. It runs the stage if that is not
// known.
func (r *runner) baseline(ctx context.Context, s stage) (baseline, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if b, ok := r.baselines[s]; ok {
		return b, nil
	}
	bin, err := r.build(ctx, s.Dir, "")
	if err != nil {
		return baseline{}, err
	}
	defer os.Remove(bin)
	for range 3 {
		began := time.Now()
		ran, err := r.test(ctx, bin, s, 20*time.Minute)
		if err != nil {
			return baseline{}, err
		}
		if ran.failed == "" {
			b := baseline{Takes: time.Since(began), Quick: ran.quick()}
			r.baselines[s] = b
			return b, r.keep(record{Stage: &s, Baseline: &b})
		}
		fmt.Printf("fails without a bug: %v: %s\n", s, ran.failed)
	}
	return baseline{}, errors.New("a test fails without a bug, so it cannot find one")
}

// errBuild is the error of code that does not compile.
var errBuild = errors.New("does not compile")

// build builds the tests of a package, with an overlay if there is one.
func (r *runner) build(ctx context.Context, dir, overlay string) (string, error) {
	f, err := os.CreateTemp(r.dir, "test")
	if err != nil {
		return "", err
	}
	f.Close()
	cmd := exec.CommandContext(ctx, "go", "test", "-c", "-vet=off", "-ldflags=-s -w", "-overlay="+overlay, "-o", f.Name(), ".")
	cmd.Dir = filepath.Join(r.root, dir)
	if out, err := cmd.CombinedOutput(); err != nil {
		os.Remove(f.Name())
		return "", fmt.Errorf("%w: %s", errBuild, out)
	}
	return f.Name(), nil
}

// find runs the tests of a stage, or only its quick tests. It returns the test that
// finds a mutant, or an empty string. The quick tests use a server in the process.
func (r *runner) find(ctx context.Context, bin string, s stage, quick bool) (string, error) {
	b, err := r.baseline(ctx, s)
	if err != nil {
		return "", err
	}
	limit := 3*b.Takes + 20*time.Second
	parts := []stage{s}
	if b.Quick != "" {
		parts = []stage{{s.Dir, b.Quick, s.Skip, "inprocess"}, s}
	}
	if quick {
		parts = parts[:1]
	}
	for _, part := range parts {
		if found, err := r.findTwice(ctx, bin, part, limit); err != nil || found != "" {
			return found, err
		}
	}
	return "", nil
}

// findTwice returns the test that fails twice, or an empty string. If a test fails
// once, and passes when it runs again, the other tests run without it. If the
// tests time out, they get twice the time, because the machine may have become
// busier.
func (r *runner) findTwice(ctx context.Context, bin string, s stage, limit time.Duration) (string, error) {
	for tries := 1; ; tries++ {
		ran, err := r.test(ctx, bin, s, limit)
		if err != nil || ran.failed == "" {
			return "", err
		}
		again := s
		name, _, _ := strings.Cut(ran.failed, "/")
		if ran.failed == timedOut {
			limit *= 2
		} else if strings.HasPrefix(name, "Test") {
			again.Run, again.Skip = "^"+name+"$", ""
		}
		more, err := r.test(ctx, bin, again, limit)
		if err != nil || more.failed != "" || tries == 3 {
			return ran.failed, err
		}
		fmt.Printf("fails now and then: %v: %s\n", s, ran.failed)
		if again == s {
			return "", nil // all tests have passed
		}
		s.Skip = strings.TrimPrefix(s.Skip+"|"+again.Run, "|")
	}
}

// result is the first test that failed, and how long each test took.
type result struct {
	failed string
	took   map[string]time.Duration
}

// timedOut takes the place of a test if the tests had to be stopped.
const timedOut = "time-out"

var (
	failure = regexp.MustCompile(`^\s*--- FAIL: (\S+)|^(panic: .*)|^(fatal error: .*)`)
	passed  = regexp.MustCompile(`^--- PASS: (\S+) \((.+)\)`)
)

// quick returns a regular expression for the quickest tests, which take a tenth of
// the time together.
func (t result) quick() string {
	names, total := slices.Collect(maps.Keys(t.took)), time.Duration(0)
	for _, d := range t.took {
		total += d
	}
	slices.SortFunc(names, func(a, b string) int { return cmp.Or(cmp.Compare(t.took[a], t.took[b]), cmp.Compare(a, b)) })
	sum := time.Duration(0)
	i := slices.IndexFunc(names, func(name string) bool {
		sum += t.took[name]
		return sum > total/10
	})
	if i <= 0 {
		return ""
	}
	return "^(" + strings.Join(names[:i], "|") + ")$"
}

// test runs a test binary until its first failure.
func (r *runner) test(ctx context.Context, bin string, s stage, limit time.Duration) (result, error) {
	return r.watch(ctx, limit, s, bin, "-test.v", "-test.failfast", "-test.timeout=0", "-test.run", s.Run, "-test.skip", s.Skip)
}

// watch runs a program in the directory of a stage until it ends, a test fails or the
// limit is over.
func (r *runner) watch(ctx context.Context, limit time.Duration, s stage, command ...string) (result, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	// A bug may allocate without end. The limit is of address space, in KiB.
	cmd := exec.CommandContext(ctx, "sh", append([]string{"-c", `ulimit -v 16000000 && exec "$0" "$@"`}, command...)...)
	cmd.Dir = filepath.Join(r.root, s.Dir)
	cmd.Env = append(os.Environ(), "HASP_TEST_REDIS="+s.Redis)
	// Tests and torture start processes. They form one group, which ends with them.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 5 * time.Second
	out, in, err := os.Pipe()
	if err != nil {
		return result{}, err
	}
	defer out.Close()
	cmd.Stdout, cmd.Stderr = in, in
	err = cmd.Start()
	in.Close()
	if errors.Is(err, context.DeadlineExceeded) {
		return result{failed: timedOut}, nil // the limit was over before the start
	}
	if err != nil {
		return result{}, err
	}

	read := make(chan result, 1)
	go func() { read <- readResult(out, cmd.Cancel) }()
	err = cmd.Wait()
	cmd.Cancel()
	// A process that outlives the tests keeps the pipe open.
	out.SetReadDeadline(time.Now().Add(time.Second))
	res := <-read
	if res.failed == "" && ctx.Err() != nil {
		res.failed = timedOut
	} else if res.failed == "" && err != nil {
		res.failed = err.Error()
	}
	return res, nil
}

// readResult reads the output of tests. It stops them at the first failure.
func readResult(out io.Reader, stop func() error) result {
	res := result{took: map[string]time.Duration{}}
	for lines := bufio.NewReader(out); ; {
		line, err := lines.ReadString('\n')
		if m := passed.FindStringSubmatch(line); m != nil {
			res.took[m[1]], _ = time.ParseDuration(m[2])
		}
		if m := failure.FindStringSubmatch(line); m != nil && res.failed == "" {
			res.failed = m[1] + m[2] + m[3]
			stop()
		}
		if err != nil {
			return res
		}
	}
}

// try runs the stages of m until one finds it, or only the quick tests of the first
// stage.
func (r *runner) try(ctx context.Context, m *mutant, quick bool) (o outcome, err error) {
	path := filepath.Join(r.root, m.File)
	dir, err := os.MkdirTemp(r.dir, "mutant")
	if err != nil {
		return o, err
	}
	defer os.RemoveAll(dir)
	edited, overlay := filepath.Join(dir, filepath.Base(path)), filepath.Join(dir, "overlay.json")
	replace, _ := json.Marshal(map[string]map[string]string{"Replace": {path: edited}})
	if err := errors.Join(os.WriteFile(edited, m.apply(), 0o666), os.WriteFile(overlay, replace, 0o666)); err != nil {
		return o, err
	}

	for i, s := range m.pkg.stages() {
		bin, err := r.build(ctx, s.Dir, overlay)
		if errors.Is(err, errBuild) && i == 0 {
			o.State = broken
			return o, nil
		} else if err != nil {
			return o, err
		}
		o.Tests = append(o.Tests, s.String())
		o.By, err = r.find(ctx, bin, s, quick)
		os.Remove(bin)
		switch {
		case err != nil:
			return o, err
		case o.By == timedOut:
			o.State = timedout
		case o.By != "":
			o.State = killed
		case quick:
			o.State = slow
		default:
			continue
		}
		return o, nil
	}
	o.State = survived
	return o, nil
}
