package filelock

import (
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
)

// A container may have a time namespace, in which the boot clock has an offset. Setting the wall
// clock does not end the hold of a process in such a container.
func TestWallClockDoesNotCountBetweenTimeNamespaces(t *testing.T) {
	for _, offset := range []string{"1000", "-1"} {
		unshare := []string{"--time", "--boottime", offset}
		if out, err := exec.Command("unshare", append(unshare, "true")...).CombinedOutput(); err != nil {
			t.Skipf("needs to create a time namespace: %v, %s", err, out)
		}
		dir := t.TempDir()
		child := exec.Command("unshare", append(unshare, os.Args[0], "-test.run=^$")...)
		child.Env = append(os.Environ(), "HASP_CREW_ROLE=take\x1f"+dir+"\x1fk")
		if out, err := child.CombinedOutput(); err != nil {
			t.Fatalf("%v, %s", err, out)
		}

		d := on(dir, nil)
		for _, step := range []time.Duration{0, time.Hour, -time.Hour} {
			d.clock = func() instant {
				now := readClock()
				now.wall = now.wall.Add(step)
				return now
			}
			refused(t, d, claim("k"), backend.ErrHeld)
			if got := left(t, d, "k"); got > time.Minute {
				t.Errorf("offset %s s, wall clock set by %v: left %v", offset, step, got)
			}
		}
	}
}
