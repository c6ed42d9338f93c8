package cli

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/hasplock/hasp/internal/await"
)

// whereAmI is a shell script that prints whether it is in the foreground.
const whereAmI = `set -- $(cut -d' ' -f5,8 /proc/self/stat); [ $1 = $2 ] && echo foreground || echo background; `

// does makes one step of a session: a word for what happens, and a text.
func (s *session) does(step string) {
	s.t.Helper()
	word, text, _ := strings.Cut(step, " ")
	switch word {
	case "types":
		s.types(text)
	case "orders": // of the shell
		s.order(text)
	case "sees":
		s.expect(text)
	case "piped":
		s.piped.expect(text)
	case "shell": // what it reports
		s.report.expect(text)
	case "held":
		lock(s.t, s.url, exitNotAcquired, "--no-wait")
	default:
		s.t.Fatalf("not a step: %q", step)
	}
}

func TestRunOnATerminal(t *testing.T) {
	t.Parallel()
	reads := []string{"run", "key", "--", "sh", "-c", whereAmI + `read x; echo "got $x"`}
	broken := []string{"run", "key", "--", file(t, "program", "#!/hasp/no/such/interpreter\n", 0o700)}
	for name, c := range map[string]struct {
		args  []string
		piped bool
		steps []string
	}{
		"is taken back from a command that cannot run": {broken, false, []string{"shell exited 127: the job has the terminal"}},
		"sends Ctrl-C to the command":                  {runSteady(t), false, []string{"sees ready", "types \x03", "sees caught", "shell exited 4"}},
		"stops at Ctrl-Z, and goes on at fg": {reads, false, []string{
			"sees foreground", "types \x1a", "shell stopped: the job has the terminal", "held",
			"orders fg", "types more\n", "sees got more", "shell exited 0: the job has the terminal"}},

		// If hasp runs in $(…) or a pipe, it lends the terminal when the command reads from it.
		// Before that, Ctrl-C and Ctrl-Z reach hasp, which passes them on.
		"is lent to a command in a pipe when it reads": {reads, true, []string{
			"piped background", "types text\n", "piped got text", "shell exited 0: the job has the terminal"}},
		"passes keys on to a command in a pipe": {runSteady(t), true, []string{
			"piped ready", "types \x1a", "shell stopped", "orders fg", "shell continued",
			"types \x03", "piped caught", "shell exited 4"}},

		// A shell does the same with any other job.
		"stops a job in the background when its command reads": {append(slices.Clip(reads), "&"), false, []string{
			"sees background", "shell stopped: the shell has the terminal",
			"orders fg", "types text\n", "sees got text", "shell exited 0: the job has the terminal"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := startSession(t, store(t), c.piped, c.args...)
			for _, step := range c.steps {
				s.does(step)
			}
		})
	}
}

func TestCtrlCEndsTheCommandAndHaspAndTheScriptAroundIt(t *testing.T) {
	t.Parallel()
	url := store(t)
	s := startJobIn(t, self(t, "shell", url, "/bin/sh", "-c", `"$0" "$@"; echo went on`,
		executable(t), "run", "key", "--", "sh", "-c", "echo ready; exec sleep 600"), false)
	s.expect("ready")
	s.types("\x03")
	s.report.expect("killed by 2: the job has the terminal")
	lock(t, url, 0, "--no-wait") // hasp has unlocked the key
	s.expect(farewell)
	if strings.Contains(s.String(), "went on") {
		t.Error("the script went on")
	}
}

// fg comes after the term. Then the lock is lost, and the command must not continue.
func TestCtrlZPastTheTerm(t *testing.T) {
	t.Parallel()
	url := store(t)
	file := t.TempDir() + "/work"
	// Use dd and not a program in Go. Go handles SIGTERM on one thread, while others continue.
	s := startSession(t, url, false, "run", "key", "--ttl", "3s", "--",
		"sh", "-c", `exec dd if=/dev/zero of="$0" bs=1`, file)
	await.Until(t, "the command begins", func() bool {
		f, err := os.Stat(file)
		return err == nil && f.Size() > 0
	})
	s.types("\x1a")
	s.report.expect("stopped")
	lock(t, url, 0, "--wait", "1m")
	before := await.Value(os.Stat(file))
	s.order("fg")
	s.report.expect(fmt.Sprintf("exited %d: the job has the terminal", exitLost))
	s.expect("the process was stopped for longer than its term")
	after, err := os.Stat(file)
	if err != nil || after.Size() != before.Size() {
		t.Errorf("the command continued without the lock: it wrote %d bytes (%v)", after.Size()-before.Size(), err)
	}
}

// After a loss, hasp lead waits as before its first command: it says so, and Ctrl-Z stops it. The
// key changes hands while hasp is stopped, so that hasp cannot take it back before.
func TestCtrlZStopsALeadThatWaitsAgain(t *testing.T) {
	t.Parallel()
	url := store(t)
	s := startSession(t, url, false, "lead", "key", "--ttl", soonLost, "--", "sh", "-c", "echo it leads; exec sleep 600")
	s.expect("it leads")
	s.types("\x1a")
	s.report.expect("stopped")
	breakKey(t, url)
	holder := hold(t, url)
	s.order("fg")
	s.expect("waiting for")
	s.types("\x1a")
	s.report.times(2, "stopped")
	s.order("fg")
	s.report.times(2, "continued")
	holder.free()
	s.times(2, "it leads")
	s.types("\x03")
	s.report.expect("killed by 2")
}

// After kill -STOP and bg, the shell has the terminal. hasp must not take it.
func TestTerminalIsNotTakenFromTheShell(t *testing.T) {
	t.Parallel()
	file := t.TempDir() + "/go"
	s := startSession(t, store(t), false, "run", "key", "--", "sh", "-c",
		`trap 'echo goes on' CONT; echo "hasp is $PPID."; while ! [ -e "$0" ]; do sleep 0.05; done`, file)
	s.expect(".\r\n")
	var pid int
	await.Value(fmt.Sscanf(s.String(), "hasp is %d.", &pid))
	must(t, unix.Kill(pid, unix.SIGSTOP))
	s.report.expect("stopped")
	s.order("bg")
	s.report.expect("continued")
	s.expect("goes on") // hasp checks the terminal before it passes SIGCONT on
	must(t, os.WriteFile(file, nil, 0o600))
	s.report.expect("exited 0: the shell has the terminal")
}

// Under ssh or in a container, no shell would continue hasp. So Ctrl-Z must not stop it.
func TestCtrlZWithoutAShellGoesOn(t *testing.T) {
	t.Parallel()
	p := startOnPTY(t, self(t, "hasp", store(t), "run", "key", "--", "sh", "-c", "echo ready; read x; echo got $x; read y"))
	p.expect("ready")
	p.types("\x1a")
	p.types("text\n")
	p.expect("got text")
}

func TestBreakAsks(t *testing.T) {
	t.Parallel()
	for answer, want := range map[string]struct{ says, code string }{
		"y\n":  {"broke \"key\"", "exited 0"},
		"n\n":  {"was not broken", "exited 1"},
		"\n":   {"was not broken", "exited 1"},
		"\x03": {"ended by signal", "exited 130"},
	} {
		t.Run(fmt.Sprintf("%q", answer), func(t *testing.T) {
			t.Parallel()
			url := store(t)
			hold(t, url)
			s := startSession(t, url, false, "break", "key")
			s.expect("Break it? [y/N]")
			s.types(answer)
			s.expect(want.says)
			s.report.expect(want.code)
		})
	}
}

func TestBreakConcernsTheHolderOfTheQuestion(t *testing.T) {
	t.Parallel()
	for _, isTaken := range []bool{true, false} {
		url := store(t)
		first := hold(t, url)
		s := startSession(t, url, false, "break", "key")
		s.expect("Break it? [y/N]")
		first.free().want(t, 0)
		if isTaken {
			second := hold(t, url)
			defer func() { second.free().want(t, 0) }() // it has not lost the key
		}
		s.types("y\n")
		s.expect("has changed hands")
		s.report.expect("exited 1")
	}
}
