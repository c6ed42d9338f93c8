//go:build unix

package cli

import (
	"regexp"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hasplock/hasp/internal/redistest"
)

// runCase is a line of arguments for hasp. HASP in the line is hasp itself, and URL is the URL of
// the store. What follows a "$" is a script, which a shell runs at the end of the line.
type runCase struct {
	line string
	code int
	out  string
	says string // on stderr; "" means nothing
}

func (c runCase) check(t *testing.T, url string) {
	t.Helper()
	line, script, hasScript := strings.Cut(c.line, " $ ")
	args := strings.Fields(strings.NewReplacer(" HASP ", " "+executable(t)+" ", "URL", url).Replace(line))
	if hasScript {
		args = append(args, "sh", "-c", script)
	}
	o := runHasp(t, url, args...).want(t, c.code)
	o.prints(t, strings.ReplaceAll(c.out, "URL", url))
	if c.says == "" && o.err != "" {
		t.Errorf("stderr: %s", o.err)
	}
	contains(t, o.err, c.says)
	lock(t, url, 0, "--no-wait") // the key is free
}

func TestRun(t *testing.T) {
	t.Parallel()
	noInterpreter := file(t, "script", "exit 7\n", 0o700) // a script without #!
	plain := file(t, "plain", "no program", 0o600)
	dir, fair := t.TempDir(), "fairlock+"+redistest.Start(t, nil).URL()+"?prefix="
	const slots = "run key --slots 2 -- HASP run key --slots 2 -- "
	for name, c := range map[string]runCase{
		"success":                {"run key -- true", 0, "", ""},
		"its own code":           {"run key -- $ exit 3", 3, "", ""},
		"a code that hasp uses":  {"run key -- $ exit 75", 75, "", ""},
		"its own stderr":         {"run key -- $ echo text; echo problem >&2", 0, "text\n", "problem\n"},
		"ended by a signal":      {"run key -- $ kill -KILL $$", 128 + 9, "", ""},
		"a script without shell": {"run key -- " + noInterpreter, 7, "", ""},
		"not found":              {"run key -- hasp-no-such-command", exitNotFound, "", `cannot run "hasp-no-such-command": executable file not found in $PATH`},
		"no such file":           {"run key -- " + dir + "/none", exitNotFound, "", "no such file or directory"},
		"not executable":         {"run key -- " + plain, exitCannotRun, "", "permission denied"},
		"a directory":            {"run key -- " + dir, exitCannotRun, "", "is a directory"},
		"ended by its max hold":  {"run key --max-hold 1 -- $ sleep 600", exitLost, "", "its max hold is over"},
		"lead":                   {`lead key --fence -- $ echo "$HASP_KEY ${HASP_FENCE:+fence}"; exit 7`, 7, "key fence\n", `leads "key"`},
		"lead, not found":        {"lead key -- hasp-no-such-command", exitNotFound, "", "cannot run"},
		"lead, a directory":      {"lead key -- " + dir, exitCannotRun, "", "is a directory"},

		"knows its key and its store": {`run key -- $ echo "$HASP_KEY ${HASP_FENCE-none} $HASP_URL"`, 0, "key none URL\n", ""},
		"knows its fence":             {`run key --fence -- $ [ "$HASP_FENCE" -gt 0 ] && echo "$HASP_KEY"`, 0, "key\n", ""},
		"knows its slot":              {slots + `$ [ "$HASP_SLOT" -lt 2 ] && echo "$HASP_KEY"`, 0, "key\n", ""}, // the second slot

		// What the run around it has does not reach the command.
		"no fence of the run around it": {`run outer --fence -- HASP run inner -- $ echo "$HASP_KEY ${HASP_FENCE-none}"`, 0, "inner none\n", ""},
		"no slot of the run around it":  {`run key --slots 1 -- HASP run key -- $ echo "$HASP_KEY ${HASP_SLOT-none}"`, 0, "key none\n", ""},

		// A run inside another one with the same key waits for the outer run, which waits for it.
		"inside itself":      {"run a&b=c%20 -- HASP run a&b=c%20 --wait 1500ms -- echo ran", exitNotAcquired, "", "waiting for \"a&b=c%20\", held by \""},
		"inside all slots":   {slots + "HASP run key --slots 2 --no-wait -- echo ran", exitNotAcquired, "", "the command was not run"},
		"with another store": {"run key -- HASP run key --url filelock://" + t.TempDir() + " -- echo ran", 0, "ran\n", ""},
		"waits for a slot": {slots + "HASP run key --slots 2 --wait 1500ms -- echo ran", exitNotAcquired, "",
			`waiting for one of the 2 slots of "key"`},

		"both shared":            {"run key --shared -- HASP run key --no-wait --shared -- echo both", 0, "both\n", ""},
		"the inner one is alone": {"run key --shared -- HASP run key --no-wait -- echo ran", exitNotAcquired, "", `the two wait for each other; the command was not run`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url := store(t)
			if strings.Contains(c.line, "--shared") { // filelock cannot share a key
				url = fair + strings.ReplaceAll(name, " ", "-") + ":"
			}
			c.check(t, url)
		})
	}
}

func TestRunWithMinHold(t *testing.T) {
	t.Parallel()
	url := store(t)
	lock(t, url, 0, "--ttl", "3600", "--min-hold", "600")
	lock(t, url, exitNotAcquired, "--no-wait")
	out := runHasp(t, url, "inspect", "key").want(t, 0).out
	contains(t, out, "/hasp run true")
	if !regexp.MustCompile(`term +(10m0s|\dm\d+s) left`).MatchString(out) {
		t.Errorf("not the rest of 10m:\n%s", out)
	}
}

// A process that a command has left behind may lock the key that the command held, also if all
// programs have the same owner.
func TestRunOfAProcessThatIsLeft(t *testing.T) {
	t.Parallel()
	p := startHasp(t, store(t)+"?owner=ci", "run", "key", "--", "sh", "-c",
		`(while ! "$0" inspect key | grep -q free; do sleep 0.05; done; "$0" run key -- echo ran) &`, executable(t))
	p.wait().shows(t, "ran")
}

func TestRunWaitsNoLongerThanItsLimit(t *testing.T) {
	t.Parallel()
	url := store(t)
	holder := hold(t, url)
	for _, flags := range [][]string{{"-n"}, {"--no-wait"}, {"--wait", "0"}, {"-w", "1.5"}, {"--wait", "2s"}} {
		o := runHasp(t, url, runs(flags, "echo", "ran")...).want(t, exitNotAcquired)
		o.prints(t, "")
		contains(t, o.err, `"key" is held by "`, "/hasp run sh")
		if strings.Contains(o.err, "got") { // printed only with the key
			t.Errorf("%q: stderr: %s", flags, o.err)
		}
	}
	holder.free().want(t, 0)
	lock(t, url, 0, "--no-wait")
}

// A job of cron that finds the key taken is no failure. Other failures are.
func TestRunSkipsACommandWhoseKeyIsHeld(t *testing.T) {
	t.Parallel()
	url := store(t)
	holder := hold(t, url)
	for _, flags := range [][]string{{"--skip"}, {"--skip", "-n"}, {"--skip", "-w", "1.5"}} {
		o := runHasp(t, url, runs(flags, "echo", "ran")...).want(t, 0)
		o.prints(t, "")
		if o.err != "" {
			t.Errorf("%q: stderr: %s", flags, o.err)
		}
	}
	holder.free().want(t, 0)

	runHasp(t, url, "run", "key", "--skip", "--ttl", "10", "--", "echo", "ran").want(t, 0).prints(t, "ran\n")
	runHasp(t, url, "run", "key", "--skip", "--", "sh", "-c", "exit 75").want(t, exitNotAcquired)
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
			runHasp(t, url, "break", "key", "--force").shows(t, "work may still be running")
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
	breakKey(t, url)
	p.free().fails(t, exitLost, `lost "key" before the command ended`)
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

// If the server hangs, a command prints one line of error within the timeout.
func TestServerHangs(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t, redistest.Own)
	s.Pause()
	defer s.Resume()
	began := time.Now()
	for _, args := range [][]string{{"inspect", "key"}, {"ls"}, {"run", "key", "--", "true"}, {"break", "key", "--force"}} {
		runHasp(t, "spinlock+redis://"+s.Addr+"?timeout=2s", args...).refused(t, exitStore, "no answer")
	}
	if took := time.Since(began); took > patience {
		t.Errorf("took %v", took)
	}
}

// The exit code is the command's, although the outcome of the unlock is unknown.
func TestServerIsGoneAtTheEnd(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t, redistest.Own)
	p := script(t, redisURL(t, s), "echo ready; cat; exit 5", "--ttl", "10m")
	s.Kill()
	p.free().fails(t, 5, "the key is free when its term is over")
}

func TestSignalsReachTheWholeGroup(t *testing.T) {
	t.Parallel()
	for _, sig := range []unix.Signal{unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGQUIT, unix.SIGUSR1, unix.SIGUSR2, unix.SIGWINCH} {
		name := unix.SignalName(sig)
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			short := strings.TrimPrefix(name, "SIG")
			p := script(t, store(t), `trap 'echo leader; exit 9' `+short+`
				 sh -c 'trap "echo child; exit" `+short+`; echo ready; while :; do sleep 0.05; done'
				 exit 1`)
			p.signal(sig)
			contains(t, p.wait().want(t, 9).out, "leader", "child")
		})
	}
}

func TestIgnoredSignalStaysIgnored(t *testing.T) {
	t.Parallel()
	cmd := self(t, "hasp", store(t), "run", "key", "--", "sh", "-c", "echo ready; cat; echo survived")
	p := start(t, inShell(cmd, `trap '' HUP; exec "$0" "$@"`))
	p.out.expect("ready")
	p.signal(unix.SIGHUP)
	p.free().shows(t, "survived")
}
