//go:build unix

// Command mutate plants bugs, one at a time, and runs the tests that should find each bug. A bug is
// an edit in Go or in Lua: an exchanged operator, a negated condition, a dropped statement, or a
// number that is off by one. If no test finds an edit, a promise has no test, or the edit breaks no
// promise. The file explained.txt lists edits of the second kind with their reasons. Run mutate in
// the directory lab:
//
//	go run ./mutate -n 160 -seed 1
//	go run ./mutate -only '^redlock/'
//	go run ./mutate -own -from 40
//	go run ./mutate -explained
//
// The seed decides which edits are tried, and in which order. First the quick tests of the edited
// package run, then all tests that should find the edit, until one fails twice. The work tree does
// not change: go's -overlay replaces the original file by the edited one. A mutant is the code with
// one edit. -from N continues a run that was interrupted after N mutants.
//
// The exit status is 1 if more than 3 percent of the mutants survive without an
// explanation, or if a test finds a mutant that is explained.
package main

import (
	"cmp"
	"context"
	"crypto/sha256"
	_ "embed"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"regexp"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"
)

// pkg is a package whose code is edited.
type pkg struct {
	dir         string
	inGo, inLua int     // how many of its edits each round has
	more        []stage // tests that should find its bugs, besides its own tests and the simulation
}

// suite is a strategy's conformance suite, which is slow.
func suite(dir string) stage { return stage{dir, "Conformance", "", "process", false} }

// garbage is the test in which a server answers the strategies on Redis with replies that no script
// gives.
var garbage = stage{"internal/acceptance", "Garbage", "", "inprocess", false}

var packages = []pkg{
	{".", 3, 0, []stage{suite("memlock")}},
	{"memlock", 1, 0, []stage{suite("memlock")}},
	{"filelock", 1, 0, []stage{suite("filelock")}},
	{"spinlock", 1, 1, []stage{suite("spinlock"), garbage}},
	{"pubsublock", 1, 1, []stage{suite("pubsublock"), garbage}},
	{"fairlock", 1, 1, []stage{suite("fairlock"), garbage}},
	{"redlock", 2, 1, []stage{suite("redlock"), garbage}},
	{"internal/redisstore", 1, 1, []stage{{"spinlock", "", "Conformance", "process", false}, suite("spinlock"), suite("pubsublock"), garbage}},
	{"internal/redisstore/resp", 1, 0, []stage{{"internal/redisstore", "", "", "process", false}, suite("spinlock"), garbage}},
	{"internal/redisstore/pubsub", 1, 0, []stage{suite("pubsublock"), suite("fairlock"), garbage}},
}

// explained is a table of edits. A row has the file, the function, the edit, and
// the reason why no test can find it.
//
//go:embed explained.txt
var explained string

// mutant is an edit of a package.
type mutant struct {
	edit
	pkg    pkg
	round  int
	reason string // the reason in explained.txt why no test can find it, or empty
}

// rank returns the string by which seed orders the edits. It depends on e only. So if the code
// changes, the other edits keep their order.
func (e edit) rank(seed uint64) string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%d %s", seed, e.key()))
	return string(sum[:])
}

// choose returns the mutants of all packages in the order in which they are tried.
func choose(root string, seed uint64) ([]*mutant, error) {
	var all []*mutant
	for _, p := range packages {
		inGo, inLua, err := edits(root, p.dir)
		if err != nil {
			return nil, err
		}
		add := func(es []edit, perRound int) {
			slices.SortFunc(es, func(a, b edit) int { return cmp.Compare(a.rank(seed), b.rank(seed)) })
			for i, e := range es {
				all = append(all, &mutant{edit: e, pkg: p, round: i / perRound})
			}
		}
		add(inGo, p.inGo)
		add(inLua, p.inLua)
	}
	slices.SortStableFunc(all, func(a, b *mutant) int { return cmp.Compare(a.round, b.round) })
	return all, nil
}

// explain sets the reasons of the mutants that the table names. It returns the rows
// that name no edit of today's code.
func explain(all []*mutant, table string) (stale []string) {
	byKey := map[string]*mutant{}
	for _, m := range all {
		byKey[m.key()] = m
	}
	for row := range strings.Lines(table) {
		row = strings.TrimSuffix(row, "\n")
		i := strings.LastIndexByte(row, '\t')
		if i < 0 || strings.HasPrefix(row, "#") {
			continue
		}
		if m := byKey[row[:i]]; m != nil {
			m.reason = row[i+1:]
		} else {
			stale = append(stale, row)
		}
	}
	return stale
}

var (
	n        = flag.Int("n", 160, "how many mutants")
	from     = flag.Int("from", 0, "how many mutants to leave out, because an earlier run has tried them")
	seed     = flag.Uint64("seed", 1, "decides which edits are tried")
	only     = flag.String("only", "", "a regular expression for \"file:line: function: edit\"")
	reasoned = flag.Bool("explained", false, "try the mutants that are explained, and no others")
	own      = flag.Bool("own", false, "run only the tests of the package that is edited")
)

func main() {
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	ok, err := run(ctx)
	if err != nil {
		fmt.Fprintln(os.Stderr, "mutate:", err)
		os.Exit(2)
	}
	if !ok {
		os.Exit(1)
	}
}

// run tries mutants and reports whether the tests are good enough.
func run(ctx context.Context) (bool, error) {
	match, err := regexp.Compile(*only)
	if err != nil {
		return false, err
	}
	out, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "github.com/hasplock/hasp").Output()
	if err != nil {
		return false, err
	}
	root := strings.TrimSpace(string(out))
	all, err := choose(root, *seed)
	if err != nil {
		return false, err
	}
	for _, row := range explain(all, explained) {
		fmt.Println("explained, but no edit of today's code:", row)
	}
	all = slices.DeleteFunc(all, func(m *mutant) bool {
		return !match.MatchString(m.String()) || *reasoned && m.reason == ""
	})
	if len(all) == 0 {
		return false, fmt.Errorf("no edit matches %q", *only)
	}
	all = all[min(*from, len(all)):]
	all = all[:min(*n, len(all))]

	var c count
	var workers errgroup.Group
	workers.SetLimit(2) // most tests spend most of their time waiting
	for _, m := range all {
		workers.Go(func() error {
			found, err := m.try(ctx, root)
			if err != nil {
				return fmt.Errorf("%v: %w", m, err)
			}
			c.add(m, found)
			return nil
		})
	}
	err = workers.Wait()
	fmt.Printf("\nseed %d: %d killed by a test, %d by a time-out, %d survived, %d explained, %d did not compile\n",
		*seed, c.killed, c.timedOut, c.survived, c.explained, c.broken)
	return c.passed(), err
}

// count counts the outcomes of mutants.
type count struct {
	mu                                            sync.Mutex // guards all below
	killed, timedOut, survived, explained, broken int
	wrong                                         int // explained, but found
}

// add counts and prints what found a mutant.
func (c *count) add(m *mutant, found string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case found == broken:
		c.broken++
	case found != "" && m.reason != "":
		c.wrong++
		found = "explained, but found by " + found
	case found == timedOut:
		c.timedOut++
	case found != "":
		c.killed++
	case m.reason != "":
		c.explained++
		found = "explained"
	default:
		c.survived++
		found = "SURVIVED"
	}
	fmt.Printf("%s: %s\n", m, found)
}

// passed reports whether at most 3 % of the mutants survived without an explanation, and no test
// found a mutant that is explained.
func (c *count) passed() bool {
	return c.wrong == 0 && 100*c.survived <= 3*(c.killed+c.timedOut+c.survived+c.explained)
}
