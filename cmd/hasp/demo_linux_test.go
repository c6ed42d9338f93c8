package main

import (
	"os"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/hasplock/hasp/cmd/hasp/internal/text"
)

// On a terminal the demo draws a picture that fits. At the end the cursor is shown
// again.
func TestDemoOnATerminal(t *testing.T) {
	t.Parallel()
	s := startSession(t, "", false, "demo", "--workers", "3", "--increments", "5", "--work", "3ms", "--ttl", "3s")
	s.report.expect("exited 0")
	s.end()
	text := s.String()
	contains(t, text, "hasp demo", "█", "✗", "░", "\x1b[?25l", "\x1b[?25h", "15 of 15", "killed", "ok: the number is 15")
	if strings.LastIndex(text, "\x1b[?25h") < strings.LastIndex(text, "\x1b[?25l") {
		t.Error("the cursor stays hidden")
	}
	fitsTerminal(t, text)
}

var escapes = regexp.MustCompile(`\x1b\[[0-9;?]*[A-Za-z]`)

// fitsTerminal checks that the lines of the screen have at most the 100 columns
// of a session's terminal.
func fitsTerminal(t *testing.T, text string) {
	t.Helper()
	for line := range strings.SplitSeq(text, "\n") {
		shown := strings.Trim(escapes.ReplaceAllString(line, ""), "\r")
		if n := utf8.RuneCountInString(shown); n > 100 && strings.Contains(line, "\x1b[K") {
			t.Errorf("%d columns: %q", n, line)
		}
	}
}

// The screen names the next worker, above the lanes and in the worker's lane.
func TestDemoShowsTheLineOnATerminal(t *testing.T) {
	t.Parallel()
	s := startSession(t, queueURL(t), false, "demo", "--workers", "4", "--increments", "10", "--work", "20ms", "--ttl", "3s")
	s.report.expect("exited 0")
	s.end()
	text := s.String()
	contains(t, text, "  in line", "next ", ", then ", ", next", "ok: the number is 40")
	fitsTerminal(t, text)
}

// Any program can write owners into the store.
func TestInspectOnATerminalShowsNothingRaw(t *testing.T) {
	t.Parallel()
	url := queueURL(t)
	line(t, url, escape, "third")
	s := startSession(t, url, false, "inspect", "key")
	s.report.expect("exited 0")
	s.end()
	if shown := s.String(); strings.ContainsAny(shown, "\x1b\u202e") || !strings.Contains(shown, "waiter 1   "+text.Quote(escape)) {
		t.Errorf("shown: %q", shown)
	}
}

// A demo that is interrupted or killed leaves no process: they all inherit a
// descriptor, which ends with the last of them.
func TestDemoLeavesNoProcess(t *testing.T) {
	t.Parallel()
	for sig, code := range map[syscall.Signal]int{unix.SIGINT: 130, unix.SIGTERM: 143, unix.SIGKILL: -1} {
		t.Run(unix.SignalName(sig), func(t *testing.T) {
			t.Parallel()
			alive, w := output(t, nil)
			cmd := self(t.Context(), t, "hasp", "", "demo", "--increments", "10000")
			cmd.ExtraFiles = []*os.File{w}
			tmp := t.TempDir()
			cmd.Env = append(cmd.Env, "TMPDIR="+tmp)
			p := start(t, cmd, nil, nil)
			w.Close()
			p.out.expect("writes 3 of")
			p.signal(sig)
			p.wait().want(t, code)
			alive.end()
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
	if err != nil {
		t.Fatal(err)
	}
	tmp := t.TempDir()
	cmd := self(t.Context(), t, "hasp", "", "demo", "--increments", "10000")
	cmd.Env = append(cmd.Env, "TMPDIR="+tmp)
	p := start(t, cmd, w, nil)
	if _, err := r.Read(make([]byte, 100)); err != nil {
		t.Fatal(err)
	}
	r.Close()
	if o := p.wait().want(t, 128+int(unix.SIGPIPE)); o.err != "" {
		t.Errorf("stderr: %s", o.err)
	}
	if left, _ := os.ReadDir(tmp); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}
