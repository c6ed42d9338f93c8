package caslock

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/hasplock/hasp/backend"
)

// probe is a key that finds out whether a store compares versions. Its values are records, so a
// sweep removes one that is left after a lost reply.
type probe struct {
	store  Store
	key    string
	number uint64 // of the last write; no two writes of a driver have the same number
}

// probeStore returns an error if the store replaces values whatever their version. Otherwise it
// reports whether the store refuses a Delete with a wrong version, which a sweep relies on.
func probeStore(ctx context.Context, store Store) (deletes bool, err error) {
	p := &probe{store, "caslock-probe-" + rand.Text(), uint64(time.Now().UnixMicro())}
	first, err := p.put(ctx, "")
	if err != nil {
		return false, err
	}
	last, err := p.put(ctx, first)
	if err != nil {
		return false, err
	}

	_, created := p.put(ctx, "")
	_, replaced := p.put(ctx, first)
	for _, err := range []error{created, replaced} {
		if err == nil || first == last {
			return false, fmt.Errorf("%w: the store does not compare versions, so it cannot keep locks",
				backend.ErrInvalid)
		}
		if !errors.Is(err, ErrConflict) {
			return false, err
		}
	}

	// In the first round most writers open a connection, so some may come late. In the second round
	// they meet.
	for range 2 {
		if last, err = p.race(ctx, last); err != nil {
			return false, err
		}
	}

	err = store.Delete(ctx, p.key, first)
	switch {
	case err == nil, errors.Is(err, errors.ErrUnsupported):
		return false, nil
	case !errors.Is(err, ErrConflict):
		return false, err
	}
	return true, store.Delete(ctx, p.key, last)
}

// put writes a new value.
func (p *probe) put(ctx context.Context, version string) (string, error) {
	p.number++
	r := record{Key: []byte(p.key), Write: p.number}
	return p.store.Put(ctx, p.key, []byte(r.encode()), version)
}

// race lets eight writers replace one version at the same time, and returns the version of the one
// that succeeds. A store that compares first and writes later lets several of them succeed.
func (p *probe) race(ctx context.Context, version string) (next string, err error) {
	const writers = 8
	var versions [writers]string
	var errs [writers]error
	var running sync.WaitGroup
	for i := range writers {
		writer := probe{p.store, p.key, p.number}
		p.number++
		running.Go(func() { versions[i], errs[i] = writer.put(ctx, version) })
	}
	running.Wait()

	winners := 0
	for i, e := range errs {
		if e == nil {
			winners++
			next = versions[i]
		}
		if !errors.Is(e, ErrConflict) {
			err = cmp.Or(err, e)
		}
	}

	switch {
	case winners > 1:
		return "", fmt.Errorf("%w: the store let %d writers replace one version, so it cannot keep "+
			"locks: its conditional writes are not atomic", backend.ErrInvalid, winners)
	case winners == 0:
		return "", cmp.Or(err, ErrConflict)
	}
	return next, nil // a busy store may refuse the others for other reasons
}
