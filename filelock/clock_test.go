package filelock

import (
	"errors"
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
)

func TestBootClockRuns(t *testing.T) {
	a := readClock()
	if runtime.GOOS == "linux" && (len(a.boot) != 36 || a.up <= 0) {
		t.Fatalf("no boot clock: %+v", a)
	}
	deadline := time.Now().Add(10 * time.Second)
	for b := a; b.up <= a.up && a.boot != ""; b = readClock() {
		if time.Now().After(deadline) || b.boot != a.boot {
			t.Fatalf("from %+v to %+v", a, b)
		}
	}
}

func TestWallClockDoesNotCountWithinABoot(t *testing.T) {
	for _, step := range []time.Duration{24 * time.Hour, -24 * time.Hour} {
		clock := newDial()
		d := clock.on(t.TempDir())
		c := claim("k")
		acquire(t, d, c)
		clock.set(func(i *instant) { i.wall = i.wall.Add(step) })
		holds(t, d, "k", time.Minute)
		must(t, renew(d, c)[0])
		clock.set(func(i *instant) { i.up += time.Minute })
		acquire(t, d, claim("k"))
	}
}

func TestRecordOfAnotherBootLastsByTheWallClock(t *testing.T) {
	clock := newDial()
	d := clock.on(t.TempDir())
	c := claim("k")
	acquire(t, d, c)
	clock.set(func(i *instant) { i.boot, i.up, i.wall = "boot-2", 10*time.Hour, i.wall.Add(20*time.Second) })
	holds(t, d, "k", 40*time.Second) // although this boot's clock is past the end
	// The holder, in a container with another boot clock, renews. Its record is then of this boot.
	must(t, renew(d, c)[0])
	clock.set(func(i *instant) { i.wall = i.wall.Add(time.Hour) })
	refused(t, d, claim("k"), backend.ErrHeld)
	clock.set(func(i *instant) { i.boot, i.up = "boot-3", 0 })
	lost(t, "renewal after the end by the wall clock", renew(d, c)[0])
	acquire(t, d, claim("k"))
}

// One driver has no boot clock. The other has one, and reads a record that was written without one.
func TestWithoutBootClockTheWallClockDecides(t *testing.T) {
	clock := newDial()
	clock.set(func(i *instant) { i.boot, i.up = "", 0 })
	dir := t.TempDir()
	d := clock.on(dir)
	acquire(t, d, claim("k"))
	refused(t, d, claim("k"), backend.ErrHeld)
	other := newDial()
	refused(t, other.on(dir), claim("k"), backend.ErrHeld)
	other.pass(time.Minute)
	clock.set(func(i *instant) { i.wall = i.wall.Add(time.Minute) }) // up stays 0
	acquire(t, d, claim("k"))
}

// A power failure may leave the name of a record without its content. Such a record of an earlier
// boot holds nothing. If the record is of this boot, it was damaged in another way, and blocks its
// key. A record with the wrong content always blocks its key.
func TestTornRecordFromBeforeThisBootHoldsNothing(t *testing.T) {
	whole := sample().file()
	changed := sample().file()
	changed[30] ^= 1
	for name, c := range map[string]struct {
		content []byte
		torn    bool
	}{
		"empty":       {nil, true},
		"foreign":     {[]byte("notes\n"), false},
		"changed":     {changed, false},
		"another key": {whole, false},
	} {
		clock := newDial()
		d := clock.on(t.TempDir())
		file := d.folder.recordFile("k")
		write(t, file, c.content)
		for _, age := range []time.Duration{time.Minute, -time.Minute} {
			at := clock.read().bootTime().Add(age)
			must(t, os.Chtimes(file, at, at))
			blocks := age > 0 || !c.torn
			_, inspected := d.Inspect(t.Context(), "k")
			_, acquired := d.Acquire(t.Context(), claim("k"))
			for _, err := range []error{inspected, acquired} {
				if (err != nil) != blocks || errors.Is(err, backend.ErrHeld) {
					t.Errorf("%s, written %v after the boot: %v", name, age, err)
				}
			}
		}
	}
}

func write(t *testing.T, path string, content []byte) {
	t.Helper()
	must(t, os.WriteFile(path, content, 0o600))
}

// A release whose process pauses after it has read the clock keeps the key taken until KeepUntil, and
// no shorter.
func TestMinHoldOfAReleaseThatPauses(t *testing.T) {
	d := on(t.TempDir(), nil)
	c := claim("k")
	acquire(t, d, c)
	d.clock = func() instant {
		now := readClock()
		time.Sleep(20 * time.Millisecond)
		return now
	}
	c.KeepUntil = time.Now().Add(time.Hour)
	must(t, d.Release(t.Context(), c))

	d.clock = readClock
	s, err := d.Inspect(t.Context(), "k")
	must(t, err)
	if left := time.Until(c.KeepUntil); s.TTL < left { // the status was read before, so it must show at least as much
		t.Errorf("the min hold ends %v early", left-s.TTL)
	}
}
