package hasp_test

import (
	"context"
	"fmt"
	"log"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hasplock/hasp"
)

// records is a slog.Handler that keeps what it is given, as text.
type records struct {
	least slog.Level

	mu    sync.Mutex // guards all below
	lines []string
	ctxs  []context.Context
}

func (r *records) Enabled(_ context.Context, l slog.Level) bool { return l >= r.least }
func (r *records) WithAttrs([]slog.Attr) slog.Handler           { return r }
func (r *records) WithGroup(string) slog.Handler                { return r }

func (r *records) Handle(ctx context.Context, rec slog.Record) error {
	line := rec.Level.String() + " " + rec.Message
	rec.Attrs(func(a slog.Attr) bool {
		if a.Key != "id" {
			line += " " + a.String()
		} else if a.Value.Uint64() == 0 {
			line += " no id"
		}
		return true
	})
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lines = append(r.lines, line)
	r.ctxs = append(r.ctxs, ctx)
	return nil
}

func TestLogEvents(t *testing.T) {
	r := &records{least: slog.LevelDebug}
	withClient(t, &hasp.Options{TTL: 10 * time.Second, Observe: hasp.LogEvents(slog.New(r))}, func(t *testing.T, f *faulty, c *hasp.Client) {
		f.acquire = slowAcquire(time.Second)
		l := lockNow(t, c, "a b", hasp.WithFence())
		want(t, "TryLock", errOf(c.TryLock(t.Context(), "a b")), hasp.ErrHeld)
		time.Sleep(2 * time.Second)
		unlock(t, l)

		f.set(up)
		lockNow(t, c, "lost")
		f.Break(t.Context(), "lost")
		time.Sleep(10 * time.Second)
		lockNow(t, c, "closed")
		f.set(down)
		want(t, "TryLock", errOf(c.TryLock(t.Context(), "down")), hasp.ErrUnavailable)
		time.Sleep(3500 * time.Millisecond)
		f.set(up)
		c.Close()

		got := slices.DeleteFunc(r.lines, func(line string) bool { return strings.Contains(line, "requested") })
		for i, want := range []string{
			fmt.Sprintf(`DEBUG hasp: acquired key=a b op=lock wait=1s fence=%d`, l.Fence()),
			`DEBUG hasp: refused key=a b op=trylock wait=0s err=hasp: trylock "a b": held by `,
			fmt.Sprintf(`DEBUG hasp: released key=a b op=lock hold=2s fence=%d`, l.Fence()),
			`DEBUG hasp: acquired key=lost op=lock wait=0s`,
			`ERROR hasp: lost key=lost op=lock hold=`,
			`DEBUG hasp: acquired key=closed op=lock wait=0s`,
			`WARN hasp: refused key=down op=trylock wait=0s err=hasp: trylock "down": connection reset`,
			`WARN hasp: renew failed key=closed op=lock err=connection reset`,
		} {
			if i >= len(got) || !strings.HasPrefix(got[i], want) {
				t.Errorf("want %q at %d of %q", want, i, got)
			}
		}
		if last := got[len(got)-1]; !strings.HasPrefix(last, "DEBUG hasp: lost key=closed op=lock hold=") || !strings.HasSuffix(last, "err=client closed") {
			t.Errorf("got %q at last, want the lease that Close ended", last)
		}
		if n := len(r.lines); n == 0 || strings.Contains(strings.Join(r.lines, "\n"), "no id") {
			t.Errorf("want an id in each of %q", r.lines)
		}
	})
}

// A lease that is held for ten terms is logged once, unless a function holds it.
func TestLogEventsOfALeaseThatIsNotUnlocked(t *testing.T) {
	r := &records{least: slog.LevelInfo}
	withClient(t, &hasp.Options{Observe: hasp.LogEvents(slog.New(r))}, func(t *testing.T, _ *faulty, c *hasp.Client) {
		l := lockNow(t, c, "forgotten")
		hasp.Do(t.Context(), c, "used", func(context.Context, *hasp.Lease) error {
			time.Sleep(time.Hour)
			return nil
		})
		unlock(t, l)
		unlock(t, lockNow(t, c, "unlocked"))
		c.Close()
		if len(r.lines) != 1 || !strings.HasPrefix(r.lines[0], "INFO hasp: still held key=forgotten op=lock hold=5m") {
			t.Errorf("got %q", r.lines)
		}
	})
}

// A handler gets what is enabled, with the context, for what a trace has put there.
func TestLogEventsPassesOnWhatIsEnabled(t *testing.T) {
	type keyOf struct{}
	r := &records{least: slog.LevelWarn}
	observe := hasp.LogEvents(slog.New(r))
	ctx := context.WithValue(t.Context(), keyOf{}, "trace")
	observe(ctx, hasp.Event{Kind: hasp.EventAcquired})
	observe(ctx, hasp.Event{Kind: hasp.EventLost, Err: hasp.ErrClosed})
	if len(r.lines) != 0 {
		t.Errorf("got %q below the level", r.lines)
	}
	observe(ctx, hasp.Event{Kind: hasp.EventLost, ID: 1, Op: "lock", Key: "k", Err: hasp.ErrLost})
	if len(r.lines) != 1 || r.lines[0] != "ERROR hasp: lost key=k op=lock hold=0s err=lease lost" || r.ctxs[0].Value(keyOf{}) != "trace" {
		t.Errorf("got %q, want the loss", r.lines)
	}
}

// Without a logger it is the default one, also if that is set later.
func TestLogEventsWithoutALogger(t *testing.T) {
	// SetDefault also redirects package log.
	defer log.SetFlags(log.Flags())
	defer log.SetOutput(log.Writer())
	defer slog.SetDefault(slog.Default())

	observe := hasp.LogEvents(nil)
	r := &records{}
	slog.SetDefault(slog.New(r))
	observe(t.Context(), hasp.Event{Kind: hasp.EventRenewFailed, Err: errNet})
	if len(r.lines) != 1 {
		t.Errorf("got %q", r.lines)
	}
}
