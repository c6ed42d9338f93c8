package line

import (
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/clock"
)

// Each step says what a caller of the line does, and, after ->, what callers learn from it. A
// caller may join, try (a TryLock) or join shared. The store may grant it a hold ("got"), refuse it
// ("held"), or not answer it ("outage"). The caller may hand the hold over, end it, or give up
// ("fail"). It may quit the line, or quit it "late", after a ticket has come.
func TestLineOfCallers(t *testing.T) {
	for _, tc := range []struct {
		name    string
		ordered bool
		steps   []string
	}{
		{"one after another", false, []string{
			"join a -> a asks", "join b -> b waits", "join c -> c waits",
			"got a ->", "end a -> b asks", "got b ->", "end b -> c asks", "got c ->", "end c ->"}},
		{"the hold is handed over", false, []string{
			"join a -> a asks", "join b -> b waits", "join c -> c waits",
			"got a ->", "hand a -> b has", "hand b -> c has", "end c ->"}},
		{"a row of hand-overs ends, and the next caller leaves a gap", false, []string{
			"join a -> a asks", "join b -> b waits", "join c -> c waits", "got a ->", "sleep 50ms ->",
			"hand a -> refused", "end a -> b asks later", "sleep 200ms ->", "got b ->", "end b -> c asks", "fail c ->"}},
		{"the head gives up in a gap, and the next caller leaves the rest of it", false, []string{
			"join a -> a asks", "join b -> b waits", "join c -> c waits", "got a ->", "sleep 50ms ->",
			"end a -> b asks later", "fail b -> c asks later", "fail c ->"}},
		{"the head gives up", false, []string{
			"join a -> a asks", "join b -> b waits", "held a ->", "sleep 1m ->", "fail a -> b asks", "fail b ->"}},
		{"a caller leaves the line", false, []string{
			"join a -> a asks", "join b -> b waits", "join c -> c waits", "quit b ->", "got a ->", "end a -> c asks", "fail c ->"}},
		{"a caller leaves when it has become the head", false, []string{
			"join a -> a asks", "join b -> b waits", "join c -> c waits", "fail a -> b asks", "late b -> c asks", "fail c ->"}},
		{"a caller leaves when it was handed the hold", false, []string{
			"join a -> a asks", "join b -> b waits", "got a ->", "hand a -> b has", "late b -> b must unlock", "end b ->"}},
		{"a TryLock does not wait", false, []string{
			"join a -> a asks", "try b -> b gone", "got a ->", "try b -> b gone", "end a ->", "try b -> b asks", "fail b ->"}},
		{"a shared caller has a line of its own", false, []string{
			"join a -> a asks", "shared b -> b asks", "shared c -> c asks", "got a ->", "got b ->", "end b ->", "fail c ->", "end a ->"}},
		{"an outage ends the waits that are as long", false, []string{
			"join a -> a asks", "join b -> b waits", "sleep 2s ->", "outage a ->", "join c -> c waits", "sleep 3s ->",
			"fail a -> b gone, c gone"}},
		{"an outage spares callers that came later", false, []string{
			"join a -> a asks", "outage a ->", "join b -> b waits", "sleep 2s ->", "join c -> c waits", "sleep 1s ->",
			"fail a -> b gone, c asks", "fail c ->"}},
		{"an answer ends the outage", false, []string{
			"join a -> a asks", "outage a ->", "join b -> b waits", "sleep 2s ->", "held a ->", "sleep 1s ->", "fail a -> b asks", "fail b ->"}},
		{"a hold ends the outage", false, []string{
			"join a -> a asks", "outage a ->", "join b -> b waits", "got a ->", "end a -> b asks", "join c -> c waits",
			"sleep 3s ->", "outage b ->", "fail b -> c asks later", "fail c ->"}},
		{"an Ordered driver has the queue", true, []string{
			"join a -> a asks", "join b -> b asks", "try c -> c gone", "got a ->", "got b ->", "end a ->", "end b ->", "try c -> c asks", "fail c ->"}},
		{"a TryLock at an Ordered driver asks in an outage", true, []string{
			"join a -> a asks", "outage a ->", "try b -> b asks", "fail b ->", "fail a ->"}},
	} {
		t.Run(tc.name, func(t *testing.T) { synctest.Test(t, func(t *testing.T) { follow(t, tc.ordered, tc.steps) }) })
	}
}

// follow makes the steps, and compares what the callers learn from each of them.
func follow(t *testing.T, ordered bool, steps []string) {
	q := &Queue{
		Clock:     clock.New(clock.Suspended, false),
		Ordered:   ordered,
		Timeout:   3 * time.Second,
		RoundTrip: func() time.Duration { return 0 },
		Changed:   func() {},
	}
	does := map[Step]string{MayAsk: "asks", MustWait: "waits", HaveLease: "has", GiveUp: "gone"}
	turns, lines, holds, tickets := map[string]*Turn{}, map[string]*Line{}, map[string]*Hold{}, map[string]Ticket{}

	for _, s := range steps {
		made, want, _ := strings.Cut(s, " ->")
		verb, who, _ := strings.Cut(made, " ")
		ln := lines[who]
		got := map[string]string{}
		learns := func(who string, tk Ticket) {
			tickets[who], got[who] = tk, who+" "+does[tk.Do]
			if tk.After > 0 {
				got[who] += " later"
			}
		}

		switch verb {
		case "join", "try", "shared":
			turns[who] = &Turn{Key: "k", Shared: verb == "shared", Since: q.Clock.Awake()}
			var tk Ticket
			lines[who], tk = q.Join(turns[who], verb == "try")
			learns(who, tk)
		case "got":
			holds[who] = &Hold{Granted: q.Clock.Now()}
			ln.Started(holds[who], 0, false)
		case "hand":
			next := ln.First()
			if next == nil || ln.RowOver(q.Clock.Now()) {
				got[who] = "refused"
				break
			}
			ln.Give(next, "lease")
			for other := range turns {
				if turns[other] == next {
					holds[other] = holds[who]
				}
			}
		case "end":
			ln.Ended(holds[who])
		case "held":
			ln.Answered(backend.ErrHeld, q.Clock.Awake())
		case "outage":
			ln.Answered(errors.New("outage"), q.Clock.Awake())
		case "fail":
			ln.LeaveWithoutHold()
		case "quit":
			ln.Quit(turns[who])
		case "late":
			turns[who].Ready <- tickets[who]
			if ln.Quit(turns[who]) != nil {
				got[who] = who + " must unlock"
			}
		case "sleep":
			d := await.Value(time.ParseDuration(who))
			time.Sleep(d)
		}

		for other, turn := range turns {
			select {
			case tk := <-turn.Ready:
				learns(other, tk)
			default:
			}
		}
		if got := strings.Join(slices.Sorted(maps.Values(got)), ", "); got != strings.TrimSpace(want) {
			t.Fatalf("%s: %q, want %q", made, got, strings.TrimSpace(want))
		}
	}
	if q.Callers != 0 || q.Open != 0 || len(q.lines) != 0 {
		t.Errorf("%d callers, %d holds and %d lines are left", q.Callers, q.Open, len(q.lines))
	}
}
