package pubsublock_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/internal/strategytest"
	"github.com/hasplock/hasp/pubsublock"
)

var shared = strategytest.Shared

// The last of the readers to release wakes a writer, which has kept new readers away.
func TestLastReaderWakesAWriter(t *testing.T) {
	bubble(t, func(t *testing.T, v *redistest.VirtualServer, a, b rig) {
		for _, kind := range []func(string) backend.Claim{claim, fenced} {
			first, second := shared("k"), shared("k")
			b.Acquire(t, first)
			b.Acquire(t, second)
			w := a.wait(t, t.Context(), kind("k"))
			for range 100 {
				time.Sleep(100 * time.Millisecond)
				var held *backend.HeldError
				if _, err := b.Driver.Acquire(t.Context(), shared("k")); !errors.As(err, &held) || held.Shared || held.RetryAfter > 3*time.Second || held.RetryAfter <= 0 {
					t.Fatalf("a new reader: got %#v", err)
				}
			}
			b.Release(t, first)
			w.waits(t)
			b.Release(t, second)
			w.granted(t, time.Now(), 0, 0)
			if v.Mini.Exists(redisstore.IntentKey("k")) {
				t.Error("the grant left the intent")
			}
			a.Release(t, w.c)
		}
	})
}

// All readers that wait try at once when a writer has released the key, also readers of a
// Client that has just had the key. They take no turns.
func TestReleaseWakesAllReadersAtOnce(t *testing.T) {
	bubble(t, func(t *testing.T, v *redistest.VirtualServer, a, b rig) {
		first := claim("k")
		a.Acquire(t, first)
		var others []*waiter
		for range 3 {
			r := over(v.Direct())
			defer r.Driver.Close()
			others = append(others, r.wait(t, t.Context(), claim("k")))
		}
		a.Release(t, first) // from here on a has other Clients ahead
		synctest.Wait()
		var readers []*waiter
		for _, r := range []rig{a, b} {
			for range 3 {
				readers = append(readers, r.wait(t, t.Context(), shared("k")))
			}
		}
		time.Sleep(2300 * time.Millisecond)
		for _, o := range others {
			if !o.ended() {
				continue
			}
			defer b.Release(t, readers[0].c)
			for _, left := range others {
				if left != o {
					left.stop()
					<-left.done
				}
			}
			b.Release(t, o.c)
			released := time.Now()
			for _, r := range readers {
				r.granted(t, released, 0, 0)
			}
			return
		}
		t.Error("none of the writers got the key")
	})
}

// A writer that gives up ends its intent when the engine releases its token, and the
// readers that it has kept away try at once.
func TestWriterThatGivesUpLetsReadersIn(t *testing.T) {
	for name, end := range map[string]func(context.Context) (context.Context, context.CancelFunc){
		"cancelled": context.WithCancel,
		"timed out": func(ctx context.Context) (context.Context, context.CancelFunc) {
			return context.WithTimeout(ctx, 2300*time.Millisecond)
		},
	} {
		bubble(t, func(t *testing.T, v *redistest.VirtualServer, a, b rig) {
			first := shared("k")
			b.Acquire(t, first)
			ctx, stop := end(t.Context())
			defer stop()
			w := a.wait(t, ctx, claim("k"))
			reader := b.wait(t, t.Context(), shared("k"))
			time.Sleep(2200 * time.Millisecond)
			reader.waits(t)
			if name == "cancelled" {
				stop()
			}
			<-w.done
			var held *backend.HeldError
			if !errors.As(w.err, &held) || !held.Shared || held.Owner != first.Owner || !errors.Is(w.err, ctx.Err()) {
				t.Errorf("%s: got %v", name, w.err)
			}
			reader.waits(t)
			if err := a.Driver.Release(t.Context(), w.c); !errors.Is(err, backend.ErrLost) {
				t.Errorf("%s: release: %v", name, err)
			}
			reader.granted(t, time.Now(), 0, 0)
			b.Release(t, first)
			b.Release(t, reader.c)
			if keys := v.Mini.Keys(); len(keys) != 0 {
				t.Errorf("%s: left %q", name, keys)
			}
		})
	}
}

// The intent of another caller outlasts a caller that gives up, and the intent of a caller
// that has died ends by itself.
func TestIntentOfAnotherStays(t *testing.T) {
	bubble(t, func(t *testing.T, v *redistest.VirtualServer, a, b rig) {
		b.Acquire(t, shared("k"))
		first := a.wait(t, t.Context(), claim("k"))
		second := b.wait(t, t.Context(), claim("k"))
		first.stop()
		<-first.done
		_ = a.Driver.Release(t.Context(), first.c)
		if got, _ := v.Mini.Get(redisstore.IntentKey("k")); got != second.c.Token {
			t.Errorf("the intent is %q", got)
		}

		second.stop()
		<-second.done // without a release, as if its process had died
		died := time.Now()
		b.wait(t, t.Context(), shared("k")).granted(t, died, time.Second, 3100*time.Millisecond)
	})
}

// A key without readers costs no more than before: one command, with one key.
func TestIntentOnlyAfterReaders(t *testing.T) {
	srv := redistest.Start(t, &redistest.Options{Own: true, Real: true})
	p := srv.Proxy()
	o := srv.ClientOptions()
	o.Addr = p.Addr()
	rdb := redis.NewClient(o)
	defer rdb.Close()
	r := rig{strategytest.Rig[*pubsublock.Driver]{Server: srv, Redis: srv.Client(), Driver: open(rdb)}}
	c := claim("k")
	c.Waiting = true
	r.Acquire(t, c)
	r.Release(t, c)
	p.Commands()
	r.Acquire(t, c)
	if _, err := r.Driver.Acquire(t.Context(), c); !errors.Is(err, backend.ErrHeld) {
		t.Fatal(err)
	}
	r.Release(t, c)
	sent := p.Commands()
	if len(sent) != 3 {
		t.Errorf("sent %q", sent)
	}
	for _, s := range sent {
		if want := " 1 k "; !strings.Contains(s, want) {
			t.Errorf("sent %q", s)
		}
	}
}
