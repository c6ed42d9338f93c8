//go:build unix

// Package pgtest starts PostgreSQL servers and PgBouncers for tests. Each server is a process on a
// free port of the loopback interface, with its files in a directory of its own. PostgreSQL must be
// installed.
package pgtest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/crew"
)

const host = "127.0.0.1"

// Server is a PostgreSQL or a PgBouncer. Its user postgres needs no password.
type Server struct {
	Addr     string // host:port
	Database string // the database that Where, URL, Rows and Exec use

	dir     string          // contains all files of the server
	program string          // postgres or pgbouncer
	options []string        // settings of postgres, as given to Start or Replica
	cmd     *exec.Cmd       // nil while the server is stopped
	ended   <-chan struct{} // closed when cmd has ended
}

// Start starts a server. The end of the test stops it. Options are settings of postgres, such as
// "max_connections=20". If no PostgreSQL is installed, the test is skipped, or fails if the
// variable HASP_TEST_POSTGRES is "required".
func Start(t testing.TB, options ...string) *Server {
	t.Helper()
	Need(t)
	s, err := New(options...)
	return endsWith(t, s, err)
}

// shared is the server that Shared returns. It runs as long as a test uses it.
var shared struct {
	mu    sync.Mutex // guards the fields below
	s     *Server
	tests int
}

// Shared creates a new database on a server that other tests use as well, because the start of a
// server takes seconds of processor time. The settings are those of the database, such as
// "lock_timeout = 100".
func Shared(t testing.TB, settings ...string) *Server {
	t.Helper()
	Need(t)
	shared.mu.Lock()
	defer shared.mu.Unlock()
	if shared.tests == 0 {
		s, err := New("max_connections=1000")
		await.Must(t, err)
		shared.s = s
	}

	shared.tests++
	t.Cleanup(func() {
		shared.mu.Lock()
		defer shared.mu.Unlock()
		if shared.tests--; shared.tests == 0 {
			shared.s.Remove()
		}
	})

	own := *shared.s
	own.Database = "t" + strings.ToLower(rand.Text())
	shared.s.Must(t, "CREATE DATABASE "+own.Database)

	for _, set := range settings {
		shared.s.Must(t, "ALTER DATABASE "+own.Database+" SET "+set)
	}

	return &own
}

func endsWith(t testing.TB, s *Server, err error) *Server {
	t.Helper()
	await.Must(t, err)
	t.Cleanup(s.Remove)
	return s
}

// If PostgreSQL or one of the other programs is not installed, Need skips or fails the test as
// Start does.
func Need(t testing.TB, programs ...string) {
	t.Helper()
	for _, name := range append(programs, "initdb") {
		if _, err := find(name); err != nil {
			if os.Getenv("HASP_TEST_POSTGRES") == "required" {
				t.Fatal(err)
			}
			t.Skip("not installed: ", err)
		}
	}
}

// Installed reports whether PostgreSQL is installed.
func Installed() bool {
	_, err := find("initdb")
	return err == nil
}

// New does the same as Start, but without a test. The caller must call Remove.
func New(options ...string) (*Server, error) { return start("postgres", options, (*Server).init) }

// Replica starts a replica of s. The end of the test stops it.
func (s *Server) Replica(t testing.TB, options ...string) *Server {
	t.Helper()
	r, err := start("postgres", slices.Concat(s.options, options), func(r *Server) error {
		return r.run("pg_basebackup", "-h", host, "-p", s.port(), "-U", "postgres", "-D", r.data(),
			"-R", "--checkpoint=fast", "--no-sync")
	})
	return endsWith(t, r, err)
}

func start(program string, options []string, files func(*Server) error) (s *Server, err error) {
	s = &Server{Database: "postgres", program: program, options: options}
	if err = s.place(); err == nil {
		err = files(s)
	}
	if err == nil {
		err = s.Start()
	}
	if err != nil {
		s.Remove()
		return nil, err
	}

	return s, nil
}

// place chooses a free port and creates a directory that the server may use.
func (s *Server) place() (err error) {
	if s.Addr, err = crew.FreeAddr(); err != nil {
		return err
	}
	if s.dir, err = os.MkdirTemp("", "pg"); err != nil { // for a socket, whose path must be short
		return err
	}
	if err := os.Chmod(s.dir, 0o755); err != nil {
		return err
	}
	if c := credential(); c != nil {
		return os.Chown(s.dir, int(c.Uid), int(c.Gid))
	}

	return nil
}

// credential returns a user that is not root, because the servers refuse to run as root.
func credential() *syscall.Credential {
	if os.Getuid() != 0 {
		return nil
	}
	const nobody = 65534
	return &syscall.Credential{Uid: nobody, Gid: nobody}
}

// find returns the path of a program. Debian keeps the programs of PostgreSQL in directories that
// are not on the PATH. The PATH has wrappers of these programs, so find searches the PATH last.
func find(name string) (string, error) {
	for _, dir := range []string{"/usr/lib/postgresql/*/bin/", "/usr/sbin/"} {
		installed, _ := filepath.Glob(dir + name)
		if len(installed) > 0 {
			return slices.Max(installed), nil
		}
	}

	path, err := exec.LookPath(name)
	if err != nil {
		return "", err
	}

	return filepath.EvalSymlinks(path)
}

func (s *Server) command(ctx context.Context, name string, args ...string) *exec.Cmd {
	path, err := find(name)
	if err != nil {
		path = name // the error of the start then names the program
	}
	c := exec.CommandContext(ctx, path, args...)
	c.Dir = s.dir
	c.SysProcAttr = &syscall.SysProcAttr{Credential: credential()}
	return c
}

func (s *Server) run(name string, args ...string) error {
	out, err := s.command(context.Background(), name, args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %w: %s", name, err, out)
	}
	return nil
}

func (s *Server) port() string { _, port, _ := net.SplitHostPort(s.Addr); return port }

func (s *Server) data() string { return filepath.Join(s.dir, "data") }

func (s *Server) init() error {
	return s.run("initdb", "-D", s.data(), "-U", "postgres", "-A", "trust", "--no-sync",
		"-E", "UTF8", "--locale=C")
}

// Empty deletes the data of a stopped server.
func (s *Server) Empty() error { return errors.Join(os.RemoveAll(s.data()), s.init()) }

// File returns the path of one of the server's files, such as pg_hba.conf.
func (s *Server) File(name string) string { return filepath.Join(s.data(), name) }

// Where returns host:port/database.
func (s *Server) Where() string { return s.Addr + "/" + s.Database }

// URL returns the URL of the database.
func (s *Server) URL() string { return "postgres://postgres@" + s.Where() + "?sslmode=disable" }

// Log returns what the server has logged.
func (s *Server) Log() string { b, _ := os.ReadFile(filepath.Join(s.dir, "log")); return string(b) }

func (s *Server) arguments() []string {
	if s.program == "pgbouncer" {
		return []string{s.ini()}
	}
	args := []string{"-D", s.data(), "-p", s.port(), "-k", s.dir}
	options := []string{"listen_addresses=" + host, "max_connections=400", "fsync=off"}
	for _, o := range append(options, s.options...) {
		args = append(args, "-c", o)
	}
	return args
}

// Start starts a stopped server again, at the same address and with its data. It returns when the
// server accepts connections.
func (s *Server) Start() error {
	if s.cmd != nil {
		return nil
	}

	log, err := os.OpenFile(filepath.Join(s.dir, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o666)
	if err != nil {
		return err
	}
	defer log.Close()
	c := s.command(context.Background(), s.program, s.arguments()...)
	c.Stdout = log
	c.Stderr = log
	ended, err := crew.StartServer(c)
	if err != nil {
		return err
	}

	s.cmd = c
	s.ended = ended

	for end := time.Now().Add(time.Minute); time.Now().Before(end); {
		if s.run("pg_isready", "-q", "-h", host, "-p", s.port(), "-t", "5") == nil {
			return nil
		}

		select {
		case <-ended:
			s.cmd = nil
			return fmt.Errorf("%s has ended: %s", s.program, s.Log())
		case <-time.After(20 * time.Millisecond):
		}
	}

	s.Kill()
	return fmt.Errorf("%s takes no connections after a minute: %s", s.program, s.Log())
}

// Stop ends the server as the shutdown of a machine does. No data is lost.
func (s *Server) Stop() error {
	if s.cmd == nil {
		return nil
	}

	s.cmd.Process.Signal(syscall.SIGINT)
	select {
	case <-s.ended:
		s.cmd = nil
		return nil
	case <-time.After(time.Minute):
	}
	s.Kill()
	return fmt.Errorf("%s does not stop: %s", s.program, s.Log())
}

// Kill sends SIGKILL to all processes of the server. Data that they have written survives.
func (s *Server) Kill() {
	if s.cmd == nil {
		return
	}

	// If a child process ends, the first process starts another. To prevent that, stop the first
	// process, and kill it before its children.
	s.cmd.Process.Signal(syscall.SIGSTOP)
	pids := children(s.cmd.Process.Pid)
	s.cmd.Process.Kill()
	<-s.ended
	s.cmd = nil

	for _, pid := range pids {
		syscall.Kill(pid, syscall.SIGKILL)
	}

	end := time.Now().Add(time.Minute)
	for slices.ContainsFunc(pids, lives) && time.Now().Before(end) {
		// A server does not start again while one of these processes lives.
		time.Sleep(time.Millisecond)
	}
}

// Remove ends the server and deletes its files.
func (s *Server) Remove() {
	s.Kill()
	if s.dir != "" {
		os.RemoveAll(s.dir)
	}
}

// Signal sends a signal to one process of the server: the first whose command line contains title,
// such as "walreceiver".
func (s *Server) Signal(title string, sig syscall.Signal) error {
	for _, pid := range children(s.cmd.Process.Pid) {
		line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if strings.Contains(string(line), title) {
			return syscall.Kill(pid, sig)
		}
	}

	return fmt.Errorf("no process %q", title)
}

// SignalAll sends a signal to all processes of the server.
func (s *Server) SignalAll(sig syscall.Signal) error {
	err := s.cmd.Process.Signal(sig)
	for _, pid := range children(s.cmd.Process.Pid) {
		_ = syscall.Kill(pid, sig) // the process may have ended
	}
	return err
}

// children returns the child processes of a process. Without /proc it finds none.
func children(pid int) (pids []int) {
	list, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
	for _, field := range strings.Fields(string(list)) {
		child, _ := strconv.Atoi(field)
		pids = append(pids, child)
	}

	return pids
}

// lives reports whether a process has not ended. A zombie has ended.
func lives(pid int) bool {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	_, state, _ := strings.Cut(string(b), ") ") // skip the number and the name
	return !strings.HasPrefix(state, "Z") && syscall.Kill(pid, 0) == nil
}
