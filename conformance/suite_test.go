package conformance

import (
	"context"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"net"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redistest"
)

// inert is a driver for tests of the suite that make no calls of a driver.
type inert struct{ backend.Driver }

func (inert) Traits() backend.Traits { return backend.Traits{} }
func (inert) Close() error           { return nil }

func openInert(context.Context, string) (backend.Driver, error) { return inert{}, nil }

func TestVerdicts(t *testing.T) {
	boom := errors.New("boom")
	for name, tt := range map[string]struct {
		c      clause
		cannot string
		want   string
		text   string // a part of the reason or of the error
		times  int    // how often the clause is tried
	}{
		"pass": {clause{check: func(*env) {}}, "", passed, "", 1},
		"fail": {clause{check: func(*env) { must(boom) }}, "", failed, "boom", 1},
		"panic": {clause{check: func(*env) {
			panic("ouch")
		}}, "", failed, "ouch", 1},
		"not needed": {clause{need: fenced, check: func(*env) {
			must(boom)
		}}, "", skipped, "not Fenced by its Traits", 0},
		"no hook": {clause{need: link, check: func(*env) {
			must(boom)
		}}, "", skipped, "Harness.Link is nil", 0},
		"hook cannot": {clause{check: func(*env) {
			hooked(fmt.Errorf("no disk: %w", errors.ErrUnsupported))
		}}, "", skipped, "no disk", 1},
		"hook fails": {clause{check: func(*env) {
			hooked(boom)
		}}, "", failed, "boom", 1},
		"slow for ever, in a joined error": {clause{check: func(*env) {
			must(errors.Join(nil, slow("late")))
		}}, "", failed, "late", tries},
		"no answer for a timeout": {clause{check: func(e *env) {
			e.sleep(e.timeout)
			must(context.DeadlineExceeded)
		}}, "", failed, "deadline", tries},
		// If a slow machine may have caused the first failure, it does not count, and the result
		// says so.
		"slow once": {clause{check: func(e *env) {
			requireInTime(e.term > e.h.Term, "late")
		}}, "", passed, "late", 2},
		"slow once, and long holds may have expired": {clause{check: func(e *env) {
			if e.term == e.h.Term {
				e.sleep(e.long * 2 / 3)
				fail("late")
			}
		}}, "", passed, "late", 2},
		"declared": {clause{optional: true, check: func(*env) {
			must(boom)
		}}, "small", skipped, "small (boom)", 1},
		"declared, but met": {clause{optional: true, check: func(*env) {}}, "small", failed,
			"remove the declaration", 1},
		"does not return": {clause{check: func(e *env) {
			<-time.After(time.Hour)
		}}, "", failed, "TestVerdicts", 1},
		"one part does not return": {clause{check: func(e *env) {
			must(e.within("the call", func() error { <-e.ctx.Done(); return nil }))
		}}, "", failed, "the call does not return", 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newTestSuite(t)
				if tt.cannot != "" {
					s.h.Cannot = map[string]string{"it": tt.cannot}
				}
				var mu sync.Mutex // guards terms
				var terms []time.Duration
				tried := tt.c
				tried.name = "it"
				tried.check = func(e *env) {
					mu.Lock()
					terms = append(terms, e.term)
					mu.Unlock()
					tt.c.check(e)
				}

				r := s.run(t.Context(), &tried)
				mu.Lock()
				defer mu.Unlock()
				said := r.Reason
				if r.Err != nil {
					said = r.Err.Error()
				}
				says := strings.Contains(said, tt.text) && (tt.text == "") == (said == "")
				if r.Status != tt.want || !says || len(terms) != tt.times {
					t.Errorf("got %v %q with the terms %v", r.Status, said, terms)
				}
				time.Sleep(2 * time.Hour) // ends the tries that do not return
			})
		})
	}
}

// newTestSuite returns a suite over inert drivers. The end of the test stops it.
func newTestSuite(t *testing.T) *suite {
	t.Helper()
	s := await.Value(newSuite(t.Context(), Harness{Open: openInert}, nil))
	t.Cleanup(s.stop)
	return s
}

// In the last try, terms are about half a minute, and long holds outlast them.
func TestPace(t *testing.T) {
	for _, most := range []time.Duration{0, 2 * time.Minute, 10 * time.Second} {
		s := &suite{traits: backend.Traits{MaxTTL: most}}
		s.h.setDefaults()
		p := s.paceOf(tries - 1)
		if most == 0 && p.term < 63*s.paceOf(0).term {
			t.Errorf("terms grow from %v to %v", s.paceOf(0).term, p.term)
		}
		least := map[time.Duration]time.Duration{0: 25 * time.Second, 2 * time.Minute: 14 * time.Second}
		tooLong := most > 0 && p.long+2*backend.Drift(p.long) > most
		if p.term < least[most] || p.long < 8*p.term || tooLong {
			t.Errorf("with a MaxTTL of %v: %+v", most, p)
		}
	}
}

func TestHarnessIsChecked(t *testing.T) {
	stop := func(context.Context, string) error { return nil }
	for want, h := range map[string]Harness{
		"Open is nil":            {},
		"one of Stop and Start":  {Open: openInert, Stop: stop},
		`Others: "other" is nil`: {Open: openInert, Others: map[string]opener{"other": nil}},
		`no clause "relase"`: {Open: openInert,
			Cannot: map[string]string{"relase": "misspelt"}},
		"must meet \"acquire-": {Open: openInert,
			Cannot: map[string]string{"acquire-excludes": "too hard"}},
		"start the store: no": {Open: openInert, Store: func(context.Context) (string, func(), error) {
			return "", nil, errors.New("no")
		}},
		"open a driver: nil": {Open: func(context.Context, string) (backend.Driver, error) {
			return nil, nil
		}},
	} {
		err := Check(t.Context(), h, func(r Result) { t.Errorf("%s was tried", r.Name) })
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
}

func TestTable(t *testing.T) {
	seen := map[string]bool{}
	alone := false
	for _, c := range table {
		switch {
		case c.name == "" || strings.Trim(c.name, "abcdefghijklmnopqrstuvwxyz-") != "":
			t.Errorf("clause %q: want lower-case words with hyphens", c.name)
		case seen[c.name]:
			t.Errorf("two clauses %q", c.name)
		case !strings.HasSuffix(c.why, "."):
			t.Errorf("clause %s: why %q is not a sentence", c.name, c.why)
		case alone && !c.alone:
			t.Errorf("clause %s runs with others, after one that runs alone", c.name)
		}
		seen[c.name] = true
		alone = c.alone
	}
}

func TestAChildOfAnotherHarnessIsRefused(t *testing.T) {
	t.Setenv("HASP_CREW_ROLE", childRole+"\x1f"+`{"Name":"another","Store":"x"}`)
	if !Child() {
		t.Error("Child is false in a child")
	}
	opened := false
	err := Check(t.Context(), Harness{Name: "this", Open: func(context.Context, string) (backend.Driver, error) {
		opened = true
		return inert{}, nil
	}}, func(Result) {})
	if err == nil || opened {
		t.Errorf("a child of another harness: %v, opened a driver: %v", err, opened)
	}
}

func TestNothingIsTriedAfterTheFirstClause(t *testing.T) {
	refuses := func(context.Context, string) (backend.Driver, error) { return refusing{}, nil }
	tried := 0
	err := Check(t.Context(), Harness{Open: refuses}, func(r Result) {
		switch {
		case r.Name == firstClause:
			if r.Status != failed || tried > 0 {
				t.Errorf("the first clause: %v, want a failure before all others", r.Status)
			}
		case r.Status != skipped || r.Reason != whyHopeless:
			t.Errorf("%s: %v %q, want it skipped", r.Name, r.Status, r.Reason)
		}
		tried++
	})
	if err == nil || !strings.HasSuffix(err.Error(), "failed: "+firstClause) || tried != len(table) {
		t.Errorf("got %v after %d results, want the failure of one clause", err, tried)
	}
}

type refusing struct{ inert }

func (refusing) Acquire(context.Context, backend.Claim) (backend.Grant, error) {
	return backend.Grant{}, errors.New("refused")
}

func TestTheStoreIsStopped(t *testing.T) {
	stops := 0
	h := Harness{Open: openInert, Only: func(string) bool { return false },
		Store: func(context.Context) (string, func(), error) {
			return "", func() { stops++ }, nil
		}}
	t.Run("Run", func(t *testing.T) { Run(t, h) })
	await.Must(t, Check(t.Context(), h, nil))
	if stops != 2 {
		t.Errorf("two runs have stopped %d stores", stops)
	}
}

// A Wait could otherwise get a key that is released.
func TestWaitsEndBeforeTheReleases(t *testing.T) {
	var steps []string
	step := func(name string) func(context.Context) {
		return func(context.Context) { steps = append(steps, name) }
	}
	e := &env{suite: newTestSuite(t), ctx: t.Context()}
	e.held = map[string]func(context.Context){"token": step("release")}
	e.timeout = time.Minute
	e.beforeReleases(step("end a Wait"))
	e.close()
	if got := strings.Join(steps, ", "); got != "end a Wait, release" {
		t.Errorf("the end of a try: %s", got)
	}
}

func TestSummaryNamesTheHooksThatAreNil(t *testing.T) {
	h := Harness{Name: "It", Stop: func(context.Context, string) error {
		return nil
	}, Others: map[string]opener{"": nil}}
	const want = "conformance: It: 3 clauses passed, 0 failed, 7 skipped; " +
		"hooks that are nil: Store, Link, Flush, Kick, Commands, Entries, Sweep"
	if got := summary(h, map[string]int{passed: 3, skipped: 7}); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// contract returns all doc comments of package backend, as one line.
func contract(t *testing.T) string {
	t.Helper()
	files := await.Value(filepath.Glob("../backend/*.go"))
	var text strings.Builder
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		f := await.Value(parser.ParseFile(token.NewFileSet(), name, nil, parser.ParseComments))
		ast.Inspect(f, func(n ast.Node) bool {
			var doc *ast.CommentGroup
			if v := reflect.Indirect(reflect.ValueOf(n)); v.Kind() == reflect.Struct && v.FieldByName("Doc").IsValid() {
				doc = v.FieldByName("Doc").Interface().(*ast.CommentGroup)
			}
			for line := range strings.Lines(doc.Text()) {
				if !strings.HasPrefix(line, "# ") { // not a heading
					text.WriteString(line)
				}
			}
			return true
		})
	}
	return strings.Join(strings.Fields(text.String()), " ")
}

// The suite demands nothing that the contract does not say.
func TestEachClauseQuotesTheContract(t *testing.T) {
	contract := contract(t)
	for _, c := range table {
		before, after, found := strings.Cut(contract, c.says)
		switch {
		case !found:
			t.Errorf("clause %s: package backend does not say %q", c.name, c.says)
		case !strings.HasSuffix(c.says, ".") || after != "" && after[0] != ' ':
			t.Errorf("clause %s: %q does not end where the sentence ends", c.name, c.says)
		case before != "" && !strings.HasSuffix(before, ". "):
			t.Errorf("clause %s: %q does not begin where the sentence begins", c.name, c.says)
		}
	}
}

// If a Slow link did not delay replies, no clause would fail. A clause would fail if any other
// state did not work.
func TestASlowLinkDelaysReplies(t *testing.T) {
	l, err := TCP(redistest.Serve(t, func(c net.Conn) {
		defer c.Close()
		io.Copy(c, c)
	}))
	await.Must(t, err)
	t.Cleanup(l.Close)
	c := await.Value(net.Dial("tcp", l.Store))
	t.Cleanup(func() { c.Close() })

	for _, state := range []LinkState{Up, Slow} {
		l.Set(state)
		began := time.Now()
		io.WriteString(c, "x")
		await.Value(io.ReadFull(c, make([]byte, 1)))
		if took := time.Since(began); state == Slow && took < Delay {
			t.Errorf("a reply over a slow link took %v", took)
		}
	}
}
