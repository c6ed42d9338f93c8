//go:build unix

// Package pgtest starts PostgreSQL servers and PgBouncers for tests. Each is a process on a
// free port of the loopback interface, with its files in a directory of its own.
package pgtest

import (
	"context"
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

	"github.com/jackc/pgx/v5"
)

// find returns the path of a program of PostgreSQL, which Debian does not put on the PATH.
func find(name string) (string, error) {
	installed, _ := filepath.Glob("/usr/lib/postgresql/*/bin/" + name)
	if len(installed) > 0 {
		slices.Sort(installed)
		return installed[len(installed)-1], nil
	}
	path, err := exec.LookPath(name)
	if err != nil {
		return "", fmt.Errorf("no PostgreSQL is installed: %w", err)
	}
	return filepath.EvalSymlinks(path)
}

// Need skips the test if no PostgreSQL is installed, unless HASP_TEST_POSTGRES=required.
func Need(t testing.TB, programs ...string) {
	t.Helper()
	for _, name := range append(programs, "initdb", "postgres", "pg_basebackup") {
		path, err := find(name)
		if name == "pgbouncer" {
			path, err = bouncerPath()
		}
		switch {
		case err == nil && path != "":
		case os.Getenv("HASP_TEST_POSTGRES") == "required":
			t.Fatalf("HASP_TEST_POSTGRES=required, but %s is missing: %v", name, err)
		default:
			t.Skipf("%s is not installed: %v", name, err)
		}
	}
}

// Server is a PostgreSQL.
type Server struct {
	Addr string // host:port

	dir  string // for all of its files
	opts []string
	mu   sync.Mutex
	cmd  *exec.Cmd
	done chan struct{} // closed when cmd has ended
}

// New makes a server that runs, and that ends with the test. Opts are settings, such as
// "max_connections=20".
func New(t testing.TB, opts ...string) *Server {
	t.Helper()
	Need(t)
	s, err := Start(context.Background(), opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Remove)
	return s
}

// Start is New without a test. The caller calls Remove.
func Start(ctx context.Context, opts ...string) (*Server, error) {
	s, err := empty(opts)
	if err != nil {
		return nil, err
	}
	if err = s.init(); err == nil {
		err = s.Run(ctx)
	}
	if err != nil {
		s.Remove()
		return nil, err
	}
	return s, nil
}

// Replica makes a server that follows s, and that ends with the test.
func (s *Server) Replica(t testing.TB, opts ...string) *Server {
	t.Helper()
	r, err := empty(append(slices.Clone(s.opts), opts...))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Remove)
	_, port, _ := net.SplitHostPort(s.Addr)
	out, err := command(r.dir, "pg_basebackup", "-h", "127.0.0.1", "-p", port, "-U", "postgres", "-D", r.data(),
		"-R", "--checkpoint=fast", "--no-sync").CombinedOutput()
	if err != nil {
		t.Fatalf("pg_basebackup: %v: %s", err, out)
	}
	if err := r.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	return r
}

func empty(opts []string) (*Server, error) {
	dir, err := directory()
	if err != nil {
		return nil, err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	defer l.Close()
	return &Server{Addr: l.Addr().String(), dir: dir, opts: opts}, nil
}

// directory makes a directory that the servers may use.
func directory() (string, error) {
	dir, err := os.MkdirTemp("", "pg") // a short path, for the socket
	if err == nil {
		err = os.Chmod(dir, 0o755)
	}
	if c := credential(); err == nil && c != nil {
		err = os.Chown(dir, int(c.Uid), int(c.Gid))
	}
	return dir, err
}

// credential is the user of the servers, which refuse to run as root.
func credential() *syscall.Credential {
	if os.Getuid() != 0 {
		return nil
	}
	const nobody = 65534
	return &syscall.Credential{Uid: nobody, Gid: nobody}
}

func command(dir, name string, args ...string) *exec.Cmd {
	path, err := find(name)
	if err != nil {
		path = name // fails with a clear error
	}
	c := exec.Command(path, args...)
	c.Dir = dir
	c.SysProcAttr = &syscall.SysProcAttr{Credential: credential()}
	return c
}

func (s *Server) data() string { return filepath.Join(s.dir, "data") }

func (s *Server) init() error {
	out, err := command(s.dir, "initdb", "-D", s.data(), "-U", "postgres", "-A", "trust", "--no-sync", "-E", "UTF8", "--locale=C").CombinedOutput()
	if err != nil {
		return fmt.Errorf("initdb: %w: %s", err, out)
	}
	return nil
}

// Empty throws the data of a stopped server away.
func (s *Server) Empty() error {
	return errors.Join(os.RemoveAll(s.data()), s.init())
}

// File returns the path of one of the server's files, such as pg_hba.conf.
func (s *Server) File(name string) string { return filepath.Join(s.data(), name) }

// Run starts the server and waits until it answers.
func (s *Server) Run(ctx context.Context) error {
	_, port, _ := net.SplitHostPort(s.Addr)
	args := []string{"-D", s.data(), "-p", port, "-k", s.dir, "-c", "listen_addresses=127.0.0.1", "-c", "max_connections=400", "-c", "fsync=off"}
	for _, o := range s.opts {
		args = append(args, "-c", o)
	}
	log, err := os.OpenFile(filepath.Join(s.dir, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o666)
	if err != nil {
		return err
	}
	defer log.Close()
	c := command(s.dir, "postgres", args...)
	c.Stdout, c.Stderr = log, log
	if err := c.Start(); err != nil {
		return err
	}
	done := make(chan struct{})
	go func() { c.Wait(); close(done) }()
	s.mu.Lock()
	s.cmd, s.done = c, done
	s.mu.Unlock()

	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		conn, err := pgx.Connect(ctx, s.URL("postgres"))
		if err == nil {
			return conn.Close(ctx)
		}
		select {
		case <-done:
			return fmt.Errorf("postgres has ended: %s", s.Log())
		case <-ctx.Done():
			return fmt.Errorf("postgres does not answer: %w: %s", err, s.Log())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// Log returns what the server has logged.
func (s *Server) Log() string {
	b, _ := os.ReadFile(filepath.Join(s.dir, "log"))
	return string(b)
}

// Stop ends the server: SIGINT is a fast shutdown, SIGQUIT an immediate one. SIGKILL kills
// all of its processes, like a crash of the machine.
func (s *Server) Stop(sig syscall.Signal) {
	s.mu.Lock()
	c, done := s.cmd, s.done
	s.cmd = nil
	s.mu.Unlock()
	if c == nil {
		return
	}
	if sig == syscall.SIGKILL {
		for _, pid := range children(c.Process.Pid) {
			syscall.Kill(pid, sig)
		}
	}
	c.Process.Signal(sig)
	<-done
}

// Signal sends a signal to a process of the server whose title contains a text, such as
// "walreceiver".
func (s *Server) Signal(title string, sig syscall.Signal) error {
	s.mu.Lock()
	c := s.cmd
	s.mu.Unlock()
	for _, pid := range children(c.Process.Pid) {
		line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if strings.Contains(string(line), title) {
			return syscall.Kill(pid, sig)
		}
	}
	return fmt.Errorf("no process %q", title)
}

// children returns the processes that a process has started, by /proc or else by pgrep.
func children(pid int) (pids []int) {
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, path := range stats {
		b, _ := os.ReadFile(path)
		_, rest, _ := strings.Cut(string(b), ") ") // after the name
		if f := strings.Fields(rest); len(f) > 1 && f[1] == strconv.Itoa(pid) {
			n, _ := strconv.Atoi(filepath.Base(filepath.Dir(path)))
			pids = append(pids, n)
		}
	}
	if len(stats) == 0 {
		out, _ := exec.Command("pgrep", "-P", strconv.Itoa(pid)).Output()
		for f := range strings.FieldsSeq(string(out)) {
			n, _ := strconv.Atoi(f)
			pids = append(pids, n)
		}
	}
	return pids
}

// Remove ends the server and deletes its files.
func (s *Server) Remove() {
	s.Stop(syscall.SIGQUIT)
	os.RemoveAll(s.dir)
}

// URL is the URL of a database, as libpq takes it.
func (s *Server) URL(database string) string {
	return "postgres://postgres@" + s.Addr + "/" + database + "?sslmode=disable"
}

// Exec runs statements as the superuser.
func (s *Server) Exec(ctx context.Context, sql string) error {
	c, err := pgx.Connect(ctx, s.URL("postgres"))
	if err != nil {
		return err
	}
	defer c.Close(ctx)
	_, err = c.Exec(ctx, sql, pgx.QueryExecModeSimpleProtocol)
	return err
}

// Must is Exec for a test.
func (s *Server) Must(t testing.TB, sql string) {
	t.Helper()
	if err := s.Exec(context.Background(), sql); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

// Rows returns the first column of a query.
func (s *Server) Rows(ctx context.Context, sql string) ([]string, error) {
	c, err := pgx.Connect(ctx, s.URL("postgres"))
	if err != nil {
		return nil, err
	}
	defer c.Close(ctx)
	rows, err := c.Query(ctx, sql)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

// Kick ends the connections of all clients.
func (s *Server) Kick(ctx context.Context) error {
	return s.Exec(ctx, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()")
}
