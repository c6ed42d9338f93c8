package main

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/hasplock/hasp/internal/redistest"
)

// patience is how long a test waits for what must happen at last.
const patience = time.Minute

// role is the environment variable that makes the test binary another
// program: hasp itself, or a helper of a test.
const role = "HASP_TEST_ROLE"

// roles are the programs that the test binary can be.
var roles = map[string]func(args []string) int{
	"hasp": func([]string) int { main(); return 0 },
}

func TestMain(m *testing.M) {
	if f := roles[os.Getenv(role)]; f != nil {
		os.Exit(f(os.Args[1:]))
	}
	// Whoever started the tests in the background may have had them ignore
	// this. What is caught here is at its default in the programs they start.
	for _, sig := range []os.Signal{syscall.SIGINT, syscall.SIGQUIT, syscall.SIGHUP} {
		if signal.Ignored(sig) {
			signal.Notify(make(chan os.Signal, 1), sig)
		}
	}
	os.Exit(redistest.Main(m))
}

// store is the URL of an empty store of this test.
func store(t *testing.T) string {
	t.Helper()
	return "filelock://" + t.TempDir()
}

// self returns the test binary in a role, on the store at url.
func self(ctx context.Context, t *testing.T, as, url string, args ...string) *exec.Cmd {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(ctx, exe, args...)
	// A program under the race detector sleeps for a second before it exits.
	cmd.Env = append(withoutURL(), role+"="+as, "GORACE="+os.Getenv("GORACE")+" atexit_sleep_ms=0")
	if url != "" {
		cmd.Env = append(cmd.Env, "HASP_URL="+url)
	}
	cmd.WaitDelay = patience
	apart(cmd)
	return cmd
}

// withoutURL is the environment without HASP_URL.
func withoutURL() []string {
	return slices.DeleteFunc(os.Environ(), func(s string) bool { return strings.HasPrefix(s, "HASP_URL=") })
}

// outcome is how a program ended.
type outcome struct {
	code     int
	out, err string
}

// runHasp runs hasp to its end.
func runHasp(t *testing.T, url string, args ...string) outcome {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*patience)
	defer cancel()
	cmd := self(ctx, t, "hasp", url, args...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); ctx.Err() != nil {
		t.Fatalf("hasp %q does not end: %v\n%s%s", args, err, out.String(), errs.String())
	}
	return outcome{cmd.ProcessState.ExitCode(), out.String(), errs.String()}
}

// want checks the exit code.
func (o outcome) want(t *testing.T, code int) outcome {
	t.Helper()
	if o.code != code {
		t.Fatalf("exit code %d, want %d\nstdout: %s\nstderr: %s", o.code, code, o.out, o.err)
	}
	return o
}

// contains checks a text.
func contains(t *testing.T, text, want string) {
	t.Helper()
	if !strings.Contains(text, want) {
		t.Errorf("%q is not in:\n%s", want, text)
	}
}

// running is a program that runs while the test does.
type running struct {
	t   *testing.T
	cmd *exec.Cmd
	in  io.WriteCloser
	out *stream // ends when the last process that inherited it has
	err *stream
}

// startHasp starts hasp.
func startHasp(t *testing.T, url string, args ...string) *running {
	t.Helper()
	return start(t, self(t.Context(), t, "hasp", url, args...))
}

// start starts a program, which is killed at the end of the test.
func start(t *testing.T, cmd *exec.Cmd) *running {
	t.Helper()
	return startWith(t, cmd, nil, nil)
}

// startWith starts a program with some of its output somewhere else.
func startWith(t *testing.T, cmd *exec.Cmd, stdout, stderr *os.File) *running {
	t.Helper()
	p := &running{t: t, cmd: cmd}
	p.out, cmd.Stdout = output(t, stdout)
	p.err, cmd.Stderr = output(t, stderr)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.in = in
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	cmd.Stdout.(io.Closer).Close()
	cmd.Stderr.(io.Closer).Close()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return p
}

// output returns f and what will not be read of it, or a pipe and what is
// read of that.
func output(t *testing.T, f *os.File) (*stream, *os.File) {
	t.Helper()
	if f != nil {
		return &stream{t: t, ended: true}, f
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	return listen(t, r), w
}

// wait waits for the end and returns how it came.
func (p *running) wait() outcome {
	p.t.Helper()
	ended := make(chan struct{})
	go func() {
		_ = p.cmd.Wait()
		close(ended)
	}()
	select {
	case <-ended:
	case <-time.After(patience):
		p.t.Fatalf("%q does not end\nstdout: %s\nstderr: %s", p.cmd.Args[1:], p.out, p.err)
	}
	p.out.end()
	p.err.end()
	return outcome{p.cmd.ProcessState.ExitCode(), p.out.String(), p.err.String()}
}

// stream is what a program writes, as it comes.
type stream struct {
	t       *testing.T
	mu      sync.Mutex // guards all below
	text    strings.Builder
	ended   bool
	changed chan struct{} // closed and replaced with each change
}

// listen reads r until it ends.
func listen(t *testing.T, r io.ReadCloser) *stream {
	s := &stream{t: t, changed: make(chan struct{})}
	t.Cleanup(func() { r.Close() })
	go func() {
		in := bufio.NewReader(r)
		for {
			b, err := in.ReadByte()
			s.mu.Lock()
			if err != nil {
				s.ended = true
			} else {
				s.text.WriteByte(b)
			}
			close(s.changed)
			s.changed = make(chan struct{})
			s.mu.Unlock()
			if err != nil {
				return
			}
		}
	}()
	return s
}

// await waits until ok says so of what was written, or that it has ended.
func (s *stream) await(what string, ok func(text string, ended bool) bool) {
	s.t.Helper()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	for {
		s.mu.Lock()
		text, ended, changed := s.text.String(), s.ended, s.changed
		s.mu.Unlock()
		switch {
		case ok(text, ended):
			return
		case ended:
			s.t.Fatalf("%s: has not come before the end of:\n%s", what, text)
		}
		select {
		case <-changed:
		case <-timer.C:
			s.t.Fatalf("%s: has not come in %v; so far:\n%s", what, patience, text)
		}
	}
}

// expect waits for a text.
func (s *stream) expect(want string) {
	s.t.Helper()
	s.await(want, func(text string, _ bool) bool { return strings.Contains(text, want) })
}

// end waits until nobody is left who could write.
func (s *stream) end() {
	s.t.Helper()
	s.await("the end", func(_ string, ended bool) bool { return ended })
}

func (s *stream) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.String()
}
