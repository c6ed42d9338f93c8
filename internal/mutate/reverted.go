//go:build unix

package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// fix is the fix of an earlier defect. Edits revert it.
type fix struct {
	id, defect, reverted string
	edits                []replacement
	finders              []string // commands that may find the defect; one must
}

// replacement is an edit of a file that has the old text once.
type replacement struct{ file, old, new string }

// The commands are those of go, without "go".
var fixes = []fix{
	{
		"L1", "redlock: marks of the nodes expire after a month",
		"`mark.lua` writes marks with `PX` of 30 days, and a renewal does not ask for a mark",
		[]replacement{
			{"redlock/mark.lua", "redis.call('SET', KEYS[1], mark)", "redis.call('SET', KEYS[1], mark, 'PX', 2592000000)"},
			{"redlock/renew.go", "if s == nil || run != runOfMark(s.mark) {", "if s == nil || run != \"\" && run != runOfMark(s.mark) {"},
		},
		[]string{
			"test ./redlock -run TestRenewalsKeepMarks|TestAMarkOutlivesAnyTimeWithoutVotes",
			"run ./internal/simulate -kind leader -seeds 300",
			"test ./redlock -run Conformance",
		},
	},
	{
		"O1", "redlock: Close after Unlock leaves a vote for a term",
		"a release does not wait for the commands in flight once Close has begun",
		[]replacement{
			{"redlock/release.go", "<-n.d.settled(a, n.i)", "select {\n\t\tcase <-n.d.settled(a, n.i):\n\t\tcase <-n.d.closing.Done():\n\t\t\treturn no, nil\n\t\t}"},
		},
		[]string{
			"test ./redlock -run TestCloseLeavesNothing",
			"run ./internal/simulate -kind redlock3 -seeds 200",
			"run ./internal/torture -clocks=false -strategy redlock -time 5s -seed 1",
			"test ./redlock -run Conformance",
		},
	},
	{
		"O2", "redlock: a lost lease leaves its records on a minority",
		"a refused renewal is not followed by a release",
		[]replacement{
			{"renew.go", "\t\tc.reapHoldLocked(h, 0)\n\tdefault:", "\tdefault:"},
		},
		[]string{
			"test . -run TestTokenOfALostLeaseIsReleased",
			"run ./internal/simulate -kind redlock3 -seeds 200",
			"run ./internal/torture -clocks=false -strategy redlock -time 30s -seed 1",
			"test ./redlock -run Conformance",
		},
	},
	{
		"F1", "the end of a context costs exponential time in nested leases",
		"the context of a lease asks Lock's context three times, and does not stop at one that has ended",
		[]replacement{
			{"context.go", "\tif x.Context.Err() != nil {\n\t\treturn\n\t}\n", "\t_, _, _ = x.lease.parent.Err(), x.lease.parent.Err(), x.lease.parent.Err()\n"},
		},
		[]string{
			"test . -run TestDeepReentryIsCancelledAtOnce",
			"run ./internal/simulate -kind polled -seeds 5000",
			"run ./internal/torture -clocks=false -strategy spinlock -time 5s -seed 2",
			"test ./spinlock -run Conformance",
		},
	},
	{
		"F2", "fairlock: a subscription stays at the old master behind an address",
		"a subscription keeps its connection after a refused write, and after a reply that it has no subscriber",
		[]replacement{
			{"internal/redisstore/send.go", "\t\ts.Demoted(at.rdb)\n", ""},
			{"fairlock/wait.go", "\tif r.unsubscribed {", "\tif r.unsubscribed && g == nil {"},
			{"fairlock/poll.go", "\t\tif r.unsubscribed {", "\t\tif r.unsubscribed && g == nil {"},
		},
		[]string{
			"test ./fairlock -run TestSubscriptionFollowsTheAddress",
			"test ./internal/redisstore/pubsub -run TestSubscriptionsLeaveAReplica",
			"run ./internal/torture -clocks=false -on service -strategy fairlock -time 2s -seed 5",
			"test ./fairlock -run Conformance",
		},
	},
	{
		"F4", "`replicas=N`: renewals queue behind holds that wait for replicas",
		"holds that wait for replicas take as many connections as there are",
		[]replacement{
			{"internal/redisstore/replicas.go", "maxLanes = 4", "maxLanes = 1 << 20"},
		},
		[]string{
			"test ./internal/redisstore -run TestRenewalsDoNotQueueBehindHoldsThatWaitForReplicas",
			"run ./internal/torture -clocks=false -on service -strategy spinlock -time 2s -seed 8",
			"test ./spinlock -run Conformance",
		},
	},
	{
		"W1", "callers in line get ErrHeld from a store that hangs",
		"a store that has not answered yet counts as held",
		[]replacement{
			{"line.go", "\t\treturn ln.lastAnswer\n\t}\n\n\tleft :=", "\t\treturn cmp.Or(ln.lastAnswer, errHeldHere)\n\t}\n\n\tleft :="},
			{"line.go", "\t\t\treturn nil // the store may hang", "\t\t\treturn errHeldHere // the store may hang"},
			{"line.go", "import (\n", "import (\n\t\"cmp\"\n"},
			{"wait.go", "\t\tif w.unanswered(sent) {", "\t\tif false {"},
			{"wait.go", "w.lastAnswer = w.heldHere()", "w.lastAnswer = cmp.Or(w.heldHere(), errHeldHere)"},
			{"wait.go", "import (\n", "import (\n\t\"cmp\"\n"},
		},
		[]string{
			"test . -run TestHungStoreIsNotHeldForThoseInLine|TestSilenceIsNotHeldForACallerInLine",
			"run ./internal/simulate -kind polled -seeds 20000",
			"run ./internal/torture -clocks=false -strategy spinlock -time 2s -seed 7",
			"test ./spinlock -run Conformance",
		},
	},
	{
		"W2", "redlock: TryLock says held while a majority is away",
		"a refusal by the lead alone counts as held",
		[]replacement{
			{"redlock/redlock.go", "case err != nil && lead != noLead:", "case err != nil && lead == noLead-1:"},
		},
		[]string{
			"test ./redlock -run TestAcquireWithoutAMajorityIsAnOutage",
			"run ./internal/simulate -kind redlock3 -seeds 200",
			"run ./internal/torture -clocks=false -strategy redlock -time 20s -seed 1",
			"test ./redlock -run Conformance",
		},
	},
	{
		"S1", "a place in the queue that outlives a suspend gives two holders",
		"the grant of a place counts from the suspends before the last Wait on it",
		[]replacement{
			{"wait.go", "token, slept = w.place.claim.Token, w.place.slept", "token = w.place.claim.Token"},
		},
		[]string{
			"test . -run TestPlaceThatOutlivesASuspend",
		},
	},
	{
		"S2", "a grant that was asked for before a suspend is trusted too long",
		"the term of a grant counts from the clock after the answer",
		[]replacement{
			{"hold.go", "\tuntil := start.add(term)\n\tif !g.Until", "\tuntil := start.add(term + now.sub(start))\n\tif !g.Until"},
		},
		[]string{
			"test . -run .",
			"run ./internal/simulate -kind polled -seeds 5000",
		},
	},
	{
		"S3", "a token of unknown outcome is forgotten if the machine sleeps for a term",
		"the clean-up measures its times with the time of sleep",
		[]replacement{
			{"clock.go", "func (k *clock) awake() instant { return instant(time.Since(k.base)) }", "func (k *clock) awake() instant { return k.now() }"},
		},
		[]string{
			"run ./internal/simulate -kind polled -seeds 20000",
		},
	},
}

// searchTime bounds one command.
const searchTime = 90 * time.Second

// revertFixes reverts one fix at a time, runs the commands that may find the defect, and
// prints a table of what they find. It reports whether each defect is found.
func (r *runner) revertFixes(ctx context.Context, ids string) (ok bool, err error) {
	ok = true
	fmt.Println("| id | command | found | seconds |\n|---|---|---|---:|")
	for _, f := range fixes {
		if ids != "all" && !strings.Contains(","+ids+",", ","+f.id+",") {
			continue
		}
		overlay, err := r.revert(f)
		if err != nil {
			return false, err
		}
		foundOne := false
		for _, cmd := range f.finders {
			by, took, err := r.search(ctx, cmd, overlay)
			if err != nil {
				return false, fmt.Errorf("%s: %w", f.id, err)
			}
			foundOne = foundOne || by != ""
			fmt.Printf("| %s | `%s` | %s | %.1f |\n", f.id, cmd, cmp.Or(by, "no"), took.Seconds())
		}
		ok = ok && foundOne
	}
	return ok, nil
}

// revert writes the files that revert f, and returns the overlay that puts them in place.
func (r *runner) revert(f fix) (overlay string, err error) {
	dir, err := os.MkdirTemp(r.dir, "revert")
	if err != nil {
		return "", err
	}
	replace := map[string]string{}
	for i, e := range f.edits {
		path := filepath.Join(r.root, e.file)
		text, err := os.ReadFile(cmp.Or(replace[path], path))
		if err != nil {
			return "", err
		}
		if n := bytes.Count(text, []byte(e.old)); n != 1 {
			return "", fmt.Errorf("%s: %s has %d times %q", f.id, e.file, n, e.old)
		}
		edited := filepath.Join(dir, fmt.Sprint(i, filepath.Base(path)))
		if err := os.WriteFile(edited, bytes.Replace(text, []byte(e.old), []byte(e.new), 1), 0o666); err != nil {
			return "", err
		}
		replace[path] = edited
	}
	all, err := json.Marshal(map[string]any{"Replace": replace})
	overlay = filepath.Join(dir, "overlay.json")
	return overlay, errors.Join(err, os.WriteFile(overlay, all, 0o666))
}

// search builds a program with the overlay and runs it. It returns what finds the defect:
// the test that fails, or how the program ends. It returns an empty string if nothing does.
func (r *runner) search(ctx context.Context, command, overlay string) (by string, took time.Duration, err error) {
	words := strings.Fields(command)
	s, args := stage{Redis: "process"}, words[2:]
	bin := filepath.Join(r.dir, "program")
	if words[0] == "test" {
		s.Dir, s.Run = words[1], words[3]
		bin, err = r.build(ctx, s.Dir, overlay)
		args = []string{"-test.v", "-test.failfast", "-test.run", s.Run}
	} else {
		build := exec.CommandContext(ctx, "go", "build", "-overlay="+overlay, "-o", bin, words[1])
		build.Dir = r.root
		var out []byte
		if out, err = build.CombinedOutput(); err != nil {
			err = fmt.Errorf("%w: %s", errBuild, out)
		}
	}
	if err != nil {
		return "", 0, err
	}
	defer os.Remove(bin)

	began := time.Now()
	res, err := r.watch(ctx, searchTime, s, append([]string{bin}, args...)...)
	return res.failed, time.Since(began), err
}
