package filelock

import (
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"
)

// fence takes and releases key, and checks that its fence is above last.
func fence(t *testing.T, d *driver, key string, last uint64) uint64 {
	t.Helper()
	c := fenced(claim(key))
	f := acquire(t, d, c).Fence
	if f <= last {
		t.Fatalf("fence %d after %d", f, last)
	}
	release(t, d, c)
	return f
}

func TestFenceGrowsWhateverHappens(t *testing.T) {
	clock := newDial()
	dir := t.TempDir()
	d := clock.on(dir)
	f := fence(t, d, "k", 0)
	if f != minFence(clock.read()) {
		t.Errorf("fence %d is not the time, %d", f, minFence(clock.read()))
	}
	for _, step := range []struct {
		name string
		do   func()
	}{
		{"release", func() {}},
		{"expiry", func() {
			f = max(f, acquire(t, d, fenced(claim("k"))).Fence)
			clock.pass(time.Minute)
		}},
		{"break", func() {
			f = max(f, acquire(t, d, fenced(claim("k"))).Fence)
			must(t, d.Break(t.Context(), "k"))
		}},
		{"an unfenced hold", func() {
			c := claim("k")
			if g := acquire(t, d, c); g.Fence != 0 {
				t.Errorf("fence %d without Fenced", g.Fence)
			}
			release(t, d, c)
		}},
		{"a new process", func() { d = clock.on(dir) }},
		{"a clock set back", func() { clock.set(func(i *instant) { i.wall = time.Unix(0, 0) }) }},
		{"a new process, clock still back", func() { d = clock.on(dir) }},
		{"a power failure, which undoes what was not flushed", func() {
			remove(t, d.guardFile("stripe", stripeOf("k")))
			clock.set(func(i *instant) { i.boot, i.up, i.wall = "boot-1b", time.Second, time.Unix(1, 0) })
			d = clock.on(dir)
		}},
		{"a reboot", func() { clock.set(func(i *instant) { i.boot = "boot-2"; i.up = 0 }); d = clock.on(dir) }},
		{"a reboot, same process", func() { clock.set(func(i *instant) { i.boot = "boot-3"; i.up = 0 }) }},
		{"a container with a boot clock of its own", func() { clock.set(func(i *instant) { i.clock = "boot-3/time:[7]" }) }},
		{"a clock before 1970", func() { clock.set(func(i *instant) { i.wall = time.Unix(-1000, 0) }) }},
		{"a damaged stripe", func() { damage(t, d, "k", []byte("fence 00000000000000000007 boot")) }},
		{"a stripe half written", func() { damage(t, d, "k", []byte("fence 9999")) }},
		{"a stripe of zeros", func() { damage(t, d, "k", make([]byte, 100)) }},
		{"a ceiling that is gone", func() { remove(t, d.ceilingPath()) }},
		{"a process that cannot read the boot id", func() { clock.set(func(i *instant) { i.boot = "" }) }},
		{"one that can", func() { clock.set(func(i *instant) { i.boot = "boot-3" }) }},
		{"one that cannot, on another driver", func() {
			other := newDial()
			other.now = instant{wall: time.Unix(-1000, 0)}
			f = fence(t, other.on(dir), "k", f)
		}},
		{"a clock that is right", func() { clock.set(func(i *instant) { i.wall = newDial().now.wall.Add(time.Hour) }) }},
		{"a stripe that is gone", func() { clock.pass(time.Second); remove(t, d.guardFile("stripe", stripeOf("k"))) }},
		{"all that is gone", func() { clock.pass(time.Hour); os.RemoveAll(dir); d = clock.on(dir) }},
	} {
		step.do()
		for range 3 {
			t.Run(step.name, func(t *testing.T) { f = fence(t, d, "k", f) })
		}
	}
}

func damage(t *testing.T, d *driver, key string, with []byte) {
	t.Helper()
	f, err := os.OpenFile(d.guardFile("stripe", stripeOf(key)), os.O_RDWR, 0)
	must(t, err)
	defer f.Close()
	_, err = f.WriteAt(with, 0)
	must(t, err)
}

func remove(t *testing.T, path string) {
	t.Helper()
	must(t, os.Remove(path))
}

// A directory on a memory disk is empty after a reboot. Fences then still grow if earlier fences
// were not ahead of the clock.
func TestFencesDoNotRunAheadOfTheClock(t *testing.T) {
	for boot, holds := range map[string]int{"boot-1": 200, "": 20} {
		clock := newDial()
		clock.set(func(i *instant) { i.boot = boot })
		d := clock.on(t.TempDir())
		for i := range holds {
			c := fenced(claim(fmt.Sprint("key ", i)))
			if f := acquire(t, d, c).Fence; f != minFence(clock.read()) {
				t.Fatalf("boot %q: fence %d of key %d is %d µs from the time", boot, f, i, f-minFence(clock.read()))
			}
			clock.pass(time.Millisecond)
		}
	}
}

func TestFencesSeldomWaitForTheDisk(t *testing.T) {
	clock := newDial()
	dir := t.TempDir()
	d := clock.on(dir)
	raised := 0
	var seen uint64
	for range 300 {
		f := fence(t, d, "k", 0)
		clock.pass(time.Second)
		c, err := clock.on(dir).readCeiling()
		if err != nil || c.top < f {
			t.Fatalf("fence %d was given under a ceiling of %+v, %v", f, c, err)
		}
		if c.top != seen {
			seen = c.top
			raised++
		}
	}
	if raised > 12 {
		t.Errorf("the ceiling was raised %d times in 300 s", raised)
	}

	// For half a minute, a fence needs no guard of the ceiling.
	fence(t, d, "k", 0)
	g, err := clock.on(dir).lockGuard(t.Context(), fenceGuard)
	must(t, err)
	defer g.drop()
	acquire(t, d, fenced(claim("k")))
}

func TestDamagedCeilingGivesNoFence(t *testing.T) {
	const fields = "boot \"b\"\nfloor 16\ntop 17\n"
	for name, content := range map[string]string{
		"empty":     "",
		"foreign":   "seven\n",
		"cut":       ceilingHeader + fields,
		"changed":   ceilingHeader + fields + "sum 00000000\n",
		"newer":     strings.Replace(ceilingHeader, "1", "2", 1) + fields + "sum 00000000\n",
		"more":      string(seal([]byte(ceilingHeader + fields + "roof 18\n"))),
		"less":      string(seal([]byte(ceilingHeader + "boot \"b\"\nfloor 16\n"))),
		"words":     string(seal([]byte(ceilingHeader + "boot \"b\"\nfloor 16\ntop high\n"))),
		"no reason": string(seal([]byte(ceilingHeader + "boot \"b\"\nfloor 18\ntop 17\n"))),
	} {
		t.Run(name, func(t *testing.T) {
			d := on(t.TempDir(), nil)
			write(t, d.ceilingPath(), []byte(content))
			_, err := d.Acquire(t.Context(), fenced(claim("k")))
			if err == nil || !strings.Contains(err.Error(), d.ceilingPath()) {
				t.Fatalf("acquire: %v", err)
			}
			c := claim("k")
			acquire(t, d, c) // the failed call has left nothing, and unfenced claims still work
			release(t, d, c)
			remove(t, d.ceilingPath())
			fence(t, d, "k", 0)
		})
	}
}

// If a stripe's file is damaged, its last fence is unknown. Only the ceiling on the disk bounds it.
func TestDamagedStripeUnderADamagedCeilingGivesNoFence(t *testing.T) {
	clock := newDial()
	d := clock.on(t.TempDir())
	last := fence(t, d, "k", 0)
	clock.set(func(i *instant) { i.wall = time.Unix(1, 0) })
	damage(t, d, "k", []byte("fence 00000000000000000007 boot"))
	write(t, d.ceilingPath(), []byte("seven\n"))
	if g, err := d.Acquire(t.Context(), fenced(claim("k"))); err == nil || !strings.Contains(err.Error(), d.ceilingPath()) {
		t.Errorf("fence %d after %d, %v; want an error that names the ceiling", g.Fence, last, err)
	}
	remove(t, d.ceilingPath())
	fence(t, d, "k", last)
}

func TestFencesOfProcessesThatRaiseTheCeilingAtOnce(t *testing.T) {
	dir := t.TempDir()
	clock := newDial()
	var wg sync.WaitGroup
	for range 8 {
		d := clock.on(dir)
		wg.Go(func() {
			for range 20 {
				clock.pass(7 * time.Second)
				now := clock.read()
				if err := d.reserveFences(t.Context(), now); err != nil {
					t.Error(err)
				}
				if c, err := d.readCeiling(); err != nil || c.top < minFence(now) {
					t.Errorf("ceiling %+v at %d, %v", c, minFence(now), err)
				}
			}
		})
	}
	wg.Wait()
}
