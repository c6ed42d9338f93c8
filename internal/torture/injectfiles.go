package main

import (
	"os"
	"path/filepath"
	"time"

	"github.com/hasplock/hasp/internal/hostclock"
)

// limited keeps a process from writing to files.
func limited(n *nemesis) (injection, bool) {
	t, ok := n.holder()
	if !ok {
		return injection{}, false
	}
	lift, err := limitFiles(t.proc.Pid, 0)
	if err != nil {
		n.fail("harness", hostclock.Now(), err.Error())
		return injection{}, false
	}
	return injection{key: -1, seat: t.proc.seat, heal: lift}, true
}

// torn makes the kernel kill a process in the middle of a write.
func torn(n *nemesis) (injection, bool) {
	bytes := n.rand.Uint64N(60)
	t, ok := n.mortal((*nemesis).holder)
	if !ok {
		return injection{}, false
	}
	t.proc.send(order{Op: "fragile"})
	if _, err := limitFiles(t.proc.Pid, bytes); err != nil {
		n.fail("harness", hostclock.Now(), err.Error())
		return injection{}, false
	}
	died := false
	select {
	case <-t.proc.done:
		died = true
	case <-time.After(n.patience):
	}
	t.proc.kill()
	n.mark()
	s := n.seats[t.proc.seat]
	if !died {
		n.fail("harness", hostclock.Now(), t.proc.String()+" did not write")
	}
	return injection{from: true, key: -1, seat: -1, heal: func() error { return n.fill(s) }}, true
}

// full fills the disk.
func full(n *nemesis) (injection, bool) {
	name := filepath.Join(n.store.dir, "..", "ballast")
	f, err := os.Create(name)
	if err != nil {
		n.fail("harness", hostclock.Now(), err.Error())
		return injection{}, false
	}
	defer f.Close()
	for size := 4096; size > 0; size /= 2 {
		for err = nil; err == nil; {
			_, err = f.Write(make([]byte, size))
		}
	}
	n.mark()
	return injection{key: -1, seat: -1, heal: func() error { return os.Remove(name) }}, true
}
