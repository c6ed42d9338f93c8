package cli

import (
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"github.com/hasplock/hasp/internal/cli/demo"
	"github.com/hasplock/hasp/internal/redistest"
)

func TestDemo(t *testing.T) {
	t.Parallel()
	tmp := t.TempDir()
	cmd := self(t, "hasp", "", "demo", "--workers", "3", "--increments", "6", "--work", "3ms", "--ttl", "3s")
	cmd.Env = append(cmd.Env, "TMPDIR="+tmp)
	o := start(t, cmd).wait().want(t, 0)
	if got := strings.Count(o.out, " writes "); got != 18 {
		t.Errorf("%d lines of increments, want 18:\n%s", got, o.out)
	}
	for _, re := range []string{
		`(?m)^ +\d+\.\d{3}s  worker 2 \(pid \d+\) is killed while it holds`,
		`(?m)^ +\d+\.\d{3}s  worker 4 starts in its place`,
		`(?m)^ +\d+\.\d{3}s  worker [134] takes over, \d`,
		`(?m)writes 1 of 18, holding for \d`,
		`(?m); waiting: \d`,
		`ok: the number is 18 after 18 increments by 3 processes`,
	} {
		if !regexp.MustCompile(re).MatchString(o.out) {
			t.Errorf("%s is not in:\n%s", re, o.out)
		}
	}
	left, err := os.ReadDir(tmp)
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %v %v", left, err)
	}

	_, rest, _ := strings.Cut(o.out, "A command under a lock:")
	toPaste, _, _ := strings.Cut(rest, "\n")
	cmd = exec.CommandContext(t.Context(), "sh", "-c", "unset HASP_URL; "+toPaste)
	cmd.Env = append(os.Environ(), role+"=hasp", "XDG_STATE_HOME="+t.TempDir())
	if got, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(got), "only one at a time") {
		t.Errorf("%s: %v\n%s", toPaste, err, got)
	}
}

// The smallest demo has one worker, and another one after the kill.
func TestDemoForPrograms(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ workers, increments, killed int }{{4, 3, 2}, {1, 1, 1}} {
		var s demo.Summary
		runHasp(t, "", "demo", "--ttl", "3s", "--json", "--workers", fmt.Sprint(c.workers), "--increments", fmt.Sprint(c.increments), "--work", "1ms").
			want(t, 0).decode(t, &s)
		if want := c.workers * c.increments; !s.OK || s.Number != want || s.Expected != want || s.HeldAtOnce != 1 || s.Store != "filelock" {
			t.Errorf("summary: %+v", s)
		}
		if s.Killed != c.killed || s.KilledPID == 0 || s.Heir == 0 || s.Heir == c.killed || s.Takeover <= 0 {
			t.Errorf("no takeover: %+v", s)
		}
	}
}

func TestDemoWithoutLockGoesWrong(t *testing.T) {
	t.Parallel()
	o := runHasp(t, "", "demo", "--no-lock", "--workers", "4", "--increments", "20", "--work", "10ms").want(t, exitFailed)
	contains(t, o.out, "WRONG: the number is ", "80 increments were made", "; writing at the same time: ")
}

func TestDemoEndsWhenTheStoreIsGone(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t, &redistest.Options{Own: true})
	p := startHasp(t, redisURL(t, s), "demo", "--workers", "2", "--increments", "100000", "--work", "1ms")
	p.out.expect("writes 5 of")
	s.Kill()
	o := p.wait().want(t, exitStore)
	contains(t, o.err, "hasp: worker ")
	if n := strings.Count(o.err, "\n"); n != 1 {
		t.Errorf("%d lines:\n%s", n, o.err)
	}
}
