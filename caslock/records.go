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
// It returns no record if nothing is to be written.
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

// decode returns the view of an entry. A key that is not known is "". The argument now is a time
// after the reply, because a time from before the call could be earlier than the write. The writer
// began to count its term before the write.
func (rs *records) decode(key string, e Entry, began, now time.Time) (*view, error) {
	var r record
	if e.Version == "" {
		r.Key = []byte(key)
	} else if err := json.Unmarshal(e.Value, &r); err != nil || !r.isOf(key) {
		return nil, errForeign
	}

	return rs.views.remember(e.Version, r, began, now.Add(-max(e.Age, 0))), nil
}

// page returns the views of one call of Scan, and the next position. It leaves out the values that
// other programs have written, and entries that were deleted during the Scan.
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

// update writes the record that edit returns for a view, and returns edit's error. If edit returns
// no record, update writes nothing. It takes at most the duration timeout. It begins with v, or
// with a read if v is nil. It reads again if another write came first. If that was update's own
// Put, which a library or a proxy has sent twice, update returns what edit returned for that Put.
func (rs *records) update(
	ctx context.Context, key string, timeout time.Duration, v *view, edit editor,
) (err error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()

	conflicts := map[string]error{} // what edit returned for each Put that was refused, by its value
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
		if len(conflicts) > 0 {
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
