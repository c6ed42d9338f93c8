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
	r.lanes = make([]track, 2)
	for _, c := range []struct {
		number, done int
		want         bool
	}{
		{5, 6, false},
		{6, 6, true},
		{7, 6, false},
		{6, 5, false}, // the workers have reported fewer increments
	} {
		r.lanes[0].done, r.lanes[1].done = 3, c.done-3
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
	tl := &timeline{lanes: make([]track, 3)}
	tl.enter(0, holding, 10*ms)
	tl.enter(1, waiting, 12*ms)
	tl.enter(0, idle, 20*ms)
	tl.enter(1, holding, 21*ms)
	tl.enter(2, waiting, 25*ms)
	tl.kill(1, 30*ms)
	tl.enter(2, holding, 50*ms)
	if d := tl.death; d.heir != 2 || d.takeover != 20*ms || tl.lanes[2].waited != 25*ms || tl.lanes[1].waited != 9*ms {
		t.Errorf("takeover: %+v, lanes: %+v", d, tl.lanes)
	}
	if tl.atOnce != 1 || tl.end != 50*ms {
		t.Errorf("%d held at once, want 1; the end is %v", tl.atOnce, tl.end)
	}
	tl.enter(0, holding, 60*ms)
	if tl.atOnce != 2 || tl.lanes[0].waited != 0 {
		t.Errorf("%d held at once, want 2; %+v", tl.atOnce, tl.lanes)
	}
}

// inLine returns a timeline in which worker 1 holds the lock. Worker 3 began to wait before worker
// 2.
func inLine() *timeline {
	tl := &timeline{began: time.Now().Add(-time.Second), lanes: make([]track, 3)}
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
	r.began, r.lanes = time.Now(), make([]track, 2)
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
	if got := r.atOnce; got != 1 || len(r.pending) != 1 {
		t.Errorf("%d held at once, %d reports pending", got, len(r.pending))
	}
}
