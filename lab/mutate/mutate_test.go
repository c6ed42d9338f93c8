//go:build unix

package main

import (
	"fmt"
	"go/parser"
	"go/token"
	"path/filepath"
	"slices"
	"strings"
	"testing"
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

// check compares edits with want, where each line is "line function what".
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

// At most 3 % may survive without an explanation.
func TestCount(t *testing.T) {
	var c count
	plain, reasoned := &mutant{}, &mutant{reason: "so"}
	for range 32 {
		c.add(plain, "TestA")
	}
	c.add(plain, timedOut)
	c.add(plain, broken)
	c.add(plain, "")
	c.add(reasoned, "")
	if !c.passed() || c.killed != 32 || c.timedOut != 1 || c.broken != 1 || c.survived != 1 || c.explained != 1 {
		t.Errorf("one of 35 survived: %v, %+v", c.passed(), &c)
	}
	if c.add(plain, ""); c.passed() {
		t.Error("two of 36 survived")
	}
	c = count{}
	if c.add(reasoned, "TestA"); c.passed() {
		t.Error("what is explained was found")
	}
}

// A test that fails twice finds the mutant. A test that fails once does not, and the other tests
// run without it.
func TestFindTwice(t *testing.T) {
	for name, c := range map[string]struct {
		fails []string // what fails in each run
		want  string
		runs  string
	}{
		"passes":       {[]string{""}, "", "[ ]"},
		"fails":        {[]string{"TestA/b", "TestA/b"}, "TestA/b", "[ ] [^TestA$ ]"},
		"compiles not": {[]string{broken}, broken, "[ ]"},
		"exits":        {[]string{"exit status 3", "exit status 3"}, "exit status 3", "[ ] [ ]"},
		"exits once":   {[]string{"exit status 3", ""}, "", "[ ] [ ]"},
		"once":         {[]string{"TestA", "", ""}, "", "[ ] [^TestA$ ] [ ^TestA$]"},
		"another, too": {[]string{"TestA", "", "TestB", "TestB"}, "TestB", "[ ] [^TestA$ ] [ ^TestA$] [^TestB$ ]"},
	} {
		var runs []string
		got, err := findTwice(stage{}, func(s stage) (string, error) {
			runs = append(runs, fmt.Sprintf("[%s %s]", s.Run, s.Skip))
			return c.fails[len(runs)-1], nil
		})
		if got != c.want || err != nil || strings.Join(runs, " ") != c.runs {
			t.Errorf("%s: got %q, %v after %q, want %q after %s", name, got, err, runs, c.want, c.runs)
		}
	}
}
