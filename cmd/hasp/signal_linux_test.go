package main

import (
	"fmt"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestSignalEndsTheWait(t *testing.T) {
	t.Parallel()
	url := store(t)
	holder := hold(t, url, "key")
	for _, sig := range []unix.Signal{unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGUSR1} {
		t.Run(unix.SignalName(sig), func(t *testing.T) {
			cmd := self(t.Context(), t, "hasp", url, "run", "key", "--", "echo", "ran")
			terminal, slave := openPTY(t)
			p := startWith(t, cmd, nil, slave)
			terminal.expect(`hasp: waiting for "key", held by "`)
			if err := cmd.Process.Signal(sig); err != nil {
				t.Fatal(err)
			}
			if o := p.wait().want(t, 128+int(sig)); o.out != "" {
				t.Errorf("the command ran")
			}
			terminal.expect("hasp: ended by signal")
		})
	}
	holder.in.Close()
	holder.wait().want(t, 0)
	runHasp(t, url, "run", "key", "--no-wait", "--", "true").want(t, 0)
}

// A server that takes the connection and says nothing.
func TestSignalEndsTheOpening(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{"run", "key", "--", "true"}, {"inspect", "key"}, {"demo"}} {
		silent, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer silent.Close()
		p := startHasp(t, "spinlock+redis://"+silent.Addr().String()+"?timeout=10m", args...)
		conn, err := silent.Accept()
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if err := p.cmd.Process.Signal(unix.SIGTERM); err != nil {
			t.Fatal(err)
		}
		contains(t, p.wait().want(t, 128+15).err, "hasp: ended by signal")
	}
}

// The command is alone in its output, so that it ends with the command.
func TestCommandDiesWithHasp(t *testing.T) {
	t.Parallel()
	url := store(t)
	p := startHasp(t, url, "run", "key", "--ttl", soonLost, "--", "sh", "-c", "echo ready; exec sleep 600")
	p.out.expect("ready")
	if err := p.cmd.Process.Signal(unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	p.wait() // which waits for the end of the output
	runHasp(t, url, "run", "key", "--wait", "1m", "--", "true").want(t, 0)
}

// A hasp that was stopped past its term, while another took the key, ends its
// command as soon as it goes on.
func TestStoppedPastItsTerm(t *testing.T) {
	t.Parallel()
	url := store(t)
	p := startHasp(t, url, "run", "key", "--ttl", "9s", "--grace", "10m", "--", "sh", "-c",
		`trap 'echo ended; exit' TERM; echo ready; while :; do sleep 0.05; done`)
	p.out.expect("ready")
	if err := p.cmd.Process.Signal(unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	runHasp(t, url, "run", "key", "--wait", "1m", "--", "true").want(t, 0)
	if err := p.cmd.Process.Signal(unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
	o := p.wait().want(t, exitLost)
	contains(t, o.out, "ended")
	contains(t, o.err, "hasp was stopped for longer than its term")
}

// A stopped command still holds the lock, and is ended when that is lost.
func TestStoppedCommandKeepsTheLock(t *testing.T) {
	t.Parallel()
	withTerm(t, func(ttl time.Duration) bool {
		url := store(t)
		p := startHasp(t, url, "run", "key", "--ttl", ttl.String(), "--grace", "10m", "--", "sh", "-c", `echo "ready $$."; read x`)
		p.out.expect(".\n")
		var pid int
		if _, err := fmt.Sscanf(p.out.String(), "ready %d.", &pid); err != nil {
			t.Fatal(err)
		}
		if err := unix.Kill(pid, unix.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		if runHasp(t, url, "run", "key", "--wait", (3*ttl).String(), "--", "true").code != exitNotAcquired {
			return false
		}
		if b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid)); p.err.String() == "" && (err != nil || !strings.Contains(string(b), ") T ")) {
			t.Errorf("the command was continued: %s (%v)", b, err)
		}
		runHasp(t, url, "break", "key", "--force")
		p.wait().want(t, exitLost)
		return true
	})
}
