package cli

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
	"time"

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
}

func TestDemoEndsWithACommandToPaste(t *testing.T) {
	t.Parallel()
	o := runHasp(t, "", "demo", "--workers", "2", "--increments", "3", "--work", "1ms", "--ttl", "1s").want(t, 0)
	m := regexp.MustCompile(`A command under a lock: +(.*)`).FindStringSubmatch(o.out)
	if m == nil {
		t.Fatalf("no command in:\n%s", o.out)
	}

	cmd := exec.CommandContext(t.Context(), "sh", "-c", "unset HASP_URL; "+m[1])
	cmd.Env = append(os.Environ(), "XDG_STATE_HOME="+t.TempDir())
	got, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(got), "only one at a time") {
		t.Errorf("%s: %v\n%s", m[1], err, got)
	}
}

// demoSummary runs a demo to its end and returns the summary.
func demoSummary(t *testing.T, url string, flags ...string) demo.Summary {
	t.Helper()
	var s demo.Summary
	runHasp(t, url, append([]string{"demo", "--ttl", "3s", "--json"}, flags...)...).want(t, 0).decode(t, &s)
	return s
}

func TestDemoForPrograms(t *testing.T) {
	t.Parallel()
	s := demoSummary(t, "", "--workers", "4", "--increments", "3", "--work", "1ms")
	if !s.OK || s.Number != 12 || s.Expected != 12 || s.HeldAtOnce != 1 {
		t.Errorf("summary: %+v", s)
	}
	if s.Killed != 2 || s.KilledPID == 0 || s.Heir == 0 || s.Heir == 2 || s.Takeover <= 0 {
		t.Errorf("no takeover: %+v", s)
	}
}

// The smallest demo has one worker, and the one that takes over from it.
func TestDemoOfOneWorker(t *testing.T) {
	t.Parallel()
	if s := demoSummary(t, "", "--workers", "1", "--increments", "1"); !s.OK || s.Number != 1 || s.Killed != 1 || s.Heir != 2 {
		t.Errorf("summary: %+v", s)
	}
}

func TestDemoWithoutLockGoesWrong(t *testing.T) {
	t.Parallel()
	o := runHasp(t, "", "demo", "--no-lock", "--workers", "4", "--increments", "20", "--work", "10ms").want(t, exitFailed)
	contains(t, o.out, "WRONG: the number is ", "80 increments were made", "; writing at the same time: ")
}

func TestDemoOnRedis(t *testing.T) {
	t.Parallel()
	url := redisURL(t, redistest.Start(t, nil))
	if s := demoSummary(t, url, "--workers", "3", "--increments", "4", "--work", "2ms"); !s.OK || s.Store != "spinlock" || s.Heir == 0 {
		t.Errorf("summary: %+v", s)
	}
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

// If the referee is killed, its workers end, even one that has stalled.
func TestWorkerEndsWithItsReferee(t *testing.T) {
	t.Parallel()
	cmd := self(t, "hasp", "")
	cmd.Env = append(cmd.Env, "HASP_CREW_ROLE="+demo.Role)
	p := start(t, cmd)
	order := fmt.Sprintf(`{"Store": {"strategy": "filelock", "nodes": [%q]}, "Key": "key", "TTL": %d, "Turns": 1, "Stall": 1}`,
		t.TempDir(), time.Minute)
	const mark = "hasp-crew: " // begins each message
	if _, err := io.WriteString(p.in, mark+order+"\n"+mark+"\"start\"\n"); err != nil {
		t.Fatal(err)
	}
	p.out.expect("stalls")
	p.in.Close()
	p.wait().want(t, exitFailed)
}
