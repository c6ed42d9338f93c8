package broken_test

import (
	"os"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp/conformance"
	"github.com/hasplock/hasp/conformance/internal/broken"
	"github.com/hasplock/hasp/internal/await"
)

// overProcesses reports whether a clause starts processes, and so cannot run in virtual time.
func overProcesses(clause string) bool {
	return clause == "reach" || strings.HasPrefix(clause, "process-")
}

func check(t *testing.T, f broken.Fault, only func(clause string) bool) (all []conformance.Result) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		h := f.Harness()
		h.Only = func(clause string) bool { return !overProcesses(clause) && only(clause) }
		conformance.Check(t.Context(), h, func(r conformance.Result) { all = append(all, r) })
		time.Sleep(time.Hour) // ends calls that hang because of the fault
	})
	return all
}

func TestSoundDriversPass(t *testing.T) {
	for _, f := range broken.Sound() {
		t.Run(f.Name, func(t *testing.T) {
			t.Parallel()
			for _, r := range check(t, f, func(string) bool { return true }) {
				switch r.Status {
				case "fail":
					t.Errorf("%s: %v", r.Name, r.Err)
				case "skip":
					t.Logf("%s: skipped: %s", r.Name, r.Reason)
				}
			}
		})
	}
}

// TestFaultsAreCaught also logs the error by which each clause caught its fault.
func TestFaultsAreCaught(t *testing.T) {
	for _, f := range broken.Faults() {
		t.Run(f.Name, func(t *testing.T) {
			var all []conformance.Result
			clauses := strings.Fields(f.Clause)
			if overProcesses(f.Clause) {
				all = overOwnProcesses(t, f)
			} else {
				t.Parallel()
				only := func(clause string) bool { return slices.Contains(clauses, clause) }
				all = check(t, f, only)
			}

			if len(all) != len(clauses) {
				t.Errorf("%d results of the clauses %q", len(all), clauses)
			}

			for _, r := range all {
				if r.Status != "fail" {
					t.Errorf("not caught by %s: %+v", r.Name, r)
				}

				t.Logf("%s: %v", r.Name, r.Err)
			}
		})
	}
}

// overOwnProcesses runs one clause in real time. It sets os.Args, so that the clause's child
// processes run the same test. No other test may read os.Args meanwhile.
func overOwnProcesses(t *testing.T, f broken.Fault) (all []conformance.Result) {
	t.Helper()
	h := f.Harness()
	h.Only = func(clause string) bool { return clause == f.Clause }
	args := os.Args
	defer func() { os.Args = args }()
	subtest := strings.ReplaceAll(f.Name, " ", "_")
	os.Args = []string{args[0], "-test.run=^TestFaultsAreCaught$/^" + subtest + "$"}

	err := conformance.Check(t.Context(), h, func(r conformance.Result) { all = append(all, r) })
	if err == nil {
		t.Errorf("Check of %q returned no error", f.Name)
	}
	return all
}

// throughTheEngine has prefixes of clauses that need no fault of their own. A fault of a driver
// that makes one of them fail also makes a clause fail that calls the driver directly.
var throughTheEngine = []string{"list-client", "history-", "process-"}

// If no fault makes a clause fail, the clause may check nothing.
func TestEveryClauseCatchesAFault(t *testing.T) {
	var caught []string
	for _, f := range broken.Faults() {
		caught = append(caught, strings.Fields(f.Clause)...)
	}

	h := broken.Sound()[0].Harness()
	h.Only = func(clause string) bool {
		hasPrefix := func(prefix string) bool { return strings.HasPrefix(clause, prefix) }
		if !slices.ContainsFunc(throughTheEngine, hasPrefix) && !slices.Contains(caught, clause) {
			t.Errorf("no fault is caught by clause %s", clause)
		}
		return false
	}

	await.Must(t, conformance.Check(t.Context(), h, func(conformance.Result) {}))
}
