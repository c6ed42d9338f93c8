package caslock

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"strings"
	"time"

	"github.com/hasplock/hasp/backend"
)

var errForeign = fmt.Errorf(
	"%w: the value was written by another program: remove it, or choose another key",
	backend.ErrInvalid)

// records reads and writes the records of a store.
type records struct {
	store Store
	views *views // what this process has last seen of each key
}

// editor decides what replaces the record of a view. The argument now is a time before the write.
// If the record is nil, nothing is written. The error is the result of the operation; a record that
// comes with an error is written before the error is returned.
type editor func(v *view, now time.Time) (*record, error)

// get reads the record of key.
func (rs *records) get(ctx context.Context, key string) (*view, error) {
	began := time.Now()
	e, err := rs.store.Get(ctx, name(key))
	if err != nil {
		return nil, err
	}

	return rs.decode(key, e, began, time.Now())
}

// decode returns the view of an entry, or errForeign if its value is no record of key. A key that
// is not known is "". The call that read the entry began at the time began. The terms of items that
// are new to this process count from the time now, less the age of the entry.
//
// The argument now is a time after the reply, because a term must count from after its write: the
// holder began to count before its write. A time from before the call could be earlier.
func (rs *records) decode(key string, e Entry, began, now time.Time) (*view, error) {
	var r record
	if e.Version == "" {
		r.Key = []byte(key) // the key has no record
	} else {
		err := json.Unmarshal(e.Value, &r)
		if err != nil || !r.isOf(key) {
			return nil, errForeign
		}
	}

	return rs.views.remember(e.Version, r, began, now.Add(-max(e.Age, 0))), nil
}

// page returns the views of one call of Scan whose key begins with prefix, and the next position.
// It leaves out the values that other programs have written, and entries that were deleted during
// the Scan, which have no version. If the Scan fails, page returns what it has read, and the error.
func (rs *records) page(
	ctx context.Context, prefix, position string, n int,
) (vs []*view, next string, err error) {
	began := time.Now()
	es, next, err := rs.store.Scan(ctx, position, n)

	for _, e := range es {
		if e.Version == "" {
			continue
		}
		v, err := rs.decode("", e, began, time.Now())
		if err == nil && strings.HasPrefix(string(v.rec.Key), prefix) {
			vs = append(vs, v)
		}
	}

	return vs, next, err
}

// put writes r if the key still has the version of v.
func (rs *records) put(ctx context.Context, v *view, r *record) error {
	began := time.Now()
	version, err := rs.store.Put(ctx, name(string(r.Key)), []byte(r.encode()), v.version)
	if err != nil {
		return err
	}

	// Without a new version, another writer could overwrite r unseen.
	if version == "" || version == v.version {
		return fmt.Errorf("the store gave version %q to two values of a key", version)
	}

	rs.views.remember(version, *r, began, time.Now())
	return nil
}

// remove deletes the record of v if the key still has its version.
func (rs *records) remove(ctx context.Context, v *view) error {
	began := time.Now()
	err := rs.store.Delete(ctx, name(string(v.rec.Key)), v.version)
	if err == nil {
		rs.views.remember("", record{Key: v.rec.Key}, began, time.Now())
	}
	return err
}

// update writes the record that edit returns for a view, and returns edit's error, or the error of
// a read or a write. If edit returns no record, update writes nothing. It takes at most the
// duration timeout. It begins with v, or with a read if v is nil.
//
// If the store refuses the write with ErrConflict, because another write came first, update reads
// and edits again. That other write may be update's own: if a library or a proxy sends a Put twice,
// the second copy is refused although the first has succeeded. Then the next read shows the record
// of that Put, and update returns what edit returned for it.
func (rs *records) update(
	ctx context.Context, key string, timeout time.Duration, v *view, edit editor,
) (err error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()

	conflicts := map[string]error{} // edit's error for each Put that was refused, by the Put's value
	for pause := time.Millisecond; ; pause = min(2*pause, 30*time.Millisecond) {
		if v == nil {
			if v, err = rs.get(ctx, key); err != nil {
				return err
			}
		}

		now := time.Now() // before the Put, which may take long
		r, result := edit(v, now)
		if r == nil {
			return result
		}
		if len(conflicts) > 0 { // otherwise encoding would be wasted
			if earlier, ours := conflicts[v.rec.encode()]; ours {
				return earlier
			}
		}
		if err := rs.put(ctx, v, r); !errors.Is(err, ErrConflict) {
			return cmp.Or(err, result)
		}

		conflicts[r.encode()] = result
		v = nil
		time.Sleep(mathrand.N(pause)) // so that two writers do not conflict again
	}
}
