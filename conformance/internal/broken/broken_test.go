package broken_test

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp/conformance"
	"github.com/hasplock/hasp/conformance/internal/broken"
)

var full = flag.Bool("full", false, "run all clauses on every fault, not only the one that must catch it")

// overProcesses picks the clauses that cannot be run in virtual time.
func overProcesses(clause string) bool {
	return clause == "reach" || strings.HasPrefix(clause, "process-")
}

// check runs clauses on f in virtual time.
func check(t *testing.T, f broken.Fault, only func(clause string) bool) (all []conformance.Result) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		h := f.Harness()
		h.Only = func(clause string) bool { return !overProcesses(clause) && only(clause) }
		conformance.Check(t.Context(), h, func(r conformance.Result) { all = append(all, r) })
		time.Sleep(time.Hour) // for calls that a fault has left hanging
	})
	return all
}

func TestSoundDriversPass(t *testing.T) {
	for _, f := range broken.Sound() {
		t.Run(f.Name, func(t *testing.T) {
			t.Parallel()
			for _, r := range check(t, f, func(string) bool { return true }) {
				switch r.Status {
				case conformance.Fail:
					t.Errorf("%s: %v", r.Name, r.Err)
				case conformance.Skip:
					t.Logf("%s: skipped: %s", r.Name, r.Reason)
				}
			}
		})
	}
}

// TestFaultsAreCaught prints which clause caught which fault, and with -full
// which others do.
func TestFaultsAreCaught(t *testing.T) {
	faults := broken.Faults()
	if len(faults) < 15 {
		t.Fatalf("only %d faults", len(faults))
	}
	var mu sync.Mutex // guards table
	table := make([]string, len(faults))
	t.Run("faults", func(t *testing.T) {
		for i, f := range faults {
			t.Run(f.Name, func(t *testing.T) {
				var line string
				if overProcesses(f.Clause) {
					line = caughtOverProcesses(t, f)
				} else {
					t.Parallel()
					line = caught(t, f, check(t, f, func(clause string) bool { return *full || clause == f.Clause }))
				}
				mu.Lock()
				defer mu.Unlock()
				table[i] = line
			})
		}
	})
	t.Logf("fault → clauses that caught it\n%s", strings.Join(table, "\n"))
}

// caught fails the test if the clause that is named beside f did not fail.
func caught(t *testing.T, f broken.Fault, all []conformance.Result) string {
	t.Helper()
	var others []string
	seen := ""
	for _, r := range all {
		switch {
		case r.Name == f.Clause && r.Status == conformance.Fail:
			seen, _, _ = strings.Cut(r.Err.Error(), "\n")
		case r.Status == conformance.Fail:
			others = append(others, r.Name)
		}
	}
	if seen == "" {
		t.Errorf("not caught by %s, but by %q", f.Clause, others)
	}
	line := fmt.Sprintf("  %-62s %-32s %s", f.Name, f.Clause, seen)
	if len(others) > 0 {
		line += "; also " + strings.Join(others, ", ")
	}
	return line
}

// caughtOverProcesses runs one clause in real time. Its children run the same test by
// the arguments of the program. No test in parallel may read them meanwhile.
func caughtOverProcesses(t *testing.T, f broken.Fault) string {
	t.Helper()
	h := f.Harness()
	h.Only = func(clause string) bool { return clause == f.Clause }
	args := os.Args
	defer func() { os.Args = args }()
	os.Args = []string{args[0], "-test.run=^TestFaultsAreCaught$/^faults$/^" + strings.ReplaceAll(f.Name, " ", "_") + "$"}
	var all []conformance.Result
	if err := conformance.Check(t.Context(), h, func(r conformance.Result) { all = append(all, r) }); err == nil {
		t.Errorf("Check of %q returned no error", f.Name)
	}
	return caught(t, f, all)
}

func TestFaultsAreNamedOnce(t *testing.T) {
	seen := map[string]bool{}
	for _, f := range slices.Concat(broken.Sound(), broken.Faults()) {
		if seen[f.Name] {
			t.Errorf("two faults %q", f.Name)
		}
		seen[f.Name] = true
	}
}

// throughTheEngine are the clauses over histories and processes, and clauses that
// a driver's fault fails only together with clauses that call the driver itself.
var throughTheEngine = []string{"lock-", "lease-", "unlock-", "reentry", "client-", "list-client", "list-unsupported", "commands-reentry", "history-", "process-"}

// If no fault makes a clause fail, the clause may check nothing.
func TestEveryClauseCatchesAFault(t *testing.T) {
	h := broken.Sound()[0].Harness()
	h.Only = func(clause string) bool {
		engine := slices.ContainsFunc(throughTheEngine, func(prefix string) bool { return strings.HasPrefix(clause, prefix) })
		if !engine && !slices.ContainsFunc(broken.Faults(), func(f broken.Fault) bool { return f.Clause == clause }) {
			t.Errorf("no fault is caught by clause %s", clause)
		}
		return false
	}
	if err := conformance.Check(t.Context(), h, func(conformance.Result) {}); err != nil {
		t.Error(err)
	}
}
