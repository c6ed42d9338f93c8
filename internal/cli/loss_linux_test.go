package cli

import (
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hasplock/hasp/internal/redistest"
)

func init() {
	roles["adopter"] = adopter
	roles["careless"] = careless
}

// adopter is hasp as the first process of a container, which adopts each descendant whose parent
// ends.
func adopter([]string) int {
	_ = unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
	return Main()
}

// careless is like the first process of a container. It runs hasp, and never waits for the
// processes that it adopts.
func careless(args []string) int {
	_ = unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
	os.Setenv(role, "hasp")
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	_ = cmd.Run()
	return cmd.ProcessState.ExitCode()
}

// A process that has ended stays in its group until its parent has waited for it. In a container,
// that may never happen.
func TestLossEndsInAContainer(t *testing.T) {
	t.Parallel()
	const ignores = `trap '' TERM; `
	for name, c := range map[string]struct{ as, trap, grace string }{
		"whose first process is hasp":                                  {"adopter", "", "10m"},
		"whose first process is hasp, and the command ignores SIGTERM": {"adopter", ignores, "200ms"},
		"that waits for no process, and the command ignores SIGTERM":   {"careless", ignores, "200ms"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url := store(t)
			p := start(t, self(t, c.as, url, "run", "key", "--ttl", soonLost, "--grace", c.grace, "--", "sh", "-c", c.trap+"sleep 600 & echo ready; wait"))
			p.out.expect("ready")
			breakKey(t, url)
			p.within(soon).want(t, exitLost)
		})
	}
}

// endsByItself is a script that ends on SIGTERM, or after 20 seconds.
const endsByItself = `trap 'echo got SIGTERM; exit' TERM; echo ready; for i in $(seq 400); do sleep 0.05; done; echo no signal`

// blocked returns the write end of a pipe that is full. It is like the pipe to a pager that does
// not read on.
func blocked(t *testing.T) *os.File {
	t.Helper()
	r, w, err := os.Pipe()
	must(t, err)
	t.Cleanup(func() { r.Close() })
	_ = w.SetWriteDeadline(time.Now().Add(100 * time.Millisecond))
	_, _ = w.WriteString(strings.Repeat("x", 1<<20))
	return w
}

// soon is much less time than the children of these programs would take.
const soon = 40 * time.Second

// Perhaps no process reads stderr, or its reader does not read on. The message about the loss must
// not keep hasp from ending the group.
func TestLossEndsTheGroupWhateverBecomesOfStderr(t *testing.T) {
	t.Parallel()
	for _, broken := range []bool{true, false} {
		url := store(t)
		cmd := self(t, "hasp", url, "run", "key", "--ttl", soonLost, "--", "sh", "-c", `sh -c "$0" 2>/dev/null & wait`, endsByItself)
		r, w, err := os.Pipe()
		must(t, err)
		cmd.Stderr = w
		if !broken {
			cmd.Stderr = blocked(t)
		}
		p := start(t, cmd)
		w.Close()
		p.out.expect("ready")
		r.Close()
		breakKey(t, url)
		contains(t, p.within(soon).want(t, exitLost).out, "got SIGTERM")
	}
}

// hasp prints that it waits, and later that it has the key. Neither write may block it.
func TestWaitGoesOnIfStderrBlocks(t *testing.T) {
	t.Parallel()
	url := store(t)
	holder := hold(t, url)
	var waiting []*running
	for range 2 {
		cmd := self(t, "hasp", url, "run", "key", "--", "true")
		cmd.Stderr = blocked(t)
		waiting = append(waiting, start(t, cmd))
	}
	time.Sleep(noticeAfter + 500*time.Millisecond) // by now both have begun to print that they wait
	waiting[0].signal(unix.SIGTERM)
	waiting[0].within(soon).want(t, 128+int(unix.SIGTERM))
	holder.free().want(t, 0)
	waiting[1].within(soon).want(t, 0)
}

// After the loss, hasp must not wait for an answer of the server.
func TestLossAtAServerThatHangs(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t, redistest.Own)
	p := script(t, redisURL(t, s)+"&timeout=10m", "echo ready; exec sleep 600", "--ttl", "2s")
	s.Pause()
	defer s.Resume()
	p.within(soon).want(t, exitLost)
}

// If hasp cannot write its output, the exit code must not be the one for a store that cannot be
// reached.
func TestFullOutputIsNoOutage(t *testing.T) {
	t.Parallel()
	url := store(t)
	defer lock(t, url, 0, "--no-wait") // hasp lock has freed the key whose handle it could not print
	for _, args := range [][]string{{"inspect", "key"}, {"inspect", "key", "--json"}, {"lock", "key", "--ttl", "1h"}, {"ls"}, {"strategies"}} {
		full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
		must(t, err)
		defer full.Close()
		cmd := self(t, "hasp", url, args...)
		cmd.Stdout = full
		start(t, cmd).wait().fails(t, exitFailed, "no space left on device")
	}
}
