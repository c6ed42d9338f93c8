package main

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/redistest"
)

func TestDemo(t *testing.T) {
	t.Parallel()
	svg := filepath.Join(t.TempDir(), "demo.svg")
	tmp := t.TempDir()
	cmd := self(t.Context(), t, "hasp", "", "demo", "--workers", "3", "--increments", "6", "--work", "3ms", "--ttl", "3s", "--svg", svg)
	cmd.Env = append(cmd.Env, "TMPDIR="+tmp)
	o := start(t, cmd).wait().want(t, 0)
	if got := strings.Count(o.out, " writes "); got != 18 {
		t.Errorf("%d lines of increments, want 18:\n%s", got, o.out)
	}
	for _, re := range []string{
		`(?m)^ +\d+\.\d{3}s  worker 2 \(pid \d+\) is killed while it holds`,
		`(?m)^ +\d+\.\d{3}s  worker 4 starts in its place`,
		`(?m)^ +\d+\.\d{3}s  worker [134] takes over, \d`,
		`(?m)writes 1 of 18, holding for \d`,
		`(?m); waiting: \d`,
		`ok: the number is 18 after 18 increments by 3 processes`,
	} {
		if !regexp.MustCompile(re).MatchString(o.out) {
			t.Errorf("%s is not in:\n%s", re, o.out)
		}
	}
	left, err := os.ReadDir(tmp)
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %v %v", left, err)
	}
	b, err := os.ReadFile(svg)
	if err != nil {
		t.Fatal(err)
	}
	if n := elements(t, b); n["rect"] < 18 || n["path"] != 1 {
		t.Errorf("picture: %v", n)
	}
}

func TestDemoEndsWithALineToPaste(t *testing.T) {
	t.Parallel()
	o := runHasp(t, "", "demo", "--workers", "2", "--increments", "3", "--work", "1ms", "--ttl", "1s").want(t, 0)
	m := regexp.MustCompile(`A command under a lock: +(.*)`).FindStringSubmatch(o.out)
	if m == nil {
		t.Fatalf("no command in:\n%s", o.out)
	}

	cmd := exec.CommandContext(t.Context(), "sh", "-c", "unset HASP_URL; "+m[1])
	cmd.Env = append(os.Environ(), "XDG_STATE_HOME="+t.TempDir())
	got, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(got), "only one at a time") {
		t.Errorf("%s: %v\n%s", m[1], err, got)
	}
}

// elements reads b to its end as XML and counts its elements.
func elements(t *testing.T, b []byte) map[string]int {
	t.Helper()
	d := xml.NewDecoder(bytes.NewReader(b))
	n := map[string]int{}
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			return n
		}
		if err != nil {
			t.Fatalf("not well-formed: %v\n%s", err, b)
		}
		if e, ok := token.(xml.StartElement); ok {
			n[e.Name.Local]++
		}
	}
}

func demoSummary(t *testing.T, o outcome) summary {
	t.Helper()
	var s summary
	if err := json.Unmarshal([]byte(o.out), &s); err != nil {
		t.Fatalf("%v in:\n%s%s", err, o.out, o.err)
	}
	return s
}

func TestDemoForPrograms(t *testing.T) {
	t.Parallel()
	o := runHasp(t, "", "demo", "--workers", "4", "--increments", "3", "--work", "1ms", "--ttl", "3s", "--json").want(t, 0)
	s := demoSummary(t, o)
	if !s.OK || s.Number != 12 || s.Expected != 12 || s.HeldAtOnce != 1 {
		t.Errorf("summary: %+v", s)
	}
	if s.Killed != 2 || s.KilledPID == 0 || s.Heir == 0 || s.Heir == 2 || s.Takeover <= 0 {
		t.Errorf("no takeover: %+v", s)
	}
}

// The smallest demo is one worker, and the one that takes over from it.
func TestDemoOfOneWorker(t *testing.T) {
	t.Parallel()
	o := runHasp(t, "", "demo", "--workers", "1", "--increments", "1", "--ttl", "3s", "--json").want(t, 0)
	if s := demoSummary(t, o); !s.OK || s.Number != 1 || s.Killed != 1 || s.Heir != 2 {
		t.Errorf("summary: %+v", s)
	}
}

func TestDemoWithoutLockGoesWrong(t *testing.T) {
	t.Parallel()
	o := runHasp(t, "", "demo", "--no-lock", "--workers", "4", "--increments", "20", "--work", "10ms").want(t, exitFailed)
	contains(t, o.out, "WRONG: the number is ")
	contains(t, o.out, "80 increments were made")
	contains(t, o.out, "; writing at the same time: ")
}

func TestDemoOnRedis(t *testing.T) {
	t.Parallel()
	url := redisURL(t, redistest.Start(t, nil))
	o := runHasp(t, url, "demo", "--workers", "3", "--increments", "4", "--work", "2ms", "--ttl", "3s", "--json").want(t, 0)
	if s := demoSummary(t, o); !s.OK || s.Store != "spinlock" || s.Heir == 0 {
		t.Errorf("summary: %+v", s)
	}
}

// The store goes away under the workers.
func TestDemoEndsWhenTheStoreIsGone(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t, &redistest.Options{Own: true})
	p := startHasp(t, redisURL(t, s), "demo", "--workers", "2", "--increments", "100000", "--work", "1ms")
	p.out.expect("writes 5 of")
	s.Kill()
	o := p.wait().want(t, exitStore)
	contains(t, o.err, "hasp: worker ")
	if n := strings.Count(o.err, "\n"); n != 1 {
		t.Errorf("%d lines:\n%s", n, o.err)
	}
}

// A worker that hangs is not left behind by a referee that was killed.
func TestWorkerEndsWithItsReferee(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "number")
	if err := writeNumber(file, 0); err != nil {
		t.Fatal(err)
	}
	c := hasp.Config{Strategy: "filelock", Nodes: []string{t.TempDir()}}
	text, err := json.Marshal(order{Worker: 1, Store: c, Key: "key", TTL: time.Minute, File: file, Turns: 1, Stall: 1})
	if err != nil {
		t.Fatal(err)
	}
	p := startHasp(t, "", "demo-worker")
	if _, err := p.in.Write(append(text, "\n\n"...)); err != nil {
		t.Fatal(err)
	}
	p.out.expect(isStalls)
	p.in.Close()
	p.wait().want(t, exitFailed)
}

// A wrong number fails, whatever the workers say.
func TestRefereeFailsAWrongNumber(t *testing.T) {
	t.Parallel()
	r := &referee{demo: &demo{workers: 2, increments: 3}}
	r.lanes = []lane{{done: 3}, {done: 3}}
	for number, want := range map[int]bool{5: false, 6: true, 7: false} {
		if got := r.summary(number).OK; got != want {
			t.Errorf("number %d: ok is %v", number, got)
		}
	}
	r.lanes[1].done = 2
	if r.summary(6).OK {
		t.Error("5 increments made a 6")
	}
}

func TestTimeline(t *testing.T) {
	t.Parallel()
	ms := time.Millisecond
	tl := &timeline{lanes: make([]lane, 3)}
	tl.enter(0, holding, 10*ms)
	tl.enter(1, waiting, 12*ms)
	tl.enter(0, idle, 20*ms)
	tl.enter(1, holding, 20*ms)
	tl.enter(2, waiting, 25*ms)
	tl.kill(1, 30*ms)
	for at, want := range map[time.Duration]state{9 * ms: idle, 10 * ms: holding, 19 * ms: holding, 20 * ms: idle} {
		if got := tl.lanes[0].at(at).state; got != want {
			t.Errorf("lane 0 at %v: %v, want %v", at, got, want)
		}
	}
	if got := tl.lanes[1].at(40 * ms).state; got != dead {
		t.Errorf("the killed holder: %v", got)
	}
	tl.enter(2, holding, 50*ms)
	if d := tl.killed; d.heir != 2 || d.takeover != 20*ms {
		t.Errorf("takeover: %+v", d)
	}
	if got := tl.lanes[1].at(50 * ms).state; got != idle {
		t.Errorf("the killed holder after the takeover: %v", got)
	}
	if got := tl.crowd(); got != 1 {
		t.Errorf("%d held at once, want 1", got)
	}
	tl.enter(0, holding, 60*ms)
	if got := tl.crowd(); got != 2 {
		t.Errorf("%d held at once, want 2", got)
	}
}

func TestPictureTakesAnyText(t *testing.T) {
	t.Parallel()
	d := &demo{workers: 1, increments: 1, place: "<&\"\x00\x1b[2J'>"}
	tl := &timeline{lanes: []lane{{pid: 1, spans: []span{{holding, 0, time.Second}}}}}
	var b bytes.Buffer
	if err := drawSVG(&b, d, tl, summary{Expected: 1}); err != nil {
		t.Fatal(err)
	}
	elements(t, b.Bytes())
	if bytes.ContainsAny(b.Bytes(), "\x00\x1b") {
		t.Error("control characters in the picture")
	}
}

// A line that is longer than the terminal would wrap, and the next picture
// would be drawn in the wrong place.
func TestScreenStaysWithinItsWidth(t *testing.T) {
	t.Parallel()
	d := &demo{workers: 2, increments: 5, place: strings.Repeat("a very long name ", 20)}
	var b bytes.Buffer
	s := newScreen(&b, d, func() int { return minWidth })
	tl := &timeline{began: time.Now().Add(-time.Second), lanes: []lane{{pid: 1 << 22}, {pid: 1}}}
	tl.enter(0, holding, 0)
	tl.kill(0, 10*time.Millisecond)
	tl.number = []point{{1, 100}} // more than there should be
	for range 2 * maxNotes {
		s.note(time.Hour, strings.Repeat("word ", 40))
	}
	s.draw(tl)
	s.close()
	lines := strings.Split(b.String(), "\n")
	for _, line := range lines {
		if n := columns(line); n > minWidth-1 {
			t.Errorf("%d columns: %q", n, line)
		}
	}
	// What is drawn again goes up by as much as was drawn.
	contains(t, b.String(), fmt.Sprintf("\x1b[%dA", len(lines)/2))
	if len(lines)/2 > d.workers+aroundLanes {
		t.Errorf("%d lines, more than the %d that a terminal was asked for", len(lines)/2, d.workers+aroundLanes)
	}
}

// columns counts what a terminal shows of a line.
func columns(line string) int {
	n, escape := 0, false
	for _, r := range line {
		switch {
		case r == '\x1b':
			escape = true
		case escape:
			escape = r == '[' || r == ';' || r == '?' || r >= '0' && r <= '9'
		case r >= ' ':
			n++
		}
	}
	return n
}
