//go:build unix

package cli

import (
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redistest"
)

func TestRunExitsLikeItsCommand(t *testing.T) {
	t.Parallel()
	noInterpreter := file(t, "script", "exit 7\n", 0o700) // a script without #!
	plain := file(t, "plain", "no program", 0o600)
	dir := t.TempDir()
	for name, c := range map[string]struct {
		command []string
		code    int
		says    string
	}{
		"success":                {[]string{"true"}, 0, ""},
		"its own code":           {[]string{"sh", "-c", "exit 3"}, 3, ""},
		"a code that hasp uses":  {[]string{"sh", "-c", "exit 75"}, 75, ""},
		"ended by a signal":      {[]string{"sh", "-c", "kill -KILL $$"}, 128 + 9, ""},
		"a script without shell": {[]string{noInterpreter}, 7, ""},
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
			lock(t, url, 0, "--no-wait") // the key is free
		})
	}
}

func TestCommandKnowsItsLock(t *testing.T) {
	t.Parallel()
	url := store(t)
	const show = `echo "$HASP_KEY/${HASP_FENCE-none}"`
	runHasp(t, url, "run", "a key", "--", "sh", "-c", show+`; echo "$HASP_URL"`).want(t, 0).prints(t, "a key/none\n"+url+"\n")
	o := runHasp(t, url, "run", "a key", "--fence", "--", "sh", "-c", show).want(t, 0)
	if fence, err := strconv.ParseUint(strings.TrimPrefix(strings.TrimSpace(o.out), "a key/"), 10, 64); err != nil || fence == 0 {
		t.Errorf("fenced: %q", o.out)
	}
	// A run without a fence does not pass on the fence of the run around it.
	runHasp(t, url, "run", "outer", "--fence", "--", executable(t), "run", "inner", "--", "sh", "-c", show).want(t, 0).prints(t, "inner/none\n")
}

func TestRunWithSlots(t *testing.T) {
	t.Parallel()
	url := store(t)
	const show = `echo "$HASP_KEY/${HASP_SLOT-none}"`
	hasp := executable(t)
	// A run with slots inside another takes the second slot. Then both are held.
	inside := func(script string) outcome {
		return runHasp(t, url, "run", "key", "--slots", "2", "--", hasp, "run", "key", "--slots", "2", "--", "sh", "-c", script)
	}
	if o := inside(show).want(t, 0); o.out != "key/0\n" && o.out != "key/1\n" {
		t.Errorf("got %q", o.out)
	}
	contains(t, inside(hasp+" run key --slots 2 --no-wait -- echo ran").want(t, exitNotAcquired).err, `"key" is held`)
	contains(t, inside("unset HASP_HELD; "+hasp+" run key --slots 2 --wait 1500ms -- echo ran").want(t, exitNotAcquired).err,
		`waiting for one of the 2 slots of "key"`)
	contains(t, inside(hasp+" run key --slots 2 -- echo ran").want(t, exitNotAcquired).err, "the hasp run that this one runs inside")

	// A run without slots inside a run with slots takes another key, and does not pass on the outer
	// slot.
	runHasp(t, url, "run", "key", "--slots", "1", "--", hasp, "run", "key", "--", "sh", "-c", show).want(t, 0).prints(t, "key/none\n")
}

func TestRunWithMinHold(t *testing.T) {
	t.Parallel()
	url := store(t)
	lock(t, url, 0, "--ttl", "1h", "--min-hold", "10m")
	lock(t, url, exitNotAcquired, "--no-wait")
	out := runHasp(t, url, "inspect", "key").want(t, 0).out
	contains(t, out, "/hasp run true")
	if !regexp.MustCompile(`term +(10m0s|\dm\d+s) left`).MatchString(out) {
		t.Errorf("not the rest of 10m:\n%s", out)
	}
}

func TestRunShared(t *testing.T) {
	t.Parallel()
	url, hasp := "fairlock+"+redistest.Start(t, nil).URL(), executable(t)
	// Inside a shared run, a shared run gets the key, and an exclusive one does not.
	try := []string{hasp, "run", "key", "--no-wait"}
	script := strings.Join(append(try, "--shared", "--", "echo", "both"), " ") + "; " +
		strings.Join(append(try, "--", "true"), " ") + "; echo code $?"
	runHasp(t, url, "run", "key", "--shared", "--", "env", "-u", "HASP_HELD", "sh", "-c", script).want(t, 0).prints(t, "both\ncode 75\n")
	for _, inner := range [][]string{{"--shared"}, nil} {
		args := slices.Concat([]string{"run", "key", "--shared", "--", hasp, "run", "key"}, inner, []string{"--", "echo", "ran"})
		contains(t, runHasp(t, url, args...).want(t, exitNotAcquired).err, "the hasp run that this one runs inside")
	}
	lock(t, url, 0)
}

// A run inside another one with the same key would wait for the outer run, which waits for it.
func TestRunInsideItselfDoesNotHang(t *testing.T) {
	t.Parallel()
	url, hasp := store(t), executable(t)
	inner := []string{"--", hasp, "run", "key", "--", "echo", "ran"}
	for _, between := range [][]string{
		nil,
		{"--", hasp, "run", "another"},
		{"--", hasp, "run", "another", "--url", url + "?ttl=1m"},
	} {
		o := runHasp(t, url, slices.Concat([]string{"run", "key"}, between, inner)...).want(t, exitNotAcquired)
		contains(t, o.err, `hasp: "key" is held by "`, "the hasp run that this one runs inside")
		o.prints(t, "")
	}
	o := runHasp(t, url+"?owner=me", append([]string{"run", "key"}, inner...)...).want(t, exitNotAcquired)
	contains(t, o.err, `held by "me", the hasp run`)
}

// A run inside another may lock the same key of another store. A process that a command has left
// behind may lock the key that the command held.
func TestRunInsideAnotherLock(t *testing.T) {
	t.Parallel()
	url, hasp := store(t), executable(t)
	o := runHasp(t, url, "run", "key", "--", hasp, "run", "key", "--url", store(t), "--", "echo", "ran").want(t, 0)
	contains(t, o.out, "ran")

	p := startHasp(t, url, "run", "key", "--", "sh", "-c",
		`(while ! "$0" inspect key | grep -q free; do sleep 0.05; done; "$0" run key -- echo ran) &`, hasp)
	contains(t, p.wait().want(t, 0).out, "ran")
}

func TestRunGivesTheCommandItsStreams(t *testing.T) {
	t.Parallel()
	p := startHasp(t, store(t), "run", "key", "--", "sh", "-c", "cat; echo problem >&2")
	await.Value(p.in.Write([]byte("text\n")))
	if o := p.free().want(t, 0); o.out != "text\n" || o.err != "problem\n" {
		t.Errorf("stdout %q, stderr %q", o.out, o.err)
	}
}

func TestRunWaitsNoLongerThanItsLimit(t *testing.T) {
	t.Parallel()
	url := store(t)
	holder := hold(t, url)
	for _, flags := range [][]string{{"-n"}, {"--no-wait"}, {"--wait", "0"}, {"-w", "1.5"}, {"--wait", "2s"}} {
		o := runHasp(t, url, slices.Concat([]string{"run", "key"}, flags, []string{"--", "echo", "ran"})...).want(t, exitNotAcquired)
		o.prints(t, "")
		contains(t, o.err, `"key" is held by "`, "/hasp run sh")
		if strings.Contains(o.err, "got") { // printed only with the key
			t.Errorf("%q: stderr: %s", flags, o.err)
		}
	}
	holder.free().want(t, 0)
	lock(t, url, 0, "--no-wait")
}

// withTerm checks that a lock is held past its term. If the machine stands still for a whole term,
// the lock is lost. So withTerm tries again with longer terms.
func withTerm(t *testing.T, holds func(ttl time.Duration) bool) {
	t.Helper()
	for _, ttl := range []time.Duration{3 * time.Second, 12 * time.Second, 40 * time.Second} {
		if holds(ttl) {
			return
		}
		t.Logf("not with a term of %v", ttl)
	}
	t.Error("lost")
}

// soonLost is a term. It is short enough that hasp notices a break within two seconds. It is long
// enough that a slow machine does not lose the lock before the test breaks it.
const soonLost = "6s"

func TestLossEndsTheCommand(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ script, grace, out string }{
		"which cleans up": {
			`trap 'echo cleaning up; exit 0' TERM; echo ready; while :; do sleep 0.05; done`, "1m", "cleaning up"},
		"which ignores SIGTERM": {
			`trap '' TERM; echo ready; while :; do sleep 0.05; done`, "100ms", ""},
		// The command ends at once, and its child takes longer. The test waits until the child has
		// closed the output.
		"and its child, which cleans up": {
			`sh -c 'trap "sleep 0.3; echo child ends; exit" TERM; echo ready; while :; do sleep 0.05; done' & wait`, "10m", "child ends"},
		"and its child, which ignores SIGTERM": {
			`sh -c 'trap "" TERM; echo ready; while :; do sleep 0.05; done' & wait`, "200ms", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url := store(t)
			p := script(t, url, c.script, "--ttl", soonLost, "--grace", c.grace)
			contains(t, runHasp(t, url, "break", "key", "--force").want(t, 0).out, "work may still be running")
			o := p.wait().want(t, exitLost)
			contains(t, o.out, c.out)
			contains(t, o.err, `hasp: lost "key": the store does not have it any more`)
		})
	}
}

// If hasp has not noticed the loss while the command ran, the unlock finds it.
func TestLossIsReportedAtTheEnd(t *testing.T) {
	t.Parallel()
	url := store(t)
	p := hold(t, url, "--ttl", "10m")
	runHasp(t, url, "break", "key", "--force").want(t, 0)
	contains(t, p.free().want(t, exitLost).err, `lost "key" before the command ended`)
}

func TestRunSaysThatItWaits(t *testing.T) {
	t.Parallel()
	url := store(t)
	holder := hold(t, url)
	p := startHasp(t, url, "run", "key", "--", "true")
	p.err.expect(`hasp: waiting for "key", held by "`)
	holder.free().want(t, 0)
	o := p.wait().want(t, 0)
	if lines := strings.Split(o.err, "\n"); len(lines) != 3 || !strings.HasPrefix(lines[1], `hasp: got "key" after `) {
		t.Errorf("stderr: %s", o.err)
	}
}
