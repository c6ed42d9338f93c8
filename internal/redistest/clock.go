package redistest

import (
	_ "embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

//go:embed clock/clock.c
var clockSource []byte

// clockLibrary is a shared library that gives a server a wall clock that can be
// set. libfaketime would not do: it hangs in servers that use jemalloc, as
// Debian's does, and leaves files in /dev/shm when they are killed.
var clockLibrary = sync.OnceValues(func() ([]byte, error) {
	dir, err := os.MkdirTemp("", "redistest")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	source, library := filepath.Join(dir, "clock.c"), filepath.Join(dir, "clock.so")
	if err := os.WriteFile(source, clockSource, 0o600); err != nil {
		return nil, err
	}
	if out, err := exec.Command("cc", "-shared", "-fPIC", "-O2", "-o", library, source, "-ldl").CombinedOutput(); err != nil {
		return nil, fmt.Errorf("cc: %w\n%s", err, out)
	}
	return os.ReadFile(library)
})

// ClocksCanJump reports whether Options.Clock is available. It needs Linux,
// redis-server processes and a C compiler.
func ClocksCanJump() bool {
	kind, err := choose(os.Getenv(Env), true)
	if err != nil || kind != "process" || !clocksCanJump {
		return false
	}
	_, err = clockLibrary()
	return err == nil
}

// needClock skips the test if o asks for a clock that is not available.
func (o *Options) needClock(t testing.TB) {
	t.Helper()
	if o.Clock && !ClocksCanJump() {
		t.Skip("needs clocks that can jump: Linux, redis-server and a C compiler")
	}
}

// Skew sets the server's wall clock ahead of the host's by d, until the next Skew.
// A restart does not change it. It needs Options.Clock, and may be called on any
// goroutine.
func (s *Server) Skew(d time.Duration) error {
	if p, ok := s.flav.(*process); ok && p.clock != "" {
		return setClock(p.clock, d)
	}
	return fmt.Errorf("redistest: skew: no Options.Clock: %w", errors.ErrUnsupported)
}

// wind gives p a clock of its own.
func (p *process) wind() error {
	library, err := clockLibrary()
	if err != nil {
		return err
	}
	p.clock = filepath.Join(p.dir, "clock")
	p.env = []string{"LD_PRELOAD=" + p.clock + ".so", "REDISTEST_CLOCK=" + p.clock}
	return errors.Join(os.WriteFile(p.clock+".so", library, 0o700), os.WriteFile(p.clock, make([]byte, 8), 0o600))
}

// wound returns an error if the process uses the host's clock, as a statically
// linked one does.
func (p *process) wound() error {
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", p.cmd.Process.Pid))
	if err == nil && !strings.Contains(string(maps), filepath.Base(p.dir)+"/clock.so\n") {
		err = errors.New("redis-server does not load the clock library")
	}
	return err
}
