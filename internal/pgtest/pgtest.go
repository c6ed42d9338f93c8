//go:build unix

// Package pgtest starts PostgreSQL servers for tests. It needs a PostgreSQL that is
// installed.
package pgtest

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// Server is a PostgreSQL server with a directory of its own.
type Server struct {
	Addr string // host:port; the user is hasp, without a password, and the database postgres

	bin, data string
	attr      *syscall.SysProcAttr
	cmd       *exec.Cmd // nil while the server is stopped
}

// programs returns the directory of PostgreSQL's programs.
func programs() (string, error) {
	initdb, err := exec.LookPath("initdb")
	if installed, _ := filepath.Glob("/usr/lib/postgresql/*/bin/initdb"); err != nil && len(installed) > 0 {
		initdb, err = installed[0], nil // Debian does not put it on the PATH
	}
	if err == nil {
		initdb, err = filepath.EvalSymlinks(initdb)
	}
	return filepath.Dir(initdb), err
}

// Start starts a server that ends with the test. Options are options of postgres, such as
// "max_connections=20". The test is skipped if no PostgreSQL is installed, unless the
// variable HASP_TEST_POSTGRES is "required".
func Start(t testing.TB, options ...string) *Server {
	t.Helper()
	s, err := start(t, options)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func start(t testing.TB, options []string) (*Server, error) {
	bin, err := programs()
	if err != nil {
		if os.Getenv("HASP_TEST_POSTGRES") == "required" {
			return nil, err
		}
		t.Skip("no PostgreSQL is installed: ", err)
	}
	dir, err := os.MkdirTemp("", "hasp-pg") // short, for the path of the socket
	if err != nil {
		return nil, err
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	s := &Server{bin: bin, data: filepath.Join(dir, "data"), attr: &syscall.SysProcAttr{}}

	// PostgreSQL refuses to run as root.
	if os.Getuid() == 0 {
		const nobody = 65534
		if err := os.Chown(dir, nobody, nobody); err != nil {
			return nil, err
		}
		s.attr.Credential = &syscall.Credential{Uid: nobody, Gid: nobody}
	}
	if out, err := s.command("initdb", "-D", s.data, "-U", "hasp", "-A", "trust", "--no-sync").CombinedOutput(); err != nil {
		return nil, fmt.Errorf("initdb: %w\n%s", err, out)
	}
	config := "listen_addresses = '127.0.0.1'\nunix_socket_directories = '" + dir + "'\nfsync = off\n"
	for _, o := range options {
		name, value, _ := strings.Cut(o, "=")
		config += name + " = '" + value + "'\n"
	}
	if err := os.WriteFile(filepath.Join(s.data, "postgresql.auto.conf"), []byte(config), 0o644); err != nil {
		return nil, err
	}
	t.Cleanup(func() { s.Stop() })
	for range 5 { // another program may take the port
		if err = s.pickPort(); err == nil {
			if err = s.Start(); err == nil {
				return s, nil
			}
		}
	}
	return nil, err
}

func (s *Server) command(name string, args ...string) *exec.Cmd {
	cmd := exec.Command(filepath.Join(s.bin, name), args...)
	cmd.SysProcAttr, cmd.Dir = s.attr, filepath.Dir(s.data)
	return cmd
}

// pickPort finds a port that is free.
func (s *Server) pickPort() error {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	s.Addr = l.Addr().String()
	return l.Close()
}

// Start starts a server that was stopped, at the same address and with its data. It returns
// when the server takes connections.
func (s *Server) Start() error {
	if s.cmd != nil {
		return nil
	}
	_, port, _ := net.SplitHostPort(s.Addr)
	cmd := s.command("postgres", "-D", s.data, "-p", port)
	log := new(strings.Builder)
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	s.cmd = cmd
	for range 600 {
		ready := s.command("pg_isready", "-q", "-h", "127.0.0.1", "-p", port, "-t", "1").Run() == nil
		select {
		case err := <-ended:
			s.cmd = nil
			return fmt.Errorf("postgres ended: %w\n%s", err, log)
		default:
			if ready {
				return nil
			}
			time.Sleep(100 * time.Millisecond)
		}
	}
	return errors.New("postgres does not take connections after a minute")
}

// Stop ends the server at once, as a crash does.
func (s *Server) Stop() error {
	if s.cmd == nil {
		return nil
	}
	out, err := s.command("pg_ctl", "-D", s.data, "-m", "immediate", "-w", "stop").CombinedOutput()
	s.cmd = nil
	if err != nil {
		return fmt.Errorf("pg_ctl stop: %w: %s", err, out)
	}
	return nil
}
