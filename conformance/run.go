package conformance

import (
	"flag"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"
)

// Run does what [Check] does, as a test with a subtest for each clause. Clauses run at the same
// time unless -run or -skip selects some clauses. Then only these clauses run, one after another.
func Run(t *testing.T, h Harness) {
	t.Helper()
	if h.Name == "" {
		h.Name = t.Name()
	}

	ctx := t.Context()
	if err := serveIfChild(ctx, h); err != nil {
		t.Skip(err) // the child belongs to another test of the program, which may still come
	}
	s, err := newSuite(ctx, h, testArgs(t.Name()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.stop)

	// If flags select some subtests, only package testing knows which. So each subtest then runs
	// its own clause. Otherwise all clauses start now, and each subtest waits for its result. The
	// pattern of -run selects subtests if it has more parts than the name of this test.
	value := func(f string) string { return flag.Lookup(f).Value.String() }
	runSelects := strings.Count(value("test.run"), "/") > strings.Count(t.Name(), "/")
	selected := runSelects || value("test.skip") != ""
	var results []chan Result
	if !selected {
		results = s.start(ctx)
	}

	counts := map[string]int{} // the number of results, by their status
	for i, c := range s.clauses() {
		t.Run(c.name, func(t *testing.T) {
			var r Result
			if selected {
				r = s.run(ctx, c)
			} else {
				r = <-results[i]
			}
			counts[r.Status]++
			report(t, r)
		})
	}

	fmt.Println(summary(h, counts))
}

// summary returns one line about how much a run has checked. The line is printed even without -v,
// so that users notice skipped clauses in a test that passes.
func summary(h Harness, counts map[string]int) string {
	line := fmt.Sprintf("conformance: %s: %d clauses passed, %d failed, %d skipped", h.Name,
		counts[passed], counts[failed], counts[skipped])
	var missing []string
	for _, hook := range hooks {
		if !h.has(hook) {
			missing = append(missing, hook)
		}
	}
	if len(missing) > 0 {
		line += "; hooks that are nil: " + strings.Join(missing, ", ")
	}
	return line
}

// report makes r the outcome of a subtest.
func report(t *testing.T, r Result) {
	t.Helper()
	switch r.Status {
	case skipped:
		t.Skip(r.Reason)
	case failed:
		t.Errorf("%v\n%s: %s\nPackage backend: %q", r.Err, r.Name, r.Why, r.Contract)
	default:
		t.Logf("%s (%v)", r.Why, r.Elapsed.Round(time.Millisecond))
		if r.Reason != "" {
			t.Log(r.Reason)
		}
	}
}

// testArgs returns arguments with which a test binary runs only the test of this name. The
// program's own arguments follow, but for those of package testing.
func testArgs(name string) []string {
	parts := strings.Split(name, "/")
	for i := range parts {
		parts[i] = "^" + regexp.QuoteMeta(parts[i]) + "$"
	}
	args := []string{"-test.run=" + strings.Join(parts, "/"), "-test.count=1", "-test.timeout=10m"}
	for _, a := range os.Args[1:] {
		if !strings.HasPrefix(a, "-test.") && !strings.HasPrefix(a, "--test.") {
			args = append(args, a)
		}
	}
	return args
}
