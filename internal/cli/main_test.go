package cli

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redistest"
)

var must = await.Must

// patience is how long a test waits for an event before it fails.
const patience = time.Minute

// If the environment variable role is set, the test binary is another program: hasp itself, or a
// helper of a test.
const role = "HASP_TEST_ROLE"

var roles = map[string]func(args []string) int{
	"hasp": func([]string) int { return Main() },
}

func TestMain(m *testing.M) {
	if f := roles[os.Getenv(role)]; f != nil {
		os.Exit(f(os.Args[1:]))
	}
	// If a shell has started the tests in the background, they may ignore these signals. Catch such
	// signals here, so that programs that the tests start have the default action again.
	for _, sig := range []os.Signal{syscall.SIGINT, syscall.SIGQUIT, syscall.SIGHUP} {
		if signal.Ignored(sig) {
			signal.Notify(make(chan os.Signal, 1), sig)
		}
	}
	os.Exit(redistest.Main(m))
}

func store(t *testing.T) string {
	t.Helper()
	return "filelock://" + t.TempDir()
}

// file writes a file and returns its path.
func file(t *testing.T, name, content string, mode os.FileMode) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	must(t, os.WriteFile(path, []byte(content), mode))
	return path
}

// executable returns the path of the test binary.
func executable(t *testing.T) string { t.Helper(); return await.Value(os.Executable()) }

// apart makes cmd start in a new session, without a terminal. So signals that cmd sends to its
// group do not reach the tests. The tests do not depend on the terminal on which they were started.
var apart = func(cmd *exec.Cmd) {} // on systems without sessions

// self returns a command that runs the test binary in a role. If url is not empty, HASP_URL is url.
func self(t *testing.T, as, url string, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), executable(t), args...)
	env := slices.DeleteFunc(os.Environ(), func(s string) bool { return strings.HasPrefix(s, "HASP_URL=") })
	// Without this setting, a program with the race detector sleeps for a second before it exits.
	cmd.Env = append(env, role+"="+as, "GORACE="+os.Getenv("GORACE")+" atexit_sleep_ms=0")
	if url != "" {
		cmd.Env = append(cmd.Env, "HASP_URL="+url)
	}
	cmd.WaitDelay = patience
	apart(cmd)
	return cmd
}

// inShell returns cmd, changed to run a script of a shell that has cmd's arguments.
func inShell(cmd *exec.Cmd, script string) *exec.Cmd {
	cmd.Args, cmd.Path = slices.Concat([]string{"sh", "-c", script}, cmd.Args), "/bin/sh"
	return cmd
}

// outcome says how a program ended.
type outcome struct {
	code     int
	out, err string
}

// call runs a command line in this process.
func call(args ...string) outcome {
	var out, errs bytes.Buffer
	code := execute(args, strings.NewReader(""), &out, &errs)
	return outcome{code, out.String(), errs.String()}
}

func runHasp(t *testing.T, url string, args ...string) outcome {
	t.Helper()
	return startHasp(t, url, args...).wait()
}

// runs returns the arguments of a hasp run that runs a command under "key" with flags.
func runs(flags []string, command ...string) []string {
	return slices.Concat([]string{"run", "key"}, flags, []string{"--"}, command)
}

// lock runs "true" under "key" with flags, and checks the exit code.
func lock(t *testing.T, url string, code int, flags ...string) {
	t.Helper()
	runHasp(t, url, runs(flags, "true")...).want(t, code)
}

func breakKey(t *testing.T, url string) {
	t.Helper()
	runHasp(t, url, "break", "key", "--force").want(t, 0)
}

func (o outcome) want(t *testing.T, code int) outcome {
	t.Helper()
	if o.code != code {
		t.Fatalf("exit code %d, want %d\nstdout: %s\nstderr: %s", o.code, code, o.out, o.err)
	}
	return o
}

// shows checks that the program succeeded, and that its standard output contains all of wants.
func (o outcome) shows(t *testing.T, wants ...string) {
	t.Helper()
	contains(t, o.want(t, 0).out, wants...)
}

// fails checks the exit code, and that the standard error contains all of wants.
func (o outcome) fails(t *testing.T, code int, wants ...string) {
	t.Helper()
	contains(t, o.want(t, code).err, wants...)
}

// prints checks the standard output.
func (o outcome) prints(t *testing.T, out string) {
	t.Helper()
	if o.out != out {
		t.Errorf("stdout %q, want %q\nstderr: %s", o.out, out, o.err)
	}
}

func (o outcome) decode(t *testing.T, v any) {
	t.Helper()
	if err := json.Unmarshal([]byte(o.out), v); err != nil {
		t.Fatalf("%v in:\n%s%s", err, o.out, o.err)
	}
}

// contains checks that text contains all of wants.
func contains(t *testing.T, text string, wants ...string) {
	t.Helper()
	for _, want := range wants {
		if !strings.Contains(text, want) {
			t.Errorf("%q is not in:\n%s", want, text)
		}
	}
}

// running is a program that a test has started.
type running struct {
	t        *testing.T
	cmd      *exec.Cmd
	in       io.WriteCloser
	out, err *stream
	ended    chan struct{} // closed when the program and all processes with its output have ended
}

func startHasp(t *testing.T, url string, args ...string) *running {
	t.Helper()
	return start(t, self(t, "hasp", url, args...))
}

// script starts hasp run with a shell script under "key", and waits until the
// script has printed "ready".
func script(t *testing.T, url, script string, flags ...string) *running {
	t.Helper()
	p := startHasp(t, url, runs(flags, "sh", "-c", script)...)
	p.out.expect("ready")
	return p
}

// hold starts a hasp run that holds "key" until free.
func hold(t *testing.T, url string, flags ...string) *running {
	t.Helper()
	return script(t, url, "echo ready; cat", flags...)
}

// start starts a program, which is killed at the end of the test. If cmd has no streams yet, the
// test writes the program's input and reads its output.
func start(t *testing.T, cmd *exec.Cmd) *running {
	t.Helper()
	p := &running{t: t, cmd: cmd, out: &stream{t: t}, err: &stream{t: t}, ended: make(chan struct{})}
	if cmd.Stdin == nil {
		p.in = await.Value(cmd.StdinPipe())
	}
	if cmd.Stdout == nil {
		cmd.Stdout = p.out
	}
	if cmd.Stderr == nil {
		cmd.Stderr = p.err
	}
	must(t, cmd.Start())
	go func() {
		_ = cmd.Wait()
		p.out.end()
		p.err.end()
		close(p.ended)
	}()
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	return p
}

func (p *running) signal(sig os.Signal) { p.t.Helper(); must(p.t, p.cmd.Process.Signal(sig)) }

// free ends a program that hold has started.
func (p *running) free() outcome {
	p.t.Helper()
	p.in.Close()
	return p.wait()
}

// wait waits until the program and its output have ended.
func (p *running) wait() outcome { p.t.Helper(); return p.within(5 * patience) }

func (p *running) within(limit time.Duration) outcome {
	p.t.Helper()
	select {
	case <-p.ended:
	case <-time.After(limit):
		p.t.Fatalf("%q does not end\nstdout: %s\nstderr: %s", p.cmd.Args[1:], p.out, p.err)
	}
	return outcome{p.cmd.ProcessState.ExitCode(), p.out.String(), p.err.String()}
}

type stream struct {
	t     *testing.T
	mu    sync.Mutex // guards the fields below
	text  strings.Builder
	ended bool
}

// listen returns a stream of what it reads from r in the background.
func listen(t *testing.T, r io.ReadCloser) *stream {
	s := &stream{t: t}
	t.Cleanup(func() { r.Close() })
	go func() { _, _ = io.Copy(s, r); s.end() }()
	return s
}

// pipe returns the write end of a pipe, and a stream of what is written there. The stream ends when
// no process has the write end open.
func pipe(t *testing.T) (*stream, *os.File) {
	t.Helper()
	r, w, err := os.Pipe()
	must(t, err)
	return listen(t, r), w
}

// Write adds output.
func (s *stream) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.Write(b)
}

func (s *stream) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
}

// await waits until ok returns true. If the output ends before, the test fails.
func (s *stream) await(what string, ok func(text string, ended bool) bool) {
	s.t.Helper()
	await.Success(s.t, what, func() error {
		s.mu.Lock()
		text, ended := s.text.String(), s.ended
		s.mu.Unlock()
		if ok(text, ended) {
			return nil
		} else if ended {
			s.t.Fatalf("%s: missing in:\n%s", what, text)
		}
		return errors.New("so far:\n" + text)
	})
}

// expect waits until the output contains want.
func (s *stream) expect(want string) {
	s.t.Helper()
	s.await(want, func(text string, _ bool) bool { return strings.Contains(text, want) })
}

// times waits until the output contains want n times.
func (s *stream) times(n int, want string) {
	s.t.Helper()
	s.await(want, func(text string, _ bool) bool { return strings.Count(text, want) == n })
}

func (s *stream) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.String()
}
