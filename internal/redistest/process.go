package redistest

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/hasplock/hasp/internal/crew"
	"github.com/hasplock/hasp/internal/testcert"
)

// process is a redis-server process.
type process struct {
	dir  string
	args []string
	cmd  *exec.Cmd
	out  *bytes.Buffer   // its output, which is complete when the channel done is closed
	done <-chan struct{} // closed when the process has ended
}

func (s *Server) startProcess() error {
	dir, err := s.tempDir(s.t, &s.o)
	if err != nil {
		return err
	}

	return again(func() error {
		port, err := freePort(s.t)
		if err != nil {
			return err
		}
		return s.startAt(dir, port)
	})
}

// freePort reserves a port until the end of the test. It also reserves the port 10,000 higher,
// which a cluster node needs. Both are below the ports that most systems give to connections.
func freePort(t testing.TB) (int, error) {
	for range 100 {
		p := 10500 + rand.IntN(11000)
		release, err := crew.ReservePort(p)
		if err != nil {
			continue
		}

		releaseBus, err := crew.ReservePort(p + 10000)
		if err != nil {
			release()
			continue
		}

		t.Cleanup(release)
		t.Cleanup(releaseBus)
		return p, nil
	}

	return 0, errors.New("no free port")
}

// errTaken says that another program took the port before the server did.
var errTaken = errors.New("address already in use")

// The function again repeats start, at most five times, if the port was taken.
func again(start func() error) error {
	for try := 0; ; try++ {
		if err := start(); try == 5 || !errors.Is(err, errTaken) {
			return err
		}
	}
}

// tempDir makes a directory that exists until the end of the test. If o needs a certificate, it
// writes one into the directory.
func (c *Certificate) tempDir(t testing.TB, o *Options) (dir string, err error) {
	if dir, err = os.MkdirTemp("", "redistest"); err != nil {
		return "", err
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if o.tls() {
		c.CertFile, c.KeyFile, err = testcert.Write(dir, "localhost")
		c.CAFile = c.CertFile
	}

	return dir, err
}

func (s *Server) startAt(dir string, port int, more ...string) error {
	return s.run(&process{dir: dir, args: append(s.args(dir, port), more...)})
}

// run starts p and waits until the server answers.
func (s *Server) run(p *process) error {
	s.flav = p
	s.t.Cleanup(func() { p.kill() })
	if err := p.start(); err != nil {
		return err
	}

	answers := make(chan error, 1)
	go func() { answers <- s.ready() }()

	select {
	case err := <-answers:
		return err
	case <-p.done:
		if bytes.Contains(p.out.Bytes(), []byte("Address already in use")) {
			return errTaken
		}
		return fmt.Errorf("redis-server ended:\n%s", p.out)
	}
}

func (s *Server) args(dir string, port int) []string {
	s.Addr = net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	plain := port
	tls := 0
	if s.o.tls() {
		plain = 0
		tls = port
	}

	args := []string{"--port", strconv.Itoa(plain), "--bind", "127.0.0.1",
		"--dir", dir, "--save", "", "--daemonize", "no"}
	if s.o.tls() {
		ask := "no"
		if s.o.Mutual {
			ask = "yes"
		}

		args = append(args, "--tls-port", strconv.Itoa(tls),
			"--tls-cert-file", s.CertFile, "--tls-key-file", s.KeyFile,
			"--tls-ca-cert-file", s.CAFile, "--tls-auth-clients", ask)
	}
	if s.o.Unix {
		s.Addr = filepath.Join(dir, "redis.sock")
		args = append(args, "--unixsocket", s.Addr)
	}

	switch {
	case s.o.User != "":
		args = append(args, "--user", s.o.User, "on", ">"+s.o.Password, "~*", "&*", "+@all",
			"--user", "default", "off")
	case s.o.Password != "":
		args = append(args, "--requirepass", s.o.Password)
	}

	if s.o.Keep {
		// Do not use fsync, so that no test waits for a busy disk. Even without fsync, data that
		// was written survives the end of the process.
		args = append(args, "--appendonly", "yes", "--appendfsync", "no")
	}

	return append(args, s.o.Args...)
}

// start starts the process. On Linux, the process ends when this program ends.
func (p *process) start() (err error) {
	p.out = &bytes.Buffer{}
	p.cmd = exec.Command(program(), p.args...)
	p.cmd.Stdout, p.cmd.Stderr = p.out, p.out
	p.done, err = crew.StartServer(p.cmd)
	return err
}

func (p *process) pause() error  { return crew.Pause(p.cmd.Process) }
func (p *process) resume() error { return crew.Resume(p.cmd.Process) }

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
	case <-time.After(patience):
		return fmt.Errorf("process %d has not ended after SIGKILL", p.cmd.Process.Pid)
	}
}

func (p *process) restart(data bool) error {
	select {
	case <-p.done:
	default:
		return errors.New("the process still runs")
	}

	if !data {
		if err := os.RemoveAll(filepath.Join(p.dir, "appendonlydir")); err != nil {
			return err
		}
	}

	return p.start()
}
