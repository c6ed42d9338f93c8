package filelock

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
)

func TestTermEndsAndIsNeverRevived(t *testing.T) {
	clock := newDial()
	d := clock.on(t.TempDir())
	old, next := claim("k"), claim("k")
	acquire(t, d, old)
	clock.pass(time.Minute - 1)
	refused(t, d, next, backend.ErrHeld)
	clock.pass(1)
	lost(t, "renewal of a term that ended", renew(d, old)[0])
	lost(t, "release of a term that ended", d.Release(t.Context(), old))
	notHeld(t, d, "k")
	acquire(t, d, next)
}

// The rest of the term is counted by the boot clock from the release on.
func TestReleaseThatKeepsTheKey(t *testing.T) {
	for _, keep := range []time.Duration{10 * time.Second, 10 * time.Minute} {
		clock := newDial()
		dir := t.TempDir()
		a, b := clock.on(dir), clock.on(dir)
		old, next := fenced(claim("k")), fenced(claim("k"))
		acquire(t, a, old)
		old.KeepUntil = time.Now().Add(keep)
		release(t, b, old)
		lost(t, "late renewal", renew(a, old)[0])
		lost(t, "release again", a.Release(t.Context(), old))
		clock.pass(keep - time.Second)
		refused(t, a, next, backend.ErrHeld)
		if st, err := a.Inspect(t.Context(), "k"); err != nil || st.Owner != old.Owner || st.TTL > time.Second || st.Fence == 0 {
			t.Errorf("got %+v, %v", st, err)
		}
		clock.pass(time.Second)
		acquire(t, a, next)
	}

	// Break and a KeepUntil that has passed free the key.
	d := New(t.TempDir(), nil)
	c := claim("k")
	acquire(t, d, c)
	c.KeepUntil = time.Now().Add(time.Hour)
	release(t, d, c)
	must(t, d.Break(t.Context(), "k"))
	c = claim("k")
	acquire(t, d, c)
	c.KeepUntil = time.Now()
	release(t, d, c)
	notHeld(t, d, "k")
}

func TestRenewalNeverShortens(t *testing.T) {
	clock := newDial()
	d := clock.on(t.TempDir())
	c := claim("k")
	acquire(t, d, c)
	clock.pass(10 * time.Second)
	for _, step := range []struct{ ask, want time.Duration }{
		{20 * time.Second, 50 * time.Second},
		{time.Minute, time.Minute},
		{2 * time.Minute, 2 * time.Minute},
		{time.Second, 2 * time.Minute},
	} {
		c.TTL = step.ask
		must(t, renew(d, c)[0])
		if got := left(t, d, "k"); got != step.want {
			t.Errorf("asked for %v, left %v, want %v", step.ask, got, step.want)
		}
	}
}

func TestRenewalKeepsWhatTheRecordSays(t *testing.T) {
	clock := newDial()
	d := clock.on(t.TempDir())
	c := fenced(claim("k"))
	fence := acquire(t, d, c).Fence
	since := clock.read().wall
	clock.pass(30 * time.Second)
	c.Fenced, c.Owner = false, "nobody"
	must(t, renew(d, c)[0])
	want := backend.Status{Held: true, Owner: "host/1/test", Since: since, TTL: time.Minute, Fence: fence}
	if s, err := d.Inspect(t.Context(), "k"); s.Held != want.Held || s.Owner != want.Owner || !s.Since.Equal(since) || s.TTL != want.TTL || s.Fence != fence || err != nil {
		t.Errorf("got %+v, %v, want %+v", s, err, want)
	}
}

func TestBatchIsAnsweredClaimByClaim(t *testing.T) {
	clock := newDial()
	d := clock.on(t.TempDir())
	var cs []backend.Claim
	for i := range 300 { // several to a stripe
		c := claim(fmt.Sprintf("k%d", i))
		if i%3 != 0 {
			acquire(t, d, c)
		}
		if i%3 == 2 {
			c.Token = "another"
		}
		cs = append(cs, c)
	}
	clock.pass(time.Second)
	for i, err := range renew(d, cs...) {
		if (i%3 == 1) != (err == nil) || (err != nil && !errors.Is(err, backend.ErrLost)) {
			t.Errorf("claim %d: %v", i, err)
		}
		if i%3 == 1 && left(t, d, cs[i].Key) != time.Minute {
			t.Errorf("claim %d was not renewed", i)
		}
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

func TestNothingIsLeftOfKeysThatWereUsed(t *testing.T) {
	dir := t.TempDir()
	d := New(dir, nil)
	for i := range 2000 {
		c := claim(fmt.Sprint("used once ", i))
		c.Fenced = i%10 == 0
		acquire(t, d, c)
		release(t, d, c)
	}
	names := files(t, dir)
	if len(names) > 2*stripes+3 {
		t.Errorf("%d files: %v", len(names), names)
	}
	for _, name := range names {
		if strings.HasPrefix(name, "key-") || strings.HasPrefix(name, "sha256-") || strings.HasPrefix(name, "temp-") {
			t.Errorf("left behind: %s", name)
		}
	}
}

func TestBadClaimsAreInvalid(t *testing.T) {
	d := New(t.TempDir(), nil)
	for name, change := range map[string]func(*backend.Claim){
		"no key":     func(c *backend.Claim) { c.Key = "" },
		"no token":   func(c *backend.Claim) { c.Token = "" },
		"short term": func(c *backend.Claim) { c.TTL = backend.MinTTL - 1 },
		"huge key":   func(c *backend.Claim) { c.Key = strings.Repeat("k", maxRecord) },
		"huge owner": func(c *backend.Claim) { c.Owner = strings.Repeat("o", maxRecord) },
	} {
		c := claim("k")
		change(&c)
		if _, err := d.Acquire(t.Context(), c); !errors.Is(err, backend.ErrInvalid) {
			t.Errorf("%s: %.200v", name, err)
		}
	}
	acquire(t, d, claim("k"))
}

func TestEndedContextAsksNothing(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "never")
	d := New(dir, nil)
	cause := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(cause)
	_, err := d.Acquire(ctx, claim("k"))
	_, ierr := d.Inspect(ctx, "k")
	for i, err := range []error{err, ierr, d.Release(ctx, claim("k")), d.Break(ctx, "k")} {
		if !errors.Is(err, cause) {
			t.Errorf("call %d: %v", i, err)
		}
	}
	if _, err := os.Stat(dir); err == nil {
		t.Error("the directory was made")
	}
}

func TestClosedDriverRefuses(t *testing.T) {
	d := New(t.TempDir(), nil)
	c := claim("k")
	acquire(t, d, c)
	must(t, d.Close())
	refused(t, d, claim("j"), errClosed)
	_, err := d.Inspect(t.Context(), "k")
	for i, err := range []error{renew(d, c)[0], d.Release(t.Context(), c), err} {
		if !errors.Is(err, errClosed) {
			t.Errorf("call %d: %v", i, err)
		}
	}
}

// done may call the driver for the same key.
func TestRenewalIsToldWithoutTheGuard(t *testing.T) {
	d := New(t.TempDir(), nil)
	cs := []backend.Claim{claim("k"), claim(neighbour("k"))}
	for _, c := range cs {
		acquire(t, d, c)
	}
	d.Renew(t.Context(), cs, func(i int, _ backend.Grant, err error) {
		must(t, err)
		release(t, d, cs[i])
	})
}

func TestRecordIsThereAtEveryMomentOfARenewal(t *testing.T) {
	d := New(t.TempDir(), nil)
	c := claim("k")
	acquire(t, d, c)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for looks := 0; ; looks++ {
			select {
			case <-stop:
				return
			default:
			}
			if s, err := d.Inspect(context.Background(), "k"); !s.Held || err != nil {
				t.Errorf("look %d: %+v, %v", looks, s, err)
				return
			}
		}
	})
	for range 300 {
		c.TTL += time.Second // so that the record has to be written
		must(t, renew(d, c)[0])
	}
	close(stop)
	wg.Wait()
}

// locks returns the names of the records in the directory.
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
	foreign := stateName("foreign")
	write(t, filepath.Join(d.dir, foreign), []byte("notes\n"))
	copied := stateName("copied")
	b, err := os.ReadFile(d.path(oddKeys[1]))
	must(t, err)
	write(t, filepath.Join(d.dir, copied), b)
	kept = append(kept, foreign, copied)

	clock.pass(time.Minute - 1)
	d.sweep(t.Context(), openFiles)
	if got := len(locks(t, d.dir)); got != len(oddKeys)+2 {
		t.Errorf("before the end %d are left of %d", got, len(oddKeys)+2)
	}
	clock.pass(1)
	d.sweep(t.Context(), openFiles)
	slices.Sort(kept)
	if got := locks(t, d.dir); !slices.Equal(got, kept) {
		t.Errorf("left: %q\nwant: %q", got, kept)
	}
	clock.pass(1)
	c := claim(oddKeys[0])
	acquire(t, d, c)
	d.removeExpired(t.Context(), c.Key) // it looked expired before it was taken
	refused(t, d, claim(c.Key), backend.ErrHeld)
}

// The driver is not opened again, and other keys stay held.
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
		if i%2 == 0 { // the others die
			c.KeepUntil = time.Now().Add(time.Minute)
			release(t, d, c)
		}
		if i%100 == 99 {
			clock.pass(time.Minute)
			most = max(most, len(locks(t, d.dir)))
		}
	}
	if most > 4*live {
		t.Errorf("%d records with %d keys held", most, live)
	}

	for range d.List(t.Context(), "", time.Minute) {
	}
	if got := len(locks(t, d.dir)); got != live {
		t.Errorf("after a list %d records with %d keys held", got, live)
	}
	must(t, d.Close())
}
