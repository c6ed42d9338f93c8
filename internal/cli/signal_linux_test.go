package cli

import (
	"fmt"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hasplock/hasp/internal/await"
)

func TestSignalEndsTheWait(t *testing.T) {
	t.Parallel()
	url := store(t)
	holder := hold(t, url)
	for _, sig := range []unix.Signal{unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGUSR1} {
		t.Run(unix.SignalName(sig), func(t *testing.T) {
			p := startHasp(t, url, "run", "key", "--", "echo", "ran")
			p.err.expect(`hasp: waiting for "key", held by "`)
			p.signal(sig)
			o := p.wait().want(t, 128+int(sig))
			o.prints(t, "")
			contains(t, o.err, "hasp: ended by signal")
		})
	}
	holder.free().want(t, 0)
	lock(t, url, 0, "--no-wait")
}

// The server accepts connections but does not answer.
func TestSignalEndsTheOpening(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{"run", "key", "--", executable(t)}, {"inspect", "key"}, {"demo"}} {
		silent := await.Value(net.Listen("tcp", "127.0.0.1:0"))
		defer silent.Close()
		p := startHasp(t, "spinlock+redis://"+silent.Addr().String()+"?timeout=10m", args...)
		go func() {
			<-p.ended // then stop the loop below, even if hasp has not connected
			silent.Close()
		}()
		conn, err := silent.Accept()
		if err != nil {
			t.Fatalf("%q does not connect: %v\n%s", args, err, p.wait().err)
		}
		defer conn.Close()
		p.signal(unix.SIGTERM)
		p.wait().fails(t, 128+15, "hasp: ended by signal")
	}
}

// If conform printed the sum after an interruption, it would look like the verdict on all clauses.
func TestInterruptedConformPrintsNoSum(t *testing.T) {
	t.Parallel()
	p := startHasp(t, store(t), "conform")
	p.out.expect("pass  ")
	p.signal(unix.SIGTERM)
	if o := p.wait().want(t, 128+15); strings.Contains(o.out, " passed, ") {
		t.Error(o.out)
	}
}

// When hasp is dead, only the command has the output open. So the output ends with the command.
func TestCommandDiesWithHasp(t *testing.T) {
	t.Parallel()
	url := store(t)
	p := script(t, url, "echo ready; exec sleep 600", "--ttl", soonLost)
	p.signal(unix.SIGKILL)
	p.wait() // waits for the end of the output
	lock(t, url, 0, "--wait", "1m")
}

// The lock of a stopped command is renewed. If the lock is lost, hasp ends the command. If the
// machine stands still for a whole term, the lock is lost too soon. So try again with longer terms.
func TestStoppedCommandKeepsTheLock(t *testing.T) {
	t.Parallel()
	for _, ttl := range []time.Duration{3 * time.Second, 12 * time.Second, 40 * time.Second} {
		url := store(t)
		p := script(t, url, `echo "ready $$."; read x`, "--ttl", ttl.String(), "--grace", "10m")
		p.out.expect(".\n")
		var pid int
		await.Value(fmt.Sscanf(p.out.String(), "ready %d.", &pid))
		must(t, unix.Kill(pid, unix.SIGSTOP))
		if runHasp(t, url, "run", "key", "--wait", (3*ttl).String(), "--", "true").code != exitNotAcquired {
			t.Logf("not with a term of %v", ttl)
			continue
		}
		if b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid)); p.err.String() == "" && (err != nil || !strings.Contains(string(b), ") T ")) {
			t.Errorf("the command was continued: %s (%v)", b, err)
		}
		breakKey(t, url)
		p.wait().want(t, exitLost)
		return
	}
	t.Error("lost")
}
