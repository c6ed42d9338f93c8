package caslock

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/caslock/internal/parallel"
)

// probe returns an error if the store replaces values whatever their version, or compares first and
// writes later. Otherwise deletes says whether a sweep may delete records. It may if the store
// refuses a Delete with a wrong version, and lets a name that was deleted be created again. The
// values are records, so a sweep removes one that is left after a lost reply.
func probe(ctx context.Context, store Store) (deletes bool, err error) {
	key := probePrefix + rand.Text()
	r := record{Key: []byte(key), Write: uint64(time.Now().UnixMicro())}

	// Open a connection for each writer, so that the writes of a race overlap. In an outage, the
	// writes fail as well, and race returns their error.
	parallel.Each(probeWriters, probeWriters, func(int) { _, _ = store.Get(ctx, key) })

	versions := []string{""} // of the key, oldest first; "" means that it is absent
	for range 3 {
		next, err := race(ctx, store, &r, versions)
		if err != nil {
			return false, err
		}
		versions = append(versions, next)
	}

	err = store.Delete(ctx, key, versions[1]) // an old version, so the store must refuse
	switch {
	case err == nil, errors.Is(err, errors.ErrUnsupported):
		return false, nil // the store ignores the version, or has no Delete
	case !errors.Is(err, ErrConflict):
		return false, err
	}

	if err := store.Delete(ctx, key, versions[3]); err != nil { // the present version
		return false, err
	}

	// Some stores refuse a name that was deleted.
	version, err := store.Put(ctx, key, []byte(r.encode()), "")
	if errors.Is(err, ErrConflict) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	return true, store.Delete(ctx, key, version)
}

// probePrefix begins the keys of probes. Acquire refuses such keys, so a store may treat their
// names in another way: each belongs to one driver, for the time of its probe.
const probePrefix = "caslock-probe-"

// probeWriters is how many writers of a race expect the version that the store has.
const probeWriters = 8

// race lets writers put records at the same time. The store has the last of the versions, which
// eight writers expect. One more writer for each earlier version expects that one, and must fail.
// Exactly one of the eight may succeed. The result next is its new version. If more writers
// succeed, or next is an old version, the error is backend.ErrInvalid. race raises r.Write, so that
// the next race writes other values.
func race(ctx context.Context, store Store, r *record, versions []string) (next string, err error) {
	// Each writer expects one of these versions. The last one is in versions once already.
	last := versions[len(versions)-1:]
	expect := slices.Concat(versions, slices.Repeat(last, probeWriters-1))
	writers := len(expect)

	first := r.Write
	r.Write += uint64(writers) // no two values are equal
	newVersions := make([]string, writers)
	errs := make([]error, writers)
	parallel.Each(writers, writers, func(i int) {
		value := record{Key: r.Key, Write: first + uint64(i)}
		newVersions[i], errs[i] = store.Put(ctx, string(r.Key), []byte(value.encode()), expect[i])
	})

	winners := 0
	for i, e := range errs {
		if e == nil {
			winners++
			next = newVersions[i]
		}
		if !errors.Is(e, ErrConflict) {
			err = cmp.Or(err, e) // the first error that is no refusal
		}
	}

	switch {
	case winners == 0: // also if all were refused, although eight have expected the last version
		return "", cmp.Or(err, ErrConflict)
	case winners > 1, slices.Contains(versions, next):
		return "", fmt.Errorf("%w: the store does not compare versions in one step with the write, "+
			"so it cannot keep locks: use one whose conditional writes are atomic",
			backend.ErrInvalid)
	}
	return next, nil // without err, because a busy store may not answer the other writers
}
