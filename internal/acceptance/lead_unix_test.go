//go:build unix

package acceptance

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/childtest"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redistest"
)

// This file tests Lead with three processes on one Redis. If the machine stands still for
// a term, any leader loses its lease. So most of the tests only say who must work in the
// end. Those in which a leader must keep its lease begin again if it was lost.

func init() { roles["candidate"] = candidate }

// candidate is the child of TestLeadOfThreeProcesses. It calls Lead, and writes what
// happens to a journal, until it gets SIGTERM.
func candidate(args []string) error {
	url, key, path, name := args[0], args[1], args[2], args[3]
	drain, err := time.ParseDuration(args[4])
	if err != nil {
		return err
	}
	journal, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	note := func(at time.Time, what string, fence uint64) {
		fmt.Fprintln(journal, at.UnixMicro(), name, what, fence)
	}

	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	c, err := hasp.Open(ctx, url, nil)
	for ; err != nil; c, err = hasp.Open(ctx, url, nil) {
		if ctx.Err() != nil {
			return err
		}
	}
	defer c.Close()
	note(time.Now(), "competes", 0)

	err = hasp.Lead(ctx, c, key, func(fnCtx context.Context, lease *hasp.Lease) error {
		note(time.Now(), "leads", lease.Fence())

		// The lease is valid at the time that is read before the check.
		works := func() bool {
			at := time.Now()
			if lease.Err() != nil {
				return false
			}
			note(at, "works", lease.Fence())
			time.Sleep(5 * time.Millisecond)
			return true
		}
		for fnCtx.Err() == nil {
			works()
		}
		if errors.Is(context.Cause(fnCtx), hasp.ErrLost) {
			return nil // Lead takes no notice of that
		}
		for end := time.Now().Add(drain); time.Now().Before(end) && works(); {
		}
		note(time.Now(), "stops", lease.Fence())
		return nil
	}, hasp.WithFence())

	what := "ends: " + fmt.Sprint(err)
	note(time.Now(), strings.ReplaceAll(what, " ", "_"), 0)
	return nil
}

// note is one line of the journal.
type note struct {
	at    int64 // by the wall clock of the host, in microseconds
	name  string
	what  string
	fence uint64
}

// election is three candidates and their journal.
type election struct {
	t          *testing.T
	candidates map[string]*childtest.Child
	links      map[string]*faultproxy.Proxy
	journal    *bufio.Reader
	rest       string // the beginning of a line that is not complete yet
	notes      []note
}

// elect starts an election, and returns it when all candidates are there.
func elect(t *testing.T, strategy string, term, drain time.Duration) *election {
	srv := redistest.Start(t, nil)
	path := filepath.Join(t.TempDir(), "journal")
	must(t, os.WriteFile(path, nil, 0o600))
	f, err := os.Open(path)
	must(t, err)
	t.Cleanup(func() { f.Close() })

	e := &election{t: t, journal: bufio.NewReader(f), candidates: map[string]*childtest.Child{}, links: map[string]*faultproxy.Proxy{}}
	for _, name := range []string{"a", "b", "c"} {
		e.links[name] = srv.Proxy()
		url := strings.Replace(srv.URL(), srv.Addr, e.links[name].Addr(), 1)
		url = fmt.Sprintf("%s+%s?ttl=%v&timeout=1s", strategy, url, term)
		e.candidates[name] = childtest.Start(t, "candidate", url, "key of "+t.Name(), path, name, drain.String())
	}
	for name := range e.candidates {
		e.await(name+" competes", func(n note) bool { return n.name == name })
	}
	return e
}

// read reads what was written to the journal since the last call.
func (e *election) read() {
	for {
		part, err := e.journal.ReadString('\n')
		e.rest += part
		if errors.Is(err, io.EOF) {
			return
		}
		must(e.t, err)
		words := strings.Fields(e.rest)
		e.rest = ""
		at, err := strconv.ParseInt(words[0], 10, 64)
		must(e.t, err)
		fence, err := strconv.ParseUint(words[3], 10, 64)
		must(e.t, err)
		e.notes = append(e.notes, note{at, words[1], words[2], fence})
	}
}

// await waits for a note, and returns it.
func (e *election) await(what string, is func(n note) bool) (found note) {
	e.t.Helper()
	from := 0
	redistest.Until(e.t, what, func() bool {
		e.read()
		i := slices.IndexFunc(e.notes[from:], is)
		if i < 0 {
			from = len(e.notes)
			return false
		}
		found = e.notes[from+i]
		return true
	})
	return found
}

// now returns the time as notes have it.
func now() int64 { return time.Now().UnixMicro() }

// works waits until a candidate works after since, and returns the note.
func (e *election) works(since int64, names ...string) note {
	e.t.Helper()
	return e.await(fmt.Sprint(names, " work"), func(n note) bool {
		return n.what == "works" && n.at > since && slices.Contains(names, n.name)
	})
}

// leader returns the name of a candidate that works now.
func (e *election) leader() string {
	e.t.Helper()
	return e.works(now()+300_000, e.others("")...).name // all compete by then
}

// others returns the candidates but one.
func (e *election) others(name string) (all []string) {
	for other := range e.candidates {
		if other != name {
			all = append(all, other)
		}
	}
	return all
}

func (e *election) signal(name string, s os.Signal) {
	e.t.Helper()
	must(e.t, e.candidates[name].Signal(s))
}

// succeeds waits until another than old works, and logs how long that took.
func (e *election) succeeds(old string, since int64) {
	e.t.Helper()
	next := e.works(since, e.others(old)...)
	e.t.Logf("a successor after %v", time.Duration(next.at-since)*time.Microsecond)
}

// resumes ends all candidates but old, which leads again by itself.
func (e *election) resumes(old string) {
	e.t.Helper()
	for _, name := range e.others(old) {
		e.signal(name, syscall.SIGTERM)
	}
	for _, name := range e.others(old) {
		e.await(name+" ends", func(n note) bool { return n.name == name && strings.HasPrefix(n.what, "ends") })
	}
	e.works(now(), old)
}

// check fails the test if a candidate has worked under an older fence than another one
// before it: both were at work at once, or the fences did not grow.
func (e *election) check() {
	e.t.Helper()
	e.read()
	work := slices.DeleteFunc(slices.Clone(e.notes), func(n note) bool { return n.what != "works" })
	slices.SortStableFunc(work, func(a, b note) int { return int(a.at - b.at) })
	for i := 1; i < len(work); i++ {
		if last, n := work[i-1], work[i]; n.fence < last.fence || n.fence == last.fence && n.name != last.name {
			e.t.Fatalf("%s worked with fence %d, and %d µs later %s with fence %d", last.name, last.fence, n.at-last.at, n.name, n.fence)
		}
	}
	e.t.Logf("%d notes of work", len(work))
}

func TestLeadOfThreeProcesses(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name        string
		term, drain time.Duration
		run         func(t *testing.T, e *election) (again bool)
	}{
		{"killed", time.Second, 0, func(t *testing.T, e *election) bool {
			old := e.leader()
			since := now()
			e.signal(old, syscall.SIGKILL)
			e.succeeds(old, since)
			return false
		}},
		{"stopped", time.Second, 0, func(t *testing.T, e *election) bool {
			old := e.leader()
			since := now()
			e.candidates[old].Stop(t)
			e.succeeds(old, since)
			e.leader() // and works for a while
			e.candidates[old].Continue(t)
			e.resumes(old)
			return false
		}},
		{"cut off", time.Second, 0, func(t *testing.T, e *election) bool {
			old := e.leader()
			since := now()
			e.links[old].Down()
			e.succeeds(old, since)
			e.works(now()+3_000_000, e.others(old)...) // the Locks of the old one fail meanwhile
			e.links[old].Up()
			e.resumes(old)
			return false
		}},
		{"a link that hangs", time.Second, 0, func(t *testing.T, e *election) bool {
			old := e.leader()
			since := now()
			e.links[old].Stall()
			e.succeeds(old, since)
			e.works(now()+3_000_000, e.others(old)...)
			e.links[old].Flow() // what was under way arrives now
			e.resumes(old)
			return false
		}},
		// Without Lead, a lease lasts for less than two terms after the end of its context.
		{"terminated", 2 * time.Second, 5 * time.Second, func(t *testing.T, e *election) bool {
			old := e.leader()
			since := now()
			e.signal(old, syscall.SIGTERM)
			ends := e.await("the end of Lead", func(n note) bool { return n.name == old && strings.HasPrefix(n.what, "ends") })
			if ends.what != "ends:_<nil>" {
				t.Log(ends.what)
				return true
			}
			stops := e.await("the end of the cleaning", func(n note) bool { return n.name == old && n.what == "stops" })
			e.succeeds(old, stops.at)
			for _, n := range e.notes {
				if n.what == "leads" && n.at > since && n.at < stops.at {
					t.Errorf("%s led while %s cleaned up", n.name, old)
				}
			}
			if d := stops.at - since; d < 5_000_000 {
				t.Errorf("it cleaned up for %d µs only", d)
			}
			return false
		}},
		{"killed while it drains", 2 * time.Second, time.Minute, func(t *testing.T, e *election) bool {
			old := e.leader()
			since := now()
			e.signal(old, syscall.SIGTERM)
			if n := e.works(since+5_000_000, e.others("")...); n.name != old {
				return true
			}
			since = now()
			e.signal(old, syscall.SIGKILL)
			e.succeeds(old, since)
			return false
		}},
	} {
		for _, strategy := range []string{"spinlock", "fairlock"} {
			t.Run(tc.name+" "+strategy, func(t *testing.T) {
				t.Parallel()
				const most = 5
				for try := 1; ; try++ {
					e := elect(t, strategy, tc.term, tc.drain)
					again := tc.run(t, e)
					e.check()
					if !again {
						break
					}
					if try == most {
						t.Fatalf("the leader lost its lease in each of %d tries", most)
					}
					for _, c := range e.candidates {
						c.Kill()
					}
				}
			})
		}
	}
}
