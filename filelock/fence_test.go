package filelock

import (
	"os"
	"strings"
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
		{"a reboot", func() { clock.set(func(i *instant) { i.boot = "boot-2"; i.up = 0 }); d = clock.on(dir) }},
		{"a clock before 1970", func() { clock.set(func(i *instant) { i.wall = time.Unix(-1000, 0) }) }},
		{"a clock that is right", func() { clock.set(func(i *instant) { i.wall = newDial().now.wall.Add(time.Hour) }) }},
		{"a power failure, which removes the stripe", func() { clock.pass(time.Second); remove(t, d.folder.fenceFile(stripeOf("k"))) }},
		{"one that leaves it empty", func() { clock.pass(time.Second); write(t, d.folder.fenceFile(stripeOf("k")), nil) }},
		{"one that leaves zeros", func() { clock.pass(time.Second); write(t, d.folder.fenceFile(stripeOf("k")), make([]byte, 50)) }},
		{"all that is gone", func() { clock.pass(time.Hour); os.RemoveAll(dir); d = clock.on(dir) }},
	} {
		step.do()
		for range 3 {
			t.Run(step.name, func(t *testing.T) { f = fence(t, d, "k", f) })
		}
	}
}

func remove(t *testing.T, path string) { t.Helper(); must(t, os.Remove(path)) }

func TestDamagedStripeGivesNoFence(t *testing.T) {
	valid := string(seal([]byte(fenceHeader + "fence 7\n")))
	for name, content := range map[string]string{
		"foreign": "seven\n",
		"changed": strings.Replace(valid, "7", "8", 1),
		"newer":   strings.Replace(valid, "1", "2", 1),
		"more":    string(seal([]byte(fenceHeader + "fence 7\nroof 18\n"))),
	} {
		t.Run(name, func(t *testing.T) {
			d := on(t.TempDir(), nil)
			path := d.folder.fenceFile(stripeOf("k"))
			write(t, path, []byte(content))
			_, err := d.Acquire(t.Context(), fenced(claim("k")))
			outage(t, "acquire", err, path)
			c := claim("k")
			acquire(t, d, c) // the failed call has left nothing, and unfenced claims still work
			release(t, d, c)
			if b, err := os.ReadFile(path); string(b) != content {
				t.Errorf("the file is now %q, %v", b, err)
			}
			remove(t, path)
			fence(t, d, "k", 0)
		})
	}
}
