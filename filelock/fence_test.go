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
	file := d.folder.fenceFile(stripeOf("k"))
	for _, step := range []struct {
		name   string
		passes time.Duration
		do     func(i *instant)
	}{
		{"a clock set back", 0, func(i *instant) { i.wall = time.Unix(0, 0) }},
		{"a new process, clock still back", 0, func(*instant) { d = clock.on(dir) }},
		{"a reboot", 0, func(i *instant) { i.boot, i.up, d = "boot-2", 0, clock.on(dir) }},
		{"a clock before 1970", 0, func(i *instant) { i.wall = time.Unix(-1000, 0) }},
		{"a clock that is right", 0, func(i *instant) { i.wall = newDial().now.wall.Add(time.Hour) }},
		{"a power failure, which removes the stripe", time.Second, func(*instant) { remove(t, file) }},
		{"one that leaves it empty", time.Second, func(*instant) { write(t, file, nil) }},
		{"one that leaves zeros", time.Second, func(*instant) { write(t, file, make([]byte, 50)) }},
		{"all that is gone", time.Hour, func(*instant) { os.RemoveAll(dir); d = clock.on(dir) }},
	} {
		clock.pass(step.passes)
		clock.set(step.do)
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
			noGrant(t, d, fenced(claim("k")), path)
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
