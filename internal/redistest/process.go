package redistest

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"
)

// process is a redis-server of this machine.
type process struct {
	dir  string
	args []string
	cmd  *exec.Cmd
	out  *output
	done chan struct{} // closed when the process has ended
}

func (s *Server) startProcess() error {
	dir, err := os.MkdirTemp("", "redistest")
	if err != nil {
		return err
	}
	s.t.Cleanup(func() { os.RemoveAll(dir) })
	for try := 0; ; try++ {
		p, err := s.process(dir)
		if err != nil {
			return err
		}
		s.flav = p
		s.t.Cleanup(func() { p.kill() })
		if err = s.up(p); err == nil {
			return nil
		}
		// Somebody else took the port between the look and the start.
		if try == 3 || !strings.Contains(p.out.String(), "Address already in use") {
			return err
		}
	}
}

// process makes a process that is not started yet, on a free port.
func (s *Server) process(dir string) (*process, error) {
	port, release, err := freePort()
	if err != nil {
		return nil, err
	}
	s.t.Cleanup(release)
	s.Addr = net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	plain, tls := port, 0
	if s.o.TLS {
		plain, tls = 0, port
	}
	args := []string{"--port", strconv.Itoa(plain), "--bind", "127.0.0.1", "--dir", dir, "--save", "", "--daemonize", "no"}
	if s.o.TLS {
		cert, err := s.certify(dir)
		if err != nil {
			return nil, err
		}
		args = append(args, "--tls-port", strconv.Itoa(tls), "--tls-cert-file", cert.cert, "--tls-key-file", cert.key,
			"--tls-ca-cert-file", cert.ca, "--tls-auth-clients", "no")
	}
	if s.o.Unix {
		s.Addr = filepath.Join(dir, "redis.sock")
		args = append(args, "--unixsocket", s.Addr)
	}
	switch {
	case s.o.User != "":
		args = append(args, "--user", s.o.User, "on", ">"+s.o.Password, "~*", "&*", "+@all", "--user", "default", "off")
	case s.o.Password != "":
		args = append(args, "--requirepass", s.o.Password)
	}
	if s.o.Keep {
		args = append(args, "--appendonly", "yes", "--appendfsync", "always")
	}
	return &process{dir: dir, args: append(args, s.o.Args...)}, nil
}

// up starts p and waits until it answers.
func (s *Server) up(p *process) error {
	if err := p.start(); err != nil {
		return err
	}
	answers := make(chan error, 1)
	go func() { answers <- s.ready(startTimeout) }()
	select {
	case err := <-answers:
		return err
	case <-p.done:
		return fmt.Errorf("redis-server ended:\n%s", p.out)
	}
}

// start runs the process from a thread that lives as long as it does: what
// ends the process with this one (Linux) goes by the thread that forked it.
func (p *process) start() error {
	p.out = &output{}
	p.done = make(chan struct{})
	p.cmd = exec.Command("redis-server", p.args...)
	p.cmd.Stdout, p.cmd.Stderr = p.out, p.out
	endWithParent(p.cmd)
	started := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		err := p.cmd.Start()
		started <- err
		if err == nil {
			p.cmd.Wait()
		}
		close(p.done)
	}()
	return <-started
}

func (p *process) pause() error  { return stop(p.cmd.Process) }
func (p *process) resume() error { return cont(p.cmd.Process) }

func (p *process) kill() error {
	if p.cmd == nil || p.cmd.Process == nil {
		return nil
	}
	if err := p.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	select {
	case <-p.done:
		return nil
	case <-time.After(startTimeout):
		return fmt.Errorf("process %d outlives SIGKILL", p.cmd.Process.Pid)
	}
}

func (p *process) wipe() error { return os.RemoveAll(filepath.Join(p.dir, "appendonlydir")) }

func (p *process) restart() error {
	select {
	case <-p.done:
		return p.start()
	default:
		return errors.New("it still runs")
	}
}

// output keeps what a process prints.
type output struct {
	mu  sync.Mutex // guards buf
	buf bytes.Buffer
}

func (o *output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.Write(b)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.String()
}
