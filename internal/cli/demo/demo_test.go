package demo

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/hasplock/hasp/internal/await"
)

const ms = time.Millisecond

func TestWrongNumberIsNotOK(t *testing.T) {
	t.Parallel()
	r := &referee{Demo: &Demo{Workers: 2, Increments: 3}}
	r.Lanes = make([]track, 2)
	for _, c := range []struct {
		number, done int
		want         bool
	}{
		{5, 6, false},
		{6, 6, true},
		{7, 6, false},
		{6, 5, false}, // the workers have reported fewer increments
	} {
		r.Lanes[0].done, r.Lanes[1].done = 3, c.done-3
		if got := r.summary(c.number).OK; got != c.want {
			t.Errorf("number %d after %d increments: ok is %v, want %v", c.number, c.done, got, c.want)
		}
	}
}

// "go run" starts a program in the build cache or in a temporary directory. The build cache may be
// anywhere.
func TestCommandToPaste(t *testing.T) {
	t.Parallel()
	const goRun = "go run github.com/hasplock/hasp/cmd/hasp"
	for program, want := range map[string]string{
		"/cache/8d/8d2b146663327c8037054b172a6f070768e90861d6560121d43562120ab7f664-d/hasp": goRun,
		"/tmp/go-build1364595301/b001/exe/hasp":                                             goRun,
		"/usr/local/bin/hasp":                                                               "/usr/local/bin/hasp",
		"hasp":                                                                              "hasp",
	} {
		if got := command(program); got != want {
			t.Errorf("%s: got %s", program, got)
		}
	}
}

func TestTimeline(t *testing.T) {
	t.Parallel()
	tl := &timeline{Lanes: make([]track, 3)}
	check := func(lane int, at time.Duration, want state) {
		t.Helper()
		if got := tl.Lanes[lane].at(at).State; got != want {
			t.Errorf("lane %d at %v: %v, want %v", lane, at, got, want)
		}
	}
	tl.enter(0, holding, 10*ms)
	tl.enter(1, waiting, 12*ms)
	tl.enter(0, idle, 20*ms)
	tl.enter(1, holding, 20*ms)
	tl.enter(2, waiting, 25*ms)
	tl.kill(1, 30*ms)
	check(0, 9*ms, idle)
	check(0, 10*ms, holding)
	check(0, 19*ms, holding)
	check(0, 20*ms, idle)
	check(1, 40*ms, idle)

	tl.enter(2, holding, 50*ms)
	if d := tl.Death; d.Heir != 2 || d.Takeover != 20*ms {
		t.Errorf("takeover: %+v", d)
	}
	if got := tl.heldAtOnce(); got != 1 {
		t.Errorf("%d held at once, want 1", got)
	}
	tl.enter(0, holding, 60*ms)
	if got := tl.heldAtOnce(); got != 2 {
		t.Errorf("%d held at once, want 2", got)
	}
}

// inLine returns a timeline in which worker 1 holds the lock. Worker 3 began to wait before worker
// 2.
func inLine() *timeline {
	tl := &timeline{began: time.Now().Add(-time.Second), Lanes: make([]track, 3)}
	tl.enter(0, holding, 0)
	tl.enter(1, waiting, 2*ms)
	tl.enter(2, waiting, 1*ms)
	return tl
}

func TestLinesShowTheLine(t *testing.T) {
	t.Parallel()
	for ordered, want := range map[bool]string{true: "; in line: 3, 2\n", false: "; waiting: 3, 2\n"} {
		var b bytes.Buffer
		v := &lines{out: &b, d: &Demo{Workers: 3, Increments: 5, Ordered: ordered}}
		await.Must(t, v.wrote(inLine(), 0, 5*ms, 1))
		if !strings.HasSuffix(b.String(), want) {
			t.Errorf("ordered %v: %q does not end with %q", ordered, b.String(), want)
		}
	}
}

// The reports of two workers may arrive in any order.
func TestLinesAreInOrderOfTime(t *testing.T) {
	t.Parallel()
	var b bytes.Buffer
	d := &Demo{Workers: 2, Increments: 2}
	r := &referee{Demo: d, lines: lines{&b, d}}
	r.began, r.Lanes = time.Now(), make([]track, 2)
	happens := func(i int, kind string, at time.Duration, number int) {
		e := event{Kind: kind, At: r.began.Add(at), Number: number}
		r.pending = append(r.pending, report{e.At, func() error { return r.handle(t.Context(), i, e) }})
	}
	happens(0, isHolds, 30*ms, 0)
	happens(0, isWrote, 40*ms, 2)
	happens(0, isFrees, 41*ms, 0)
	happens(1, isHolds, 10*ms, 0)
	happens(1, isWrote, 20*ms, 1)
	happens(1, isFrees, 21*ms, 0)
	happens(1, isWrote, 60*ms, 3) // not yet older than the lag
	await.Must(t, r.settle(r.began.Add(50*ms)))

	const want = "   0.020s  worker 2 writes 1 of 4, holding for 10ms\n   0.040s  worker 1 writes 2 of 4, holding for 10ms\n"
	if b.String() != want {
		t.Errorf("got\n%swant\n%s", b.String(), want)
	}
	if got := r.heldAtOnce(); got != 1 || len(r.pending) != 1 {
		t.Errorf("%d held at once, %d reports pending", got, len(r.pending))
	}
}
