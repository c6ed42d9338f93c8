package caslock

import (
	"context"
	"encoding/json"
	"errors"
	"iter"
	"strings"
	"time"

	"github.com/hasplock/hasp/backend"
)

// On average, one of sweepOneIn releases sweeps sweepPage entries. So sweeps read more entries than
// releases can leave behind.
const (
	sweepOneIn = 100
	sweepPage  = 200
	listPage   = 1000 // see backend.Lister
)

// Inspect reads the record of key.
func (d *driver) Inspect(ctx context.Context, key string) (backend.Status, error) {
	v, err := d.look(ctx, key)
	if err != nil {
		return backend.Status{}, err
	}
	return v.status(time.Now()), nil
}

// status is for people, so a hold also ends by the wall clock of its holder. Otherwise Inspect
// would report the hold of a dead process until this process has seen the hold for a whole term.
func (v *view) status(now time.Time) backend.Status {
	s := backend.Status{Fence: v.rec.Fence}
	for _, it := range v.live(now) {
		rest := min(it.rest(now), it.Ends.Sub(now.Round(0)))
		switch {
		case rest <= 0:
			continue
		case it.Kind == intent:
			s.Waiters = append(s.Waiters, string(it.Owner))
			continue
		case it.Kind == shared:
			s.Shared = append(s.Shared, string(it.Owner))
		default:
			s.Owner, s.Since = string(it.Owner), it.Since
		}
		s.Held, s.TTL = true, max(s.TTL, rest)
	}
	s.Shared = s.Shared[:min(len(s.Shared), 1000)]
	return s
}

// Break writes the record without its holds.
func (d *driver) Break(ctx context.Context, key string) error {
	return d.update(ctx, key, time.Minute, nil, func(v *view, now time.Time) (*record, error) {
		rest := without(v.live(now), func(it *item) bool { return it.Kind != intent })
		if len(rest) == len(v.rec.Items) {
			return nil, nil
		}
		return v.next(rest, now), nil
	})
}

// lister is the part of a driver whose store is a Lister.
type lister struct {
	d *driver
	l Lister
}

// List scans the records whose key begins with prefix.
func (l lister) List(ctx context.Context, prefix string, timeout time.Duration) iter.Seq2[backend.Entry, error] {
	return func(yield func(backend.Entry, error) bool) {
		for position, more := "", true; more; more = position != "" {
			views, next, err := l.d.page(ctx, l.l, prefix, position, listPage, timeout)
			if err = errors.Join(err, ctx.Err()); err != nil {
				yield(backend.Entry{}, err)
				return
			}
			position = next
			for _, v := range views {
				s := v.status(time.Now())
				if err := ctx.Err(); err != nil {
					yield(backend.Entry{}, err)
					return
				}
				if (s.Held || len(s.Waiters) > 0) && !yield(backend.Entry{Key: string(v.rec.Key), Status: s}, nil) {
					return
				}
			}
		}
	}
}

// page returns the views of one call of Scan, and the next position. It leaves out the values that
// other programs have written.
func (d *driver) page(ctx context.Context, l Lister, prefix, position string, n int, timeout time.Duration) (views []*view, next string, err error) {
	call, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	es, next, err := l.Scan(call, prefix, position, n)
	now := time.Now()
	for _, e := range es {
		var r struct{ Key []byte }
		_ = json.Unmarshal(e.Value, &r) // newView refuses what is no record
		key := string(r.Key)
		if v, err := newView(key, e, d.last(key), now); err == nil && key != "" && strings.HasPrefix(key, prefix) {
			d.remember(key, v)
			views = append(views, v)
		}
	}
	return views, next, err
}

// sweep reads one page of records. It removes items that died, because this driver has seen them
// for their whole term. It also removes records that have had no items for an hour. The number of a
// new record comes from the clock, so it is larger than the old number.
func (d *driver) sweep(ctx context.Context) error {
	l, ok := d.store.(Lister)
	if !ok {
		return nil
	}
	position, _ := d.position.Load().(string)
	views, next, err := d.page(ctx, l, "", position, sweepPage, time.Minute)
	if err != nil {
		d.position.Store("") // the store may have forgotten the position
		return err
	}
	d.position.Store(next)
	now := time.Now()
	for _, v := range views {
		switch live := v.live(now); {
		case len(live) < len(v.rec.Items):
			err = d.put(ctx, v, v.next(live, now))
		case len(live) == 0 && v.rec.Write < uint64(now.Add(-idle).UnixMicro()):
			err = d.store.Delete(ctx, string(v.rec.Key), v.version)
			d.remember(string(v.rec.Key), nil)
		}
		if err != nil && !errors.Is(err, ErrConflict) {
			return err
		}
	}
	return nil
}
