//go:build unix

package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"
)

// A stage is some tests of one package, on one kind of Redis.
type stage struct{ Dir, Run, Skip, Redis string }

func (s stage) String() string {
	return fmt.Sprintf("HASP_TEST_REDIS=%s go test -run '%s' -skip '%s' ./%s", s.Redis, s.Run, s.Skip, s.Dir)
}

// stages returns the tests that should find a bug in a package, its own first.
func (p pkg) stages() []stage {
	if dir, names, ok := strings.Cut(*tests, " "); ok {
		return []stage{{dir, names, "", "process"}}
	}
	s := []stage{{p.dir, "", "Conformance", "process"}}
	if *own {
		return s
	}
	s = append(s, p.more...)
	if p.dir != "filelock" {
		s = append(s, stage{"internal/simulate", "", "", "inprocess"})
	}
	return s
}

// A runner builds and tests mutants.
type runner struct {
	root      string
	dir       string             // for what it builds
	keep      func(record) error // appends to the file of results
	baselines map[stage]baseline // how each stage runs without a bug
}

type baseline struct {
	Takes time.Duration
	Quick string // matches the quickest tests, which take a tenth of the time
}

// measure runs a stage without a bug, unless that was done before.
func (r *runner) measure(ctx context.Context, s stage) error {
	if _, ok := r.baselines[s]; ok {
		return nil
	}
	bin, err := r.build(ctx, s.Dir, "")
	if err != nil {
		return err
	}
	defer os.Remove(bin)
	for tries := 1; ; tries++ {
		began := time.Now()
		ran, err := r.test(ctx, bin, s, 20*time.Minute)
		if err != nil {
			return err
		}
		if ran.failed == "" {
			b := baseline{Takes: time.Since(began), Quick: ran.quick()}
			r.baselines[s] = b
			return r.keep(record{Stage: &s, Baseline: &b})
		}
		fmt.Printf("fails without a bug: %v: %s\n", s, ran.failed)
		if tries == 3 {
			return errors.New("a test fails without a bug, which finds none")
		}
	}
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
	cmd := exec.CommandContext(ctx, "go", "test", "-c", "-vet=off", "-ldflags=-s -w", "-overlay="+overlay, "-o", f.Name(), "./"+dir)
	cmd.Dir = r.root
	if out, err := cmd.CombinedOutput(); err != nil {
		os.Remove(f.Name())
		return "", fmt.Errorf("%w: %s", errBuild, out)
	}
	return f.Name(), nil
}

// find runs the tests of a stage, or its quick tests, and returns what finds a
// mutant, or an empty string. The quick tests use a server in the process. Tests
// that fail once, and not again, fail now and then; the others are run without
// them. Tests that time out are given twice the time, since the machine may have
// become busier.
func (r *runner) find(ctx context.Context, bin string, s stage, quick bool) (string, error) {
	b := r.baselines[s]
	limit := 3*b.Takes + 20*time.Second
	parts := []stage{s}
	if b.Quick != "" && *tests == "" {
		parts = []stage{{s.Dir, b.Quick, s.Skip, "inprocess"}, s}
	}
	if quick {
		parts = parts[:1]
	}
	for _, part := range parts {
		for tries := 1; ; tries++ {
			ran, err := r.test(ctx, bin, part, limit)
			if err != nil {
				return "", err
			}
			if ran.failed == "" {
				break
			}
			again := part
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
			if again == part {
				break
			}
			part.Skip = strings.TrimPrefix(part.Skip+"|"+again.Run, "|")
		}
	}
	return "", nil
}

// What some tests have done: the first that failed, and how long each took.
type result struct {
	failed string
	took   map[string]time.Duration
}

// timedOut is in the place of a test for tests that had to be stopped.
const timedOut = "time-out"

var (
	failure = regexp.MustCompile(`^\s*--- FAIL: (\S+)|^(panic: .*)|^(fatal error: .*)`)
	passed  = regexp.MustCompile(`^--- PASS: (\S+) \((.+)\)`)
)

// quick returns a regular expression for the quickest tests.
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
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	// A bug may allocate without end. The limit is of address space, in KiB.
	cmd := exec.CommandContext(ctx, "sh", "-c", `ulimit -v 16000000 && exec "$0" "$@"`,
		bin, "-test.v", "-test.failfast", "-test.timeout=0", "-test.run", s.Run, "-test.skip", s.Skip)
	cmd.Dir = filepath.Join(r.root, s.Dir)
	cmd.Env = append(os.Environ(), "HASP_TEST_REDIS="+s.Redis)
	// Tests start processes, which end with the tests.
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
	if err != nil {
		return result{}, err
	}

	// A process that outlives the tests keeps the pipe open, so the end of the
	// tests ends the reading.
	read := make(chan result, 1)
	go func() {
		res := result{took: map[string]time.Duration{}}
		for lines := bufio.NewReader(out); ; {
			line, err := lines.ReadString('\n')
			if m := passed.FindStringSubmatch(line); m != nil {
				res.took[m[1]], _ = time.ParseDuration(m[2])
			}
			if m := failure.FindStringSubmatch(line); m != nil && res.failed == "" {
				res.failed = m[1] + m[2] + m[3]
				cmd.Cancel()
			}
			if err != nil {
				read <- res
				return
			}
		}
	}()
	err = cmd.Wait()
	cmd.Cancel()
	out.SetReadDeadline(time.Now().Add(time.Second))
	res := <-read
	if res.failed == "" && ctx.Err() != nil {
		res.failed = timedOut
	} else if res.failed == "" && err != nil {
		res.failed = err.Error()
	}
	return res, nil
}

// try runs the stages of m, or the quick tests of the first, until one finds it.
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
			o.State = "build"
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
			o.State = "timeout"
			return o, nil
		case o.By != "":
			o.State = "test"
			return o, nil
		case quick:
			o.State = "slow"
			return o, nil
		}
	}
	o.State = "survived"
	return o, nil
}
