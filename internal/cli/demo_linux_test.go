package cli

import (
	"os"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// All processes of the demo inherit a descriptor, which is closed when the last of them has ended.
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

// This happens in hasp demo | head.
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
