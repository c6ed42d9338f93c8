package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redistest"
)

// escape is an owner who would like to draw on other people's terminals.
const escape = "\x1b[2J\u202ehasp: all is well"

// line has somebody hold "key" on url and others wait for it, one after the
// other. All of them have left by the end of the test.
func line(t *testing.T, url string, owners ...string) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	open := func(owner string) *hasp.Client {
		c, err := hasp.Open(ctx, url, &hasp.Options{Owner: owner})
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	first := open("first")
	lease, err := first.Lock(ctx, "key", hasp.WithTTL(time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error)
	t.Cleanup(func() {
		cancel()
		for range owners {
			<-ended
		}
		if err := lease.Unlock(context.WithoutCancel(ctx)); err != nil {
			t.Error(err)
		}
		first.Close()
	})
	for i, owner := range owners {
		c := open(owner)
		go func() {
			_, err := c.Lock(ctx, "key")
			c.Close()
			ended <- err
		}()
		for began := time.Now(); ; time.Sleep(time.Millisecond) {
			s, err := first.Inspect(ctx, "key")
			if err == nil && len(s.Waiters) == i+1 {
				break
			}
			if time.Since(began) > patience {
				t.Fatalf("waiter %d does not come: %+v, %v", i+1, s, err)
			}
		}
	}
}

// tellsLine checks what inspect says of a key that line is about.
func tellsLine(t *testing.T, inspect func(args ...string) outcome, owners []string) {
	t.Helper()
	text := inspect("inspect", "key").want(t, 0).out
	if strings.ContainsAny(text, "\x1b\u202e") {
		t.Errorf("raw: %q", text)
	}
	at := strings.Index(text, `"first"`)
	for i, owner := range owners {
		next := strings.Index(text, fmt.Sprintf("waiter %d   %s", i+1, quote(owner)))
		if next < at || at < 0 {
			t.Errorf("waiter %d of %q is not told in order:\n%s", i+1, owners, text)
		}
		at = next
	}
	var s backend.Status
	text = inspect("inspect", "key", "--json").want(t, 0).out
	if err := json.Unmarshal([]byte(text), &s); err != nil {
		t.Fatal(err)
	}
	if strings.Contains(text, "\x1b") || !s.Held || s.Owner != "first" || !slices.Equal(s.Waiters, owners) {
		t.Errorf("got %+v, want waiters %q, from:\n%s", s, owners, text)
	}
}

func TestInspectTellsTheLine(t *testing.T) {
	t.Parallel()
	url, owners := "memlock://"+t.Name(), []string{"second", escape, "fourth"}
	line(t, url, owners...)
	tellsLine(t, func(args ...string) outcome { return call(append(args, "--url", url)...) }, owners)
}

// By another process, of a store that others write to.
func TestInspectTellsTheLineOnRedis(t *testing.T) {
	t.Parallel()
	url, owners := queueURL(t), []string{"second", escape, "fourth"}
	line(t, url, owners...)
	tellsLine(t, func(args ...string) outcome { return runHasp(t, url, args...) }, owners)
}

// queueURL is that of a store with a queue, which processes share.
func queueURL(t *testing.T) string {
	t.Helper()
	return "fairlock+" + redistest.Start(t, nil).URL() + "?prefix=" + t.Name() + ":"
}

// The label that is asked for in the URL would be that of all workers.
func TestDemoShowsTheLine(t *testing.T) {
	t.Parallel()
	o := runHasp(t, queueURL(t)+"&owner=me", "demo", "--workers", "4", "--increments", "10", "--work", "4ms", "--ttl", "3s").want(t, 0)
	contains(t, o.out, "; in line: ")
	contains(t, o.out, "ok: the number is 40")
	if strings.Contains(o.out, "; waiting: ") {
		t.Errorf("waiters of a queue are told without their order:\n%s", o.out)
	}
}

func TestTimelineTellsTheLine(t *testing.T) {
	t.Parallel()
	ms := time.Millisecond
	tl := &timeline{lanes: make([]lane, 5)}
	tl.enter(0, holding, 0)
	for i, at := range []time.Duration{1: 30 * ms, 2: 10 * ms, 3: 20 * ms, 4: 40 * ms} {
		if i > 0 {
			tl.enter(i, waiting, at)
		}
	}
	for _, step := range []struct {
		queue  []int
		looked time.Duration
		want   []int
	}{
		{nil, 0, []int{2, 3, 1, 4}},                     // as they came
		{[]int{1, 2, 3, 4}, 45 * ms, []int{1, 2, 3, 4}}, // as the store tells
		{[]int{3, 1}, 35 * ms, []int{3, 1, 2, 4}},       // some came since it told
		{[]int{0, 3, 1, 2}, 45 * ms, []int{3, 1, 2, 4}}, // one has got it since
		{[]int{4, 1, 2, 3}, 25 * ms, []int{2, 3, 1, 4}}, // two have got it since, and come again
	} {
		tl.queue, tl.looked = step.queue, step.looked
		if got := tl.inLine(50 * ms); !slices.Equal(got, step.want) {
			t.Errorf("queue %v: got %v, want %v", step.queue, got, step.want)
		}
	}
}

// The queue is told by owners, which anybody can choose.
func TestRefereeKnowsItsWorkersInTheQueue(t *testing.T) {
	t.Parallel()
	r := &referee{}
	for i := range 3 {
		cmd := self(t.Context(), t, "hasp", "", "version")
		if err := cmd.Run(); err != nil {
			t.Fatal(err)
		}
		r.procs = append(r.procs, &process{lane: i, cmd: cmd})
	}
	label := func(i int) string {
		return fmt.Sprintf("host/%d/hasp demo worker %d", r.procs[i].cmd.Process.Pid, i+1)
	}
	r.line(queue{time.Now(), []string{label(2), escape, label(0), strings.Replace(label(1), "/", "/1", 1), ""}})
	if want := []int{2, 0}; !slices.Equal(r.queue, want) {
		t.Errorf("got %v, want %v", r.queue, want)
	}
	r.line(queue{})
	if len(r.queue) != 0 {
		t.Errorf("got %v of an empty queue", r.queue)
	}
}

// queued is a timeline in which worker 1 holds, and 3 is before 2 in line.
func queued() *timeline {
	tl := &timeline{began: time.Now().Add(-time.Second), lanes: make([]lane, 3), queue: []int{2, 1}, looked: 3 * time.Millisecond}
	tl.enter(0, holding, 0)
	tl.enter(1, waiting, time.Millisecond)
	tl.enter(2, waiting, 2*time.Millisecond)
	return tl
}

func TestScreenShowsTheLine(t *testing.T) {
	t.Parallel()
	for _, ordered := range []bool{true, false} {
		var b bytes.Buffer
		s := newScreen(&b, &demo{workers: 3, increments: 5, ordered: ordered}, func() int { return 100 })
		s.colour = false
		s.draw(queued())
		if got := strings.Contains(b.String(), "  in line       next 3, then 2"); got != ordered {
			t.Errorf("ordered %v: %s", ordered, b.String())
		}
		for text := range strings.SplitSeq(b.String(), "\n") {
			third := strings.Contains(text, "  3  pid")
			if next := strings.Contains(text, ", next"); next != (ordered && third) {
				t.Errorf("ordered %v: %q", ordered, text)
			}
		}
		if n := strings.Count(b.String(), "\n"); n > 3+aroundLanes {
			t.Errorf("%d lines, more than the %d that a terminal was asked for", n, 3+aroundLanes)
		}
	}
}

func TestLinesShowTheLine(t *testing.T) {
	t.Parallel()
	for ordered, want := range map[bool]string{true: "; in line: 3, 2\n", false: "; waiting: 2, 3\n"} {
		var b bytes.Buffer
		v := &lines{out: &b, d: &demo{workers: 3, increments: 5, ordered: ordered}}
		v.wrote(queued(), 0, 5*time.Millisecond, 1)
		if !strings.HasSuffix(b.String(), want) {
			t.Errorf("ordered %v: %q does not end with %q", ordered, b.String(), want)
		}
	}
}
