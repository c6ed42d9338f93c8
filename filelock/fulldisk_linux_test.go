package filelock

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
)

// smallDisk mounts a small file system, and returns its directory and a function that fills it.
func smallDisk(t *testing.T) (dir string, fill func()) {
	t.Helper()
	dir = t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"); err != nil {
		t.Skipf("needs root, to mount a small disk: %v", err)
	}
	t.Cleanup(func() { must(t, unix.Unmount(dir, unix.MNT_DETACH)) })

	return dir, func() {
		t.Helper()
		f := await.Value(os.OpenFile(filepath.Join(dir, "fill"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600))
		defer f.Close()
		var err error
		for err == nil {
			_, err = f.Write(make([]byte, 512))
		}
		if !errors.Is(err, unix.ENOSPC) {
			t.Fatal(err)
		}
	}
}

// On a full disk no key can be taken, and everything else works.
func TestFullDisk(t *testing.T) {
	disk, fill := smallDisk(t)
	d := on(filepath.Join(disk, "locks"), nil)
	held, kept, broken := fenced(claim("held")), claim("kept"), claim("broken")
	for _, c := range []backend.Claim{held, kept, broken} {
		acquire(t, d, c)
	}
	fill()

	must(t, d.probe(t.Context()))
	held.TTL = time.Hour
	must(t, renew(d, held)[0])
	kept.KeepUntil = time.Now().Add(time.Hour)
	release(t, d, kept)
	for _, key := range []string{"held", "kept"} {
		if got := left(t, d, key); got < 59*time.Minute {
			t.Errorf("%s for %v", key, got)
		}
	}
	refused(t, d, claim("held"), backend.ErrHeld)
	for _, c := range []backend.Claim{claim("new"), fenced(claim("new"))} {
		if err := noGrant(t, d, c, d.folder.path); !errors.Is(err, unix.ENOSPC) {
			t.Error(err)
		}
	}
	noTemp(t, d)

	must(t, d.Break(t.Context(), "broken"))
	fill()
	release(t, d, held)
	fill()
	if got := listed(t, d, ""); !slices.Equal(got, []string{"kept"}) {
		t.Errorf("listed %q", got)
	}
}
