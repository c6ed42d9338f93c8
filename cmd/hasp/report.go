package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// report says how the demo went, and what to try next.
func (a *app) report(d *demo, s summary) {
	ms := func(v float64) string { return short(time.Duration(v * float64(time.Millisecond))) }
	say := func(format string, args ...any) { fmt.Fprintf(a.out, "  "+format+"\n", args...) }
	good, bad := "ok", "WRONG"
	if isTerminal(a.out) {
		fmt.Fprintln(a.out)
	}
	switch {
	case d.noLock && s.OK:
		say("%s: %d of %d, by luck: nothing kept the workers apart. Once more?", good, s.Number, s.Expected)
		return
	case d.noLock:
		say("%s: the number is %d, and %s were made.", bad, s.Number, count(s.Expected, "increment", "increments"))
		say("Up to %d workers had read the same number before one of them wrote: %s overwritten.", s.HeldAtOnce,
			count(s.Expected-s.Number, "increment was", "increments were"))
		say("That is what a lock is for: %s demo", command(executable()))
		return
	case s.OK:
		say("%s: the number is %d after %d increments by %s, in %.1fs.", good, s.Number, s.Expected,
			count(s.Workers, "process", "processes"), s.Seconds)
	default:
		say("%s: the number is %d after %d increments; up to %d workers held the lock at once.", bad, s.Number, s.Expected, s.HeldAtOnce)
	}
	if s.Heir > 0 {
		say("Worker %d was killed with SIGKILL while it held the lock; worker %d took over %s later, when its term of %s had run out.",
			s.Killed, s.Heir, ms(s.Takeover), short(d.ttl))
	}
	say("Median hold %s, longest wait %s.", ms(s.MedianHold), ms(s.LongestWait))
	if d.svg != "" {
		say("The timeline is in %s", plain(d.svg))
	}
	if d.store.Strategy == "filelock" && s.OK {
		hasp := command(executable())
		fmt.Fprintln(a.out)
		say("Without the lock:         %s demo --no-lock", hasp)
		say("A command under a lock:   %s run backup -- sh -c 'echo only one at a time; sleep 1'", hasp)
		say("With a Redis:             %s demo --url spinlock+redis://localhost:6379", hasp)
	}
}

func executable() string {
	exe, err := os.Executable()
	if err != nil {
		return ""
	}
	return exe
}

// command returns what the user can paste to start the program exe again. What
// "go run" started is in the build cache or already removed.
func command(exe string) string {
	found, err := exec.LookPath("hasp")
	switch {
	case strings.Contains(exe, "go-build"):
		return "go run github.com/hasplock/hasp/cmd/hasp"
	case exe == "" || err == nil && filepath.Clean(found) == exe:
		return "hasp"
	}
	return exe
}
