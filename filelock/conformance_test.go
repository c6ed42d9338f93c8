//go:build linux || darwin || freebsd || netbsd || openbsd || dragonfly

package filelock

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/conformance"
)

// swappable is a directory that the suite can take away and restore. The store's address is a
// symbolic link to it, because a link can be changed in one step.
type swappable struct{ root, dir string }

func (s *swappable) link() string { return filepath.Join(s.root, "store") }

func (s *swappable) point(target string) error {
	next := filepath.Join(s.root, "next")
	return errors.Join(os.Symlink(target, next), os.Rename(next, s.link()))
}

func (s *swappable) fresh() (err error) {
	if s.dir, err = os.MkdirTemp(s.root, "dir-"); err != nil {
		return err
	}
	return s.point(s.dir)
}

func (s *swappable) start(context.Context) (string, func(), error) {
	var err error
	if s.root, err = os.MkdirTemp("", "filelock-"); err != nil {
		return "", nil, err
	}
	return s.link(), func() { os.RemoveAll(s.root) }, s.fresh()
}

func (s *swappable) stop(context.Context, string) error { return s.point("nowhere/at/all") }

func (s *swappable) again(_ context.Context, _ string, data bool) error {
	if data {
		return s.point(s.dir)
	}
	return s.fresh()
}

// entries lists the files that belong to holds.
func (s *swappable) entries(context.Context, string) (names []string, err error) {
	es, err := os.ReadDir(s.link())
	for _, e := range es {
		n := e.Name()
		if !strings.HasPrefix(n, "guard-") && !strings.HasPrefix(n, "stripe-") {
			names = append(names, n)
		}
	}
	return names, err
}

func harness() conformance.Harness {
	var s swappable
	return conformance.Harness{
		Store:   s.start,
		Open:    func(_ context.Context, store string) (backend.Driver, error) { return on(store, nil), nil },
		Stop:    s.stop,
		Start:   s.again,
		Entries: s.entries,
		Sweep: func(ctx context.Context, store string) error {
			d := on(store, nil)
			d.sweeper.sweep(ctx, openFiles)
			return d.Close()
		},
		Timeout: time.Second, // short, because the clause on leftovers waits for two Timeouts
	}
}

func TestConformance(t *testing.T) { conformance.Run(t, harness()) }
