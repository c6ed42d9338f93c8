//go:build unix

package cli

import (
	"os"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/hasplock/hasp/internal/redistest"
)

// With one increment for each worker, the killed worker has made none.
func TestDemo(t *testing.T) {
	t.Parallel()
	for _, increments := range []int{1, 6} {
		tmp, sum := t.TempDir(), strconv.Itoa(5*increments)
		cmd := self(t, "hasp", "", "demo", "--increments", strconv.Itoa(increments), "--ttl", "3")
		cmd.Env = append(cmd.Env, "TMPDIR="+tmp)
		o := start(t, cmd).wait().want(t, 0)
		wrote := regexp.MustCompile(`(?m)^ +\d+\.\d{3}s  worker \d writes (\d+) of `+sum).FindAllStringSubmatch(o.out, -1)
		right := len(wrote) == 5*increments
		for i, m := range wrote {
			right = right && m[1] == strconv.Itoa(i+1)
		}
		if !right {
			t.Errorf("the workers did not write 1 to %s:\n%s", sum, o.out)
		}
		for _, re := range []string{
			`(?m)^ +\d+\.\d{3}s  worker 2 \(pid \d+\) is killed while it holds`,
			`(?m)^ +\d+\.\d{3}s  worker 6 starts in its place`,
			`ok: the number is ` + sum + ` after ` + sum + ` increments by 5 processes`,
		} {
			if !regexp.MustCompile(re).MatchString(o.out) {
				t.Errorf("%s is not in:\n%s", re, o.out)
			}
		}
		if left, err := os.ReadDir(tmp); err != nil || len(left) > 0 {
			t.Errorf("left behind: %v %v", left, err)
		}
	}
}

func TestDemoWithoutLockGoesWrong(t *testing.T) {
	t.Parallel()
	o := runHasp(t, "", "demo", "--no-lock").want(t, exitFailed)
	contains(t, o.out, "WRONG: the number is ", "100 increments were made")
}

func TestDemoEndsWhenTheStoreIsGone(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t, redistest.Own)
	p := startHasp(t, redisURL(t, s), "demo", "--increments", "100000")
	p.out.expect("writes 5 of")
	s.Kill()
	o := p.wait().want(t, exitStore)
	contains(t, o.err, "hasp: worker ")
	if n := strings.Count(o.err, "\n"); n != 1 {
		t.Errorf("%d lines:\n%s", n, o.err)
	}
}

// All processes of the demo inherit a descriptor, which is closed when the last of them has ended.
// SIGPIPE stands for hasp demo | head.
func TestDemoLeavesNoProcess(t *testing.T) {
	t.Parallel()
	for sig, code := range map[syscall.Signal]int{unix.SIGINT: 130, unix.SIGTERM: 143, unix.SIGKILL: -1, unix.SIGPIPE: 141} {
		t.Run(unix.SignalName(sig), func(t *testing.T) {
			t.Parallel()
			alive, w := pipe(t)
			r, out, err := os.Pipe()
			must(t, err)
			cmd := self(t, "hasp", "", "demo", "--increments", "10000")
			cmd.ExtraFiles, cmd.Stdout = []*os.File{w}, out
			tmp := t.TempDir()
			cmd.Env = append(cmd.Env, "TMPDIR="+tmp)
			p := start(t, cmd)
			w.Close()
			out.Close()
			listen(t, r).expect("writes 3 of")
			if sig == unix.SIGPIPE {
				r.Close()
			} else {
				p.signal(sig)
			}
			if o := p.wait().want(t, code); sig == unix.SIGPIPE && o.err != "" {
				t.Errorf("stderr: %s", o.err)
			}
			alive.await("the end", func(_ string, ended bool) bool { return ended })
			if left, _ := os.ReadDir(tmp); len(left) > 0 && sig != unix.SIGKILL {
				t.Errorf("left behind: %v", left)
			}
		})
	}
}
