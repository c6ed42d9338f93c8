package demo

import (
	"cmp"
	"fmt"
	"io"
	"os"
	"regexp"
	"time"

	"github.com/hasplock/hasp/internal/cli/text"
)

// Summary is the outcome of a demo. The JSON names of times end with their unit.
type Summary struct {
	OK         bool    `json:"ok"`       // Number and the reported increments are right
	Expected   int     `json:"expected"` // the number if no increment is lost
	Number     int     `json:"number"`
	Store      string  `json:"store"`   // the strategy, or "none"
	Workers    int     `json:"workers"` // without the worker that starts after the kill
	Seconds    float64 `json:"seconds"`
	HeldAtOnce int     `json:"held_at_once"`            // the most workers that held the lock at the same time
	Killed     int     `json:"killed_worker,omitempty"` // the number of the worker, from 1
	KilledPID  int     `json:"killed_pid,omitempty"`
	Heir       int     `json:"heir_worker,omitempty"` // the next holder after the kill, from 1
	Takeover   float64 `json:"takeover_ms,omitempty"` // from the kill until the heir held the lock
}

func (r *referee) summary(number int) Summary {
	s := Summary{
		OK:         number == r.expected() && r.done() == r.expected(),
		Expected:   r.expected(),
		Number:     number,
		Store:      cmp.Or(r.Store.Strategy, "none"),
		Workers:    r.Workers,
		Seconds:    r.end.Seconds(),
		HeldAtOnce: r.atOnce,
	}
	if k := r.death; k != nil {
		s.Killed, s.KilledPID = k.lane+1, r.lanes[k.lane].pid
		if k.heir >= 0 {
			s.Heir, s.Takeover = k.heir+1, float64(k.takeover.Microseconds())/1000
		}
	}
	return s
}

// report prints how the demo ended, and what to try next.
func (d *Demo) report(out io.Writer, s Summary) {
	say := func(format string, args ...any) { fmt.Fprintf(out, "  "+format+"\n", args...) }
	hasp := command(os.Args[0])

	switch {
	case d.NoLock && s.OK:
		say("ok: %d of %d, by luck: no lock kept the workers apart. Try it again.", s.Number, s.Expected)
		return
	case d.NoLock:
		say("WRONG: the number is %d, and %s were made.", s.Number, text.Count(s.Expected, "increment", "increments"))
		say("Up to %d workers had read the same number before one of them wrote: %s overwritten.", s.HeldAtOnce,
			text.Count(s.Expected-s.Number, "increment was", "increments were"))
		say("A lock prevents that: %s demo", hasp)
		return
	case s.OK:
		say("ok: the number is %d after %d increments by %s, in %.1fs.", s.Number, s.Expected,
			text.Count(s.Workers, "process", "processes"), s.Seconds)
	default:
		say("WRONG: the number is %d after %d increments; up to %d workers held the lock at once.", s.Number, s.Expected, s.HeldAtOnce)
	}

	if s.Heir > 0 {
		say("Worker %d was killed while it held the lock. Its term of %s ended, and worker %d took over %s after the kill.",
			s.Killed, text.Duration(d.TTL), s.Heir, text.Duration(time.Duration(s.Takeover*float64(time.Millisecond))))
	}
	if d.Store.Strategy == "filelock" && s.OK {
		fmt.Fprintln(out)
		say("Without the lock:         %s demo --no-lock", hasp)
		say("A command under a lock:   %s run backup -- sh -c 'echo only one at a time; sleep 1'", hasp)
		say("With a Redis:             %s demo --url spinlock+redis://localhost:6379", hasp)
	}
}

// goRun matches the path of a program that "go run" has started. Such a program is in a temporary
// directory, or in the build cache, in a directory whose name is a hash.
var goRun = regexp.MustCompile(`go-build|[0-9a-f]{64}-d`)

// command returns a command line that starts this program again.
func command(program string) string {
	if goRun.MatchString(program) {
		return "go run github.com/hasplock/hasp/cmd/hasp"
	}
	return program
}
