//go:build unix

package main

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

func TestRunExitsLikeItsCommand(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	script := filepath.Join(dir, "script")
	if err := os.WriteFile(script, []byte("exit 7\n"), 0o700); err != nil { // without #!
		t.Fatal(err)
	}
	plain := filepath.Join(dir, "plain")
	if err := os.WriteFile(plain, []byte("no program"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		command []string
		code    int
		says    string
	}{
		"success":                {[]string{"true"}, 0, ""},
		"its own code":           {[]string{"sh", "-c", "exit 3"}, 3, ""},
		"a code that hasp uses":  {[]string{"sh", "-c", "exit 75"}, 75, ""},
		"ended by a signal":      {[]string{"sh", "-c", "kill -KILL $$"}, 128 + 9, ""},
		"a script without shell": {[]string{script}, 7, ""},
		"not found":              {[]string{"hasp-no-such-command"}, exitNotFound, `cannot run "hasp-no-such-command": executable file not found in $PATH`},
		"no such file":           {[]string{dir + "/none"}, exitNotFound, "no such file or directory"},
		"not executable":         {[]string{plain}, exitCannotRun, "permission denied"},
		"a directory":            {[]string{dir}, exitCannotRun, "is a directory"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url := store(t)
			o := runHasp(t, url, append([]string{"run", "key", "--"}, c.command...)...).want(t, c.code)
			if c.says == "" && o.err != "" {
				t.Errorf("stderr: %s", o.err)
			}
			contains(t, o.err, c.says)
			runHasp(t, url, "run", "key", "--no-wait", "--", "true").want(t, 0) // nothing is left locked
		})
	}
}

func TestRunTellsTheCommandOfItsLock(t *testing.T) {
	t.Parallel()
	url := store(t)
	const show = `echo "$HASP_KEY/${HASP_FENCE-none}"`
	o := runHasp(t, url, "run", "a key", "--", "sh", "-c", show).want(t, 0)
	if o.out != "a key/none\n" {
		t.Errorf("unfenced: %q", o.out)
	}
	last := uint64(0)
	for range 3 {
		o := runHasp(t, url, "run", "a key", "--fence", "--", "sh", "-c", show).want(t, 0)
		fence, err := strconv.ParseUint(strings.TrimPrefix(strings.TrimSpace(o.out), "a key/"), 10, 64)
		if err != nil || fence <= last {
			t.Fatalf("fence after %d: %q (%v)", last, o.out, err)
		}
		last = fence
	}
	// An unfenced run inside a fenced one does not pass on the fence of another lock.
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	o = runHasp(t, url, "run", "outer", "--fence", "--", exe, "run", "inner", "--", "sh", "-c", show).want(t, 0)
	if o.out != "inner/none\n" {
		t.Errorf("inner: %q", o.out)
	}
}

func TestRunGivesTheCommandItsStreams(t *testing.T) {
	t.Parallel()
	p := startHasp(t, store(t), "run", "key", "--", "sh", "-c", "cat; echo problem >&2")
	if _, err := p.in.Write([]byte("text\n")); err != nil {
		t.Fatal(err)
	}
	p.in.Close()
	if o := p.wait().want(t, 0); o.out != "text\n" || o.err != "problem\n" {
		t.Errorf("stdout %q, stderr %q", o.out, o.err)
	}
}

// hold starts a hasp run that holds key until its standard input ends.
func hold(t *testing.T, url, key string, flags ...string) *running {
	t.Helper()
	args := append([]string{"run", key}, flags...)
	p := startHasp(t, url, append(args, "--", "sh", "-c", "echo ready; cat")...)
	p.out.expect("ready")
	return p
}

func TestRunDoesNotWaitLongerThanItIsTold(t *testing.T) {
	t.Parallel()
	url := store(t)
	holder := hold(t, url, "key")
	for _, flags := range [][]string{{"--no-wait"}, {"--wait", "0"}, {"--wait", "2s"}} {
		args := append([]string{"run", "key"}, flags...)
		o := runHasp(t, url, append(args, "--", "echo", "ran")...).want(t, exitNotAcquired)
		if o.out != "" {
			t.Errorf("%q: the command ran: %s", flags, o.out)
		}
		contains(t, o.err, `"key" is held by "`)
		contains(t, o.err, "/hasp run sh")
	}
	holder.in.Close()
	holder.wait().want(t, 0)
	runHasp(t, url, "run", "key", "--no-wait", "--", "true").want(t, 0)
}

func TestRunWaitsForTheHolderBefore(t *testing.T) {
	t.Parallel()
	url, log := store(t), filepath.Join(t.TempDir(), "log")
	write := func(what string) string { return "echo " + what + " >> '" + log + "'" }
	first := startHasp(t, url, "run", "key", "--", "sh", "-c", "echo ready; cat; "+write("first"))
	first.out.expect("ready")
	second := startHasp(t, url, "run", "key", "--wait", "1m", "--", "sh", "-c", write("second"))
	third := startHasp(t, url, "run", "key", "--", "sh", "-c", write("third"))
	runHasp(t, url, "run", "key", "--wait", "1s", "--", "true").want(t, exitNotAcquired)
	first.in.Close()
	for _, p := range []*running{first, second, third} {
		p.wait().want(t, 0)
	}
	b, err := os.ReadFile(log)
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.Fields(string(b)); len(got) != 3 || got[0] != "first" {
		t.Errorf("order: %q", got)
	}
}

func TestRunHoldsPastItsTerm(t *testing.T) {
	t.Parallel()
	withTerm(t, func(ttl time.Duration) bool {
		url := store(t)
		holder := hold(t, url, "key", "--ttl", ttl.String())
		o := runHasp(t, url, "run", "key", "--wait", (3 * ttl).String(), "--", "true")
		holder.in.Close()
		return holder.wait().code == 0 && o.code == exitNotAcquired
	})
}

// withTerm asks holds whether a lock is held past its term. A machine that
// stands still for a whole term loses every lock, so a no is believed of a
// long term.
func withTerm(t *testing.T, holds func(ttl time.Duration) bool) {
	t.Helper()
	for _, ttl := range []time.Duration{3 * time.Second, 12 * time.Second} {
		if holds(ttl) {
			return
		}
		t.Logf("not with a term of %v", ttl)
	}
	t.Error("lost")
}

// soonLost is a term whose loss is noticed within two seconds, and which no
// machine loses by itself in the time that it takes to break it.
const soonLost = "6s"

// lose breaks key once its holder has it.
func lose(t *testing.T, url, key string) {
	t.Helper()
	o := runHasp(t, url, "break", key, "--force").want(t, 0)
	contains(t, o.out, "work may still be running")
}

func TestLossEndsTheCommand(t *testing.T) {
	t.Parallel()
	url := store(t)
	p := startHasp(t, url, "run", "key", "--ttl", soonLost, "--grace", "1m", "--",
		"sh", "-c", `trap 'echo cleaning up; exit 0' TERM; echo ready; while :; do sleep 0.05; done`)
	p.out.expect("ready")
	lose(t, url, "key")
	o := p.wait().want(t, exitLost)
	contains(t, o.out, "cleaning up")
	contains(t, o.err, `hasp: lost "key": the store does not have it any more`)
}

func TestLossKillsACommandThatDoesNotEnd(t *testing.T) {
	t.Parallel()
	url := store(t)
	p := startHasp(t, url, "run", "key", "--ttl", soonLost, "--grace", "100ms", "--",
		"sh", "-c", `trap '' TERM; echo ready; while :; do sleep 0.05; done`)
	p.out.expect("ready")
	lose(t, url, "key")
	p.wait().want(t, exitLost)
}

// The command ends at once, and leaves a child in its group that takes its
// time. wait returns when nobody has the output open.
func TestLossEndsTheWholeGroup(t *testing.T) {
	t.Parallel()
	url := store(t)
	p := startHasp(t, url, "run", "key", "--ttl", soonLost, "--grace", "10m", "--",
		"sh", "-c", `sh -c 'trap "sleep 0.3; echo child heard; exit" TERM; echo ready; while :; do sleep 0.05; done' & wait`)
	p.out.expect("ready")
	lose(t, url, "key")
	o := p.wait().want(t, exitLost)
	contains(t, o.out, "child heard")
}

// The command ends at once, and leaves a child in its group that never does.
func TestLossKillsWhatIsLeftOfTheGroup(t *testing.T) {
	t.Parallel()
	url := store(t)
	p := startHasp(t, url, "run", "key", "--ttl", soonLost, "--grace", "200ms", "--",
		"sh", "-c", `sh -c 'trap "" TERM; echo ready; while :; do sleep 0.05; done' & wait`)
	p.out.expect("ready")
	lose(t, url, "key")
	p.wait().want(t, exitLost)
}

func TestLossIsToldWhenTheStoreLosesItsData(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	p := startHasp(t, "filelock://"+dir, "run", "key", "--ttl", soonLost, "--", "sh", "-c", "echo ready; exec sleep 600")
	p.out.expect("ready")
	// Again and again, since a renewal may be writing just now.
	for end := time.Now().Add(patience); p.err.String() == "" && time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			if err := os.Remove(filepath.Join(dir, e.Name())); err != nil && !os.IsNotExist(err) {
				t.Fatal(err)
			}
		}
	}
	o := p.wait().want(t, exitLost)
	contains(t, o.err, `hasp: lost "key"`)
}

// A loss that nobody noticed while the command ran is found at the unlock.
func TestLossIsToldAtTheEnd(t *testing.T) {
	t.Parallel()
	url := store(t)
	p := hold(t, url, "key", "--ttl", "10m")
	lose(t, url, "key")
	p.in.Close()
	o := p.wait().want(t, exitLost)
	contains(t, o.err, `lost "key" before the command ended`)
}

func TestGraceBoundsAreChecked(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{"--grace", "-1s"}, {"--wait", "-1s"}, {"--wait", "1s", "--no-wait"}} {
		o := runHasp(t, store(t), append(append([]string{"run", "key"}, args...), "--", "true")...)
		o.want(t, exitUsage)
	}
}

// What is said to a person who waits is not said to a log.
func TestRunIsQuiet(t *testing.T) {
	t.Parallel()
	url := store(t)
	holder := hold(t, url, "key")
	began := time.Now()
	p := startHasp(t, url, "run", "key", "--", "true")
	runHasp(t, url, "run", "key", "--wait", (noticeAfter+200*time.Millisecond).String(), "--", "true").want(t, exitNotAcquired)
	if time.Since(began) < noticeAfter {
		t.Error("did not wait as long as it was told")
	}
	holder.in.Close()
	if o := p.wait().want(t, 0); o.err != "" {
		t.Errorf("stderr: %s", o.err)
	}
}
