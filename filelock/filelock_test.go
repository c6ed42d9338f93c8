package filelock

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
)

func TestRenewalKeepsWhatTheRecordSays(t *testing.T) {
	clock := newDial()
	d := clock.on(t.TempDir())
	c := fenced(claim("k"))
	c.Waited = 3 * time.Second
	fence := acquire(t, d, c).Fence
	since := clock.read().wall
	clock.pass(30 * time.Second)
	c.Fenced, c.Owner = false, "nobody"
	must(t, renew(d, c)[0])
	s := await.Value(d.Inspect(t.Context(), "k"))
	want := backend.Status{Held: true, Owner: "host/1/test", Since: since, TTL: time.Minute, Fence: fence}
	if !reflect.DeepEqual(s, want) {
		t.Errorf("got %+v, want %+v", s, want)
	}
	var held *backend.HeldError
	_, err := d.Acquire(t.Context(), claim("k"))
	if !errors.As(err, &held) || held.Waited != 3*time.Second {
		t.Errorf("the next caller's error: %v, %+v", err, held)
	}
}

func TestLongestTermDoesNotWrapRound(t *testing.T) {
	clock := newDial()
	d := clock.on(t.TempDir())
	c := claim("k")
	c.TTL = math.MaxInt64
	acquire(t, d, c)
	clock.pass(1000 * time.Hour)
	refused(t, d, claim("k"), backend.ErrHeld)
	must(t, renew(d, c)[0])
	refused(t, d, claim("k"), backend.ErrHeld)
	release(t, d, c)
}

func TestClaimThatIsTooLongForARecordIsInvalid(t *testing.T) {
	d := on(t.TempDir(), nil)
	key, owner := claim(strings.Repeat("k", maxRecord)), claim("k")
	owner.Owner = strings.Repeat("o", maxRecord)
	refused(t, d, key, backend.ErrInvalid)
	refused(t, d, owner, backend.ErrInvalid)
	acquire(t, d, claim("k"))
}

// A call that cannot succeed creates nothing, not even the directory.
func TestCallsThatAskNothing(t *testing.T) {
	enough := errors.New("enough")
	ended, cancel := context.WithCancelCause(t.Context())
	cancel(enough)
	dir := filepath.Join(t.TempDir(), "never")
	closed := on(dir, nil)
	must(t, closed.Close())

	calls := func(ctx context.Context, d *driver, want error) {
		t.Helper()
		c := claim("k")
		_, acquired := d.Acquire(ctx, c)
		_, inspected := d.Inspect(ctx, "k")
		errs := append(renewIn(ctx, d, c), acquired, inspected, d.Release(ctx, c), d.Break(ctx, "k"), d.probe(ctx))
		for i, err := range errs {
			if !errors.Is(err, want) {
				t.Errorf("call %d: %v, want %v", i, err, want)
			}
		}
	}
	calls(ended, on(dir, nil), enough)
	calls(t.Context(), closed, errClosed)
	for _, mode := range []fs.FileMode{0o600, 0o77, 0o1777, 0o10700, fs.ModeDir | 0o700} {
		if _, err := New(dir, &Options{Mode: mode}); !errors.Is(err, hasp.ErrInvalid) {
			t.Errorf("mode %o: %v", mode, err)
		}
	}
	if _, err := os.Stat(dir); err == nil {
		t.Error("the directory was made")
	}
}

// done may call the driver for the same key.
func TestRenewalIsToldWithoutTheGuard(t *testing.T) {
	d := on(t.TempDir(), nil)
	cs := []backend.Claim{claim("k"), claim(neighbour("k"))}
	for _, c := range cs {
		acquire(t, d, c)
	}
	d.Renew(t.Context(), cs, func(i int, _ backend.Grant, err error) {
		must(t, err)
		release(t, d, cs[i])
	})
}

func locks(t *testing.T, dir string) (names []string) {
	for _, name := range files(t, dir) {
		if strings.HasSuffix(name, suffix) {
			names = append(names, name)
		}
	}
	return names
}

func TestSweepRemovesWhatExpired(t *testing.T) {
	clock := newDial()
	d := clock.on(t.TempDir())
	var kept []string
	for i, key := range oddKeys {
		c := claim(key)
		if i%2 == 0 {
			c.TTL += 1
			kept = append(kept, stateName(key))
		}
		acquire(t, d, c)
	}
	write(t, d.folder.recordFile("foreign"), []byte("notes\n"))
	write(t, d.folder.recordFile("copied"), await.Value(os.ReadFile(d.folder.recordFile(oddKeys[1]))))
	kept = append(kept, stateName("foreign"), stateName("copied"))
	old, young := filepath.Join(d.folder.path, tempPrefix+"old"), filepath.Join(d.folder.path, tempPrefix+"young")
	write(t, old, nil)
	write(t, young, nil)
	must(t, os.Chtimes(old, time.Time{}, time.Now().Add(-2*time.Hour)))

	d.sweeper.removeExpired("foreign") // as if there was an expired record when the sweep read it
	clock.pass(time.Minute - 1)
	d.sweeper.sweep(t.Context(), openFiles)
	if got := len(locks(t, d.folder.path)); got != len(oddKeys)+2 {
		t.Errorf("before the end %d are left of %d", got, len(oddKeys)+2)
	}
	clock.pass(1)
	d.sweeper.sweep(t.Context(), openFiles)
	slices.Sort(kept)
	if got := locks(t, d.folder.path); !slices.Equal(got, kept) {
		t.Errorf("left: %q\nwant: %q", got, kept)
	}
	remove(t, young)
	noTemp(t, d)

	clock.pass(1)
	c := claim(oddKeys[0])
	acquire(t, d, c)
	d.sweeper.removeExpired(c.Key) // the record had expired when the sweep read it, and the key was taken since
	refused(t, d, claim(c.Key), backend.ErrHeld)
}

func TestCloseDoesNotWaitForASweep(t *testing.T) {
	d := on(t.TempDir(), nil)
	dir := await.Value(os.Open(d.folder.path))
	d.sweeper.mu.Lock() // as a sweep that hangs in the file system
	d.sweeper.dir = dir
	await.Return(t, "Close", func() { d.Close() })
	d.sweeper.mu.Unlock()
	d.sweeper.closeDir()
	await.ErrorIs(t, "the directory stays open", dir.Close(), os.ErrClosed)
}

// The driver stays open, and other keys stay held.
func TestExpiredRecordsAreBounded(t *testing.T) {
	clock := newDial()
	d := clock.on(t.TempDir())
	const live, used = 300, 2000
	for i := range live {
		c := claim(fmt.Sprint("live ", i))
		c.TTL = time.Hour
		acquire(t, d, c)
	}
	most := 0
	for i := range used {
		c := claim(fmt.Sprint("used once ", i))
		acquire(t, d, c)
		if i%2 == 0 { // the other holders die
			c.KeepUntil = time.Now().Add(time.Minute)
			release(t, d, c)
		}
		if i%100 == 99 {
			clock.pass(time.Minute)
			most = max(most, len(locks(t, d.folder.path)))
		}
	}
	if most > 4*live {
		t.Errorf("%d records with %d keys held", most, live)
	}

	must(t, d.Close())
}
