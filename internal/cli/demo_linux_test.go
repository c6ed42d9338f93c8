package cli

import (
	"os"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/hasplock/hasp/internal/redistest"
)

// On a terminal the demo draws a picture. It names the next workers above the
// lanes. At the end the cursor is shown again.
func TestDemoOnATerminal(t *testing.T) {
	t.Parallel()
	url := "fairlock+" + redistest.Start(t, nil).URL() + "?prefix=" + t.Name() + ":" // has a queue
	s := startSession(t, url, false, "demo", "--workers", "4", "--increments", "10", "--work", "20ms", "--ttl", "3s")
	s.report.expect("exited 0")
	s.end()
	text := s.String()
	contains(t, text, "hasp demo", "█", "✗", "░", "40 of 40", "killed", "ok: the number is 40",
		"  next in line  ", "\x1b[?25l")
	if strings.LastIndex(text, "\x1b[?25h") < strings.LastIndex(text, "\x1b[?25l") {
		t.Error("the cursor stays hidden")
	}
}

// A demo that is interrupted or killed leaves no process: they all inherit a
// descriptor, which ends with the last of them.
func TestDemoLeavesNoProcess(t *testing.T) {
	t.Parallel()
	for sig, code := range map[syscall.Signal]int{unix.SIGINT: 130, unix.SIGTERM: 143, unix.SIGKILL: -1} {
		t.Run(unix.SignalName(sig), func(t *testing.T) {
			t.Parallel()
			alive, w := pipe(t)
			cmd := self(t, "hasp", "", "demo", "--increments", "10000")
			cmd.ExtraFiles = []*os.File{w}
			tmp := t.TempDir()
			cmd.Env = append(cmd.Env, "TMPDIR="+tmp)
			p := start(t, cmd)
			w.Close()
			p.out.expect("writes 3 of")
			p.signal(sig)
			p.wait().want(t, code)
			alive.await("the end", func(_ string, ended bool) bool { return ended })
			if left, _ := os.ReadDir(tmp); len(left) > 0 && sig != unix.SIGKILL {
				t.Errorf("left behind: %v", left)
			}
		})
	}
}

// As in hasp demo | head.
func TestDemoIntoAClosedPipe(t *testing.T) {
	t.Parallel()
	r, w, err := os.Pipe()
	must(t, err)
	tmp := t.TempDir()
	cmd := self(t, "hasp", "", "demo", "--increments", "10000")
	cmd.Env = append(cmd.Env, "TMPDIR="+tmp)
	cmd.Stdout = w
	p := start(t, cmd)
	w.Close()
	_, err = r.Read(make([]byte, 100))
	must(t, err)
	r.Close()
	if o := p.wait().want(t, 128+int(unix.SIGPIPE)); o.err != "" {
		t.Errorf("stderr: %s", o.err)
	}
	if left, _ := os.ReadDir(tmp); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}
