package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/crew"
	"github.com/hasplock/hasp/internal/kubetest"
	"github.com/hasplock/hasp/internal/redistest"
)

// caslocks has the strategies of package caslock.
var caslocks = map[string]func(s *store){
	"nats":   (*store).openNATS,
	"s3":     (*store).openS3,
	"mysql":  (*store).openMariaDB,
	"sqlite": (*store).openSQLite,
	"kube":   (*store).openKubernetes,
}

// server is the only server of a store. Its methods return when it serves, or has ended.
type server interface {
	Start(ctx context.Context, data bool) error // if data is false, the server has lost its data
	Stop()                                      // as a crash does
}

// openOne starts a server, and opens the links of the clients to its address.
func (s *store) openOne(what string, srv server, addr string, url func(addr string) string) {
	s.Check(srv.Start(context.Background(), false))
	s.Cleanup(srv.Stop)
	s.what = what
	s.addrs = []string{addr}
	s.left = s.held(url(addr))
	s.openWays(func(addrs []string) string { return url(addrs[0]) })

	start := func(data bool) step {
		return func(*run, int) { s.Check(srv.Start(context.Background(), data)) }
	}
	stop := func(*run, int) { srv.Stop() }
	s.faults.processes()
	s.faults.links()
	add := func(name string, takes loss, fail, heal step) {
		s.faults.add("the server: "+name, 0.2, 2, takes, onServers(1, fail, heal))
	}
	add("killed, and started again", nothing, stop, start(true))
	add("restarted without data", locks, stop, start(false))
	if p, ok := srv.(*process); ok {
		add("stopped", nothing, p.signal(syscall.SIGSTOP), p.signal(syscall.SIGCONT))
	}
}

// held returns a function that lists the keys that are held. The records of free keys stay for a
// while, until the sweep removes them.
func (s *store) held(url string) func(context.Context) []string {
	return func(ctx context.Context) (all []string) {
		c, err := hasp.Open(ctx, url, nil)
		s.Check(err)
		defer c.Close()
		for e, err := range c.List(ctx, "") {
			s.Check(err)
			all = append(all, "key "+e.Key)
		}
		return all
	}
}

// process is a server that is one process, with its data in a directory.
type process struct {
	*redistest.Lab
	addr    string // host:port
	dir     string
	prepare func(dir string) error // makes the first data
	command func(dir, port string) *exec.Cmd

	cmd   *exec.Cmd // nil if the process does not run
	ended <-chan struct{}
}

func newProcess(l *redistest.Lab, prepare func(dir string) error,
	command func(dir, port string) *exec.Cmd) *process {
	dir := tempDir(l)
	addr, err := crew.FreeAddr()
	l.Check(err)
	return &process{Lab: l, addr: addr, dir: filepath.Join(dir, "data"), prepare: prepare,
		command: command}
}

func (p *process) Start(ctx context.Context, data bool) error {
	if !data {
		err := errors.Join(os.RemoveAll(p.dir), os.Mkdir(p.dir, 0o700), p.prepare(p.dir))
		if err != nil {
			return err
		}
	}

	_, port, _ := net.SplitHostPort(p.addr)
	p.cmd = p.command(p.dir, port)
	var err error
	if p.ended, err = crew.StartServer(p.cmd); err != nil {
		return err
	}
	for ctx.Err() == nil {
		conn, err := net.Dial("tcp", p.addr)
		if err == nil {
			return conn.Close()
		}
		select {
		case <-p.ended:
			return fmt.Errorf("%s has ended: %w", p.cmd.Path, err)
		case <-time.After(20 * time.Millisecond):
		}
	}
	return ctx.Err()
}

func (p *process) Stop() {
	if p.cmd != nil {
		_ = p.cmd.Process.Kill()
		<-p.ended
		p.cmd = nil
	}
}

// signal returns a step that sends a signal to the process.
func (p *process) signal(sig os.Signal) step {
	return func(*run, int) { p.Check(p.cmd.Process.Signal(sig)) }
}

// tool builds a program that a module names as a tool, and returns its path.
func (s *store) tool(dir, name string) string {
	build := exec.Command("go", "tool", "-n", name)
	build.Dir = dir
	build.Stderr = os.Stderr
	path, err := build.Output()
	s.Check(err)
	return strings.TrimSpace(string(path))
}

func (s *store) openNATS() {
	program := s.tool(".", "nats-server")
	p := newProcess(s.Lab, func(string) error { return nil }, func(dir, port string) *exec.Cmd {
		return exec.Command(program, "-js", "-sd", dir, "-a", "127.0.0.1", "-p", port)
	})
	s.openOne("one NATS server", p, p.addr, func(addr string) string {
		return "nats://" + addr + "/torture"
	})
}

func (s *store) openS3() {
	const user = "torture"
	const secret = "torture-secret"
	s.Check(os.Setenv("AWS_ACCESS_KEY_ID", user)) // for the clients, too
	s.Check(os.Setenv("AWS_SECRET_ACCESS_KEY", secret))

	program := s.tool("../caslock/s3kv/internal/versitygw", "versitygw")
	bucket := func(dir string) error { return os.Mkdir(filepath.Join(dir, "bucket"), 0o700) }
	p := newProcess(s.Lab, bucket, func(dir, port string) *exec.Cmd {
		c := exec.Command(program, "--port", "127.0.0.1:"+port, "--region", "us-east-1", "posix", dir)
		c.Env = append(os.Environ(), "ROOT_ACCESS_KEY="+user, "ROOT_SECRET_KEY="+secret)
		return c
	})
	s.openOne("versitygw", p, p.addr, func(addr string) string {
		return "s3://bucket/torture?region=us-east-1&endpoint=http://" + addr
	})
}

func (s *store) openMariaDB() {
	install := func(dir string) error {
		out, err := exec.Command("mariadb-install-db", "--no-defaults", "--user=root",
			"--datadir="+dir, "--tmpdir="+dir, "--auth-root-authentication-method=normal",
			"--innodb-log-file-size=8M").CombinedOutput()
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	}
	p := newProcess(s.Lab, install, func(dir, port string) *exec.Cmd {
		return exec.Command("mariadbd", "--no-defaults", "--user=root", "--datadir="+dir,
			"--tmpdir="+dir, "--bind-address=127.0.0.1", "--port="+port, "--socket="+dir+"/sock",
			"--innodb-log-file-size=8M", "--max-connections=1000", "--skip-name-resolve")
	})
	s.openOne("one MariaDB", p, p.addr, func(addr string) string {
		return "mysql://root@" + addr + "/test"
	})
}

func (s *store) openSQLite() {
	dir := tempDir(s.Lab)
	url := "sqlite://" + dir + "/locks.db"
	s.what = "a file of SQLite"
	s.urls = slices.Repeat([]string{url}, seats)
	s.left = s.held(url)
	s.faults.processes()
}

func (s *store) openKubernetes() {
	dir := tempDir(s.Lab)
	srv, err := kubetest.New(dir)
	s.Check(err)
	s.Cleanup(srv.End)
	s.openOne("one kube-apiserver", srv, srv.Host, func(addr string) string {
		return srv.URL(addr, "default", srv.TokenFile)
	})
}
