package filelock

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
)

// outage checks that err is not a definite error, names the file, and has one line.
func outage(t *testing.T, what string, err error, path string) {
	t.Helper()
	switch {
	case err == nil:
		t.Fatalf("%s: no error", what)
	case errors.Is(err, backend.ErrHeld), errors.Is(err, backend.ErrLost), errors.Is(err, backend.ErrInvalid):
		t.Fatalf("%s: a definite answer, %v", what, err)
	case !strings.Contains(err.Error(), path) || strings.Contains(err.Error(), "\n"):
		t.Fatalf("%s: the error should name %s in one line: %v", what, path, err)
	}
}

// noGrant checks that an Acquire of c is an outage that names the file, and returns its error.
func noGrant(t *testing.T, d *driver, c backend.Claim, path string) error {
	t.Helper()
	_, err := d.Acquire(t.Context(), c)
	outage(t, fmt.Sprintf("acquire, fenced: %t", c.Fenced), err, path)
	return err
}

// strangers has functions that create a state file that is not a valid record of "k".
var strangers = map[string]func(t *testing.T, path string){
	"foreign":   func(t *testing.T, path string) { write(t, path, []byte("see you at noon\n")) },
	"huge":      func(t *testing.T, path string) { write(t, path, nil); must(t, os.Truncate(path, 1<<40)) },
	"newer":     func(t *testing.T, path string) { write(t, path, []byte("hasp filelock record 4\nkeys all\n")) },
	"directory": func(t *testing.T, path string) { must(t, os.Mkdir(path, 0o700)) },

	"link to a record": func(t *testing.T, path string) {
		r := sample()
		r.key, r.clock, r.until = "k", "", time.Time{} // the record has expired
		write(t, filepath.Join(filepath.Dir(path), "elsewhere"), r.file())
		must(t, os.Symlink("elsewhere", path))
	},
}

func TestStateFileOfAStrangerIsNeverGranted(t *testing.T) {
	for name, plant := range strangers {
		t.Run(name, func(t *testing.T) {
			d := on(t.TempDir(), nil)
			c := claim("k")
			acquire(t, d, c)
			path := d.folder.recordFile("k")
			must(t, os.Remove(path))
			plant(t, path)
			near := claim(neighbour("k")) // another key of the stripe works as usual
			acquire(t, d, near)
			before := await.Value(os.Lstat(path))

			noGrant(t, d, claim("k"), path)
			noGrant(t, d, fenced(claim("k")), path)
			errs := renew(d, c, near)
			outage(t, "renew", errs[0], path)
			must(t, errs[1])
			outage(t, "release", d.Release(t.Context(), c), path)
			s, err := d.Inspect(t.Context(), "k")
			outage(t, "inspect", err, path)
			if s.Held {
				t.Errorf("inspect says %+v", s)
			}
			if after, err := os.Lstat(path); err != nil || !os.SameFile(before, after) || before.Size() != after.Size() {
				t.Errorf("the file was touched: %v, %v", after, err)
			}

			must(t, d.Break(t.Context(), "k"))
			next := claim("k")
			acquire(t, d, next)
			refused(t, d, claim("k"), backend.ErrHeld)
			release(t, d, next)
		})
	}
}

// A cleaner may remove the guard's file while a process waits to lock it. A process that then locks
// the nameless file does not have the guard.
func TestGuardThatWasRemovedIsNotHad(t *testing.T) {
	d := on(t.TempDir(), nil)
	path := d.folder.guardFile(3)
	g := await.Value(d.guards.lock(t.Context(), 3))
	defer g.unlock()
	if same, err := locksFileAt(g.flock, path); !same || err != nil {
		t.Fatal(same, err)
	}
	must(t, os.Remove(path))
	if same, err := locksFileAt(g.flock, path); same || err != nil {
		t.Errorf("removed: %v, %v", same, err)
	}
	write(t, path, nil)
	if same, err := locksFileAt(g.flock, path); same || err != nil {
		t.Errorf("replaced: %v, %v", same, err)
	}
}

func TestDirectoryIsMadeWhenItIsMissing(t *testing.T) {
	root := t.TempDir()
	dir := filepath.Join(root, "a", "b")
	d := on(dir, nil)
	notHeld(t, d, "k")
	c := claim("k")
	lost(t, "release", d.Release(t.Context(), c))
	acquire(t, d, fenced(c))
	must(t, os.RemoveAll(root)) // as if a cleaner had removed it
	lost(t, "renewal of what is gone", renew(d, c)[0])
	must(t, os.RemoveAll(root))
	acquire(t, d, fenced(claim("k")))
}

func TestManyMakeTheDirectoryAtOnce(t *testing.T) {
	for _, mode := range []fs.FileMode{0o700, 0o770} {
		for range 20 {
			root := t.TempDir()
			dir := filepath.Join(root, "locks")
			errs := make(chan error, 8)
			for range cap(errs) {
				go func() {
					_, err := on(dir, &Options{Mode: mode}).Acquire(t.Context(), claim("k"))
					errs <- err
				}()
			}
			granted := 0
			for range cap(errs) {
				if err := <-errs; err == nil {
					granted++
				} else if !errors.Is(err, backend.ErrHeld) {
					t.Error(err)
				}
			}
			if granted != 1 {
				t.Errorf("granted to %d", granted)
			}
			if names := files(t, root); len(names) != 1 {
				t.Errorf("beside the directory: %q", names)
			}
			noTemp(t, on(dir, nil))
		}
	}
}

func TestDirectoryThatIsAFileIsAnError(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	write(t, file, []byte("precious"))
	for _, dir := range []string{file, filepath.Join(file, "below")} {
		d := on(dir, nil)
		noGrant(t, d, claim("k"), file)
		outage(t, "release", d.Release(t.Context(), claim("k")), file)
		outage(t, "renew", renew(d, claim("k"))[0], file)
		_, err := hasp.Open(t.Context(), "filelock://"+dir, nil)
		outage(t, "open", err, file)
		if err := d.folder.create(); err == nil { // create alone, as if the file had come after ensure had looked
			t.Errorf("%s: made beside the file", dir)
		}
	}
}

func neighbour(key string) string {
	for i := 0; ; i++ {
		if other := fmt.Sprint("other ", i); stripeOf(other) == stripeOf(key) {
			return other
		}
	}
}

func stranger(key string) string {
	for i := 0; ; i++ {
		if other := fmt.Sprint("other ", i); stripeOf(other) != stripeOf(key) {
			return other
		}
	}
}
