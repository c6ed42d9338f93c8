//go:build unix

package main

import (
	"fmt"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

const goSource = `package p

func (s *set) f(n int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n >= 2 && s.ok() {
		delete(s.m, n)
	} else {
		s.n = n * 3
	}
	for n != 9 {
		n++
	}
	return false
}
`

const luaSource = `-- KEYS[1] == 1 and not that
local function g(a)
	if redis.call('GET', 'a == b') then return {0, a} end
	return not a
end
if g(1) >= 2 or false then
	redis.call('DEL', KEYS[1]) -- 2 > 1
end
return 1
`

// check compares edits with what they should be, which is "line function what".
func check(t *testing.T, got []edit, want string) {
	t.Helper()
	var lines []string
	for _, e := range got {
		lines = append(lines, fmt.Sprintf("%d %s %s", e.Line, e.Func, e.What))
	}
	wants := strings.Split(strings.TrimSpace(want), "\n")
	for _, l := range lines {
		if !slices.Contains(wants, l) {
			t.Errorf("an edit that should not be: %s", l)
		}
	}
	for _, w := range wants {
		if !slices.Contains(lines, w) {
			t.Errorf("no edit %s", w)
		}
	}
}

func TestEditsOfGo(t *testing.T) {
	es, err := goEdits("p.go", []byte(goSource))
	if err != nil {
		t.Fatal(err)
	}
	check(t, es, `
6 set.f if n >= 2 && s.ok() { => if n >= 2 || s.ok() {
6 set.f if n >= 2 && s.ok() { => if n > 2 && s.ok() {
6 set.f if n >= 2 && s.ok() { => if n >= 3 && s.ok() {
6 set.f if n >= 2 && s.ok() { => if !(n >= 2 && s.ok()) {
7 set.f delete(s.m, n) => dropped
9 set.f s.n = n * 3 => dropped
11 set.f for n != 9 { => for n == 9 {
12 set.f n++ => dropped
14 set.f return false => dropped
`)
	for _, e := range es {
		if _, err := parser.ParseFile(token.NewFileSet(), "p.go", e.apply(), 0); err != nil {
			t.Errorf("%v: %v", e, err)
		}
	}
}

func TestEditsOfLua(t *testing.T) {
	es := luaEdits("p.lua", []byte(luaSource))
	check(t, es, `
3 g if redis.call('GET', 'a == b') then return {0, a} end => if not (redis.call('GET', 'a == b')) then return {0, a} end
3 g if redis.call('GET', 'a == b') then return {0, a} end => if redis.call('GET', 'a == b') then return {1, a} end
3 g if redis.call('GET', 'a == b') then return {0, a} end => dropped
4 g return not a => return a
6 g if g(1) >= 2 or false then => if g(1) > 2 or false then
6 g if g(1) >= 2 or false then => if g(1) >= 2 and false then
7 g redis.call('DEL', KEYS[1]) -- 2 > 1 => dropped
9 g return 1 => return 2
`)
}

func TestApplyChangesThePlaceOnly(t *testing.T) {
	es, err := goEdits("p.go", []byte(goSource))
	if err != nil {
		t.Fatal(err)
	}
	for what, want := range map[string]string{
		"delete(s.m, n) => dropped":    strings.Replace(goSource, "delete(s.m, n)", "", 1),
		"for n != 9 { => for n == 9 {": strings.Replace(goSource, "!=", "==", 1),
	} {
		i := slices.IndexFunc(es, func(e edit) bool { return e.What == what })
		if got := string(es[i].apply()); got != want {
			t.Errorf("%s: got\n%swant\n%s", what, got, want)
		}
	}
}

func TestEqualEditsOfOneFunctionAreNumbered(t *testing.T) {
	es, err := goEdits("p.go", []byte("package p\nfunc f() {\n\tg()\n\tg()\n}\n"))
	if err != nil {
		t.Fatal(err)
	}
	check(t, es, "3 f g() => dropped\n4 f g() => dropped #2")
}

func TestSeedRepeatsTheChoice(t *testing.T) {
	choice := func(seed uint64) (keys []string, of map[string]int) {
		ms, err := choose("../..", seed)
		if err != nil {
			t.Fatal(err)
		}
		of = map[string]int{}
		for i, m := range ms {
			keys = append(keys, m.key())
			if i < 180 {
				of[m.pkg.dir+" "+filepath.Ext(m.File)]++
			}
		}
		return keys, of
	}
	a, of := choice(1)
	b, _ := choice(1)
	c, _ := choice(2)
	if !slices.Equal(a, b) {
		t.Error("the same seed, another choice")
	}
	if slices.Equal(a, c) {
		t.Error("another seed, the same choice")
	}
	for _, p := range packages {
		if of[p.dir+" .go"] != 10*p.inGo || of[p.dir+" .lua"] != 10*p.inLua {
			t.Errorf("ten rounds have %d and %d edits of %s", of[p.dir+" .go"], of[p.dir+" .lua"], p.dir)
		}
	}
	if slices.Sort(a); len(slices.Compact(a)) != len(b) {
		t.Error("two edits have one key")
	}
}

func TestExplained(t *testing.T) {
	m := &mutant{edit: edit{File: "p.go", Func: "f", What: "a => b"}}
	stale := explain([]*mutant{m}, "# a comment\np.go\tf\ta => b\tsince it is so\np.go\tf\tb => a\tgone\n")
	if m.reason != "since it is so" || len(stale) != 1 || !strings.Contains(stale[0], "gone") {
		t.Errorf("reason %q, stale %q", m.reason, stale)
	}
}

// What does not compile is no mutant, what quick tests do not find and what
// survived an earlier run is tried by all, and what is explained must survive.
func TestQueue(t *testing.T) {
	var ms []*mutant
	for _, state := range []string{"survived", "", "build", "test", "", "", "slow", ""} {
		ms = append(ms, &mutant{outcome: outcome{State: state}})
	}
	ms[5].reason = "so"
	r := &runner{keep: func(record) error { return nil }}
	q := &queue{mutants: ms, n: 6}
	pass := func(quick bool, states ...string) {
		t.Helper()
		q.next, q.started = 0, 0
		var order, want []int
		for i, state := range states {
			if state != "" {
				want = append(want, i)
			}
		}
		for m := q.take(quick); m != nil; m = q.take(quick) {
			i := slices.Index(ms, m)
			order = append(order, i)
			m.State = states[i]
			if err := q.done(m, r); err != nil {
				t.Fatal(err)
			}
		}
		if !slices.Equal(order, want) {
			t.Errorf("tried %v, want %v", order, want)
		}
	}
	summary := func(ok bool, want string) {
		t.Helper()
		var out strings.Builder
		if got := q.summary(&out, 7); got != ok || !strings.Contains(out.String(), want) {
			t.Errorf("%v, %s, want %v, %s", got, out.String(), ok, want)
		}
	}

	pass(true, "", "slow", "", "", "build", "slow", "", "test")
	summary(false, "seed 7: 3 mutants: 2 killed by a test, 0 by a time-out, 1 survived")
	pass(false, "timeout", "test", "", "", "", "survived", "test", "")
	summary(true, "seed 7: 6 mutants: 4 killed by a test, 1 by a time-out, 0 survived (0.0 %), 1 explained; 2 more did not compile")
	ms[5].State = "test"
	summary(false, "explained, but found")
	ms[5].State, ms[5].reason = "survived", ""
	summary(false, "1 survived (16.7 %)")
}

// A test that fails twice finds the mutant. One that fails once does not, and
// the others are run without it.
func TestFind(t *testing.T) {
	s := stage{Dir: "."}
	r := &runner{root: t.TempDir(), baselines: map[stage]baseline{s: {Takes: time.Minute, Quick: "^(TestA)$"}}}
	for name, c := range map[string]struct{ script, want string }{
		"passes": {`echo "--- PASS: TestA"`, ""},
		"fails":  {`echo "    --- FAIL: TestA/b (0.1s)"; exit 1`, "TestA/b"},
		"panics": {`echo "panic: oh"; exit 2`, "panic: oh"},
		"exits":  {`exit 3`, "exit status 3"},
		// $5 is -test.run, $7 is -test.skip
		"slow":         {`[ "$5" = "^(TestA)$" ] || echo "--- FAIL: TestB"`, "TestB"},
		"once, quick":  {`[ "$5" != "^(TestA)$" ] || [ "$7" ] || echo "--- FAIL: TestA"`, ""},
		"once, slow":   {`[ "$5$7" ] || echo "--- FAIL: TestB"`, ""},
		"another, too": {`case "$5 $7" in " ") echo "--- FAIL: TestB";; " ^TestB$"|"^TestC$ ") echo "--- FAIL: TestC";; esac`, "TestC"},
	} {
		t.Run(name, func(t *testing.T) {
			bin := filepath.Join(t.TempDir(), "bin")
			if err := os.WriteFile(bin, []byte("#!/bin/sh\n"+c.script+"\n"), 0o777); err != nil {
				t.Fatal(err)
			}
			got, err := r.find(t.Context(), bin, s, false)
			if err != nil || got != c.want {
				t.Errorf("got %q, %v, want %q", got, err, c.want)
			}
		})
	}
}

// Tests that hang are ended, and the processes that they have started.
func TestTimeOut(t *testing.T) {
	bin := filepath.Join(t.TempDir(), "bin")
	if err := os.WriteFile(bin, []byte("#!/bin/sh\nsleep 1000 & sleep 1000\n"), 0o777); err != nil {
		t.Fatal(err)
	}
	r := &runner{root: t.TempDir()}
	got, err := r.test(t.Context(), bin, stage{Dir: "."}, time.Millisecond)
	if err != nil || got.failed != timedOut {
		t.Errorf("got %v, %v", got, err)
	}
}

func TestQuickTestsTakeATenth(t *testing.T) {
	took := map[string]time.Duration{"TestA": 1, "TestB": 0, "TestC": 10, "TestD": 89}
	if got := (result{took: took}).quick(); got != "^(TestB|TestA)$" {
		t.Errorf("got %s", got)
	}
	if got := (result{took: map[string]time.Duration{"TestA": 1}}).quick(); got != "" {
		t.Errorf("got %s", got)
	}
}
