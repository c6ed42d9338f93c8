package caslock

import (
	"cmp"
	"context"
	"iter"
	"strings"
	"time"

	"github.com/hasplock/hasp/backend"
)

// Inspect reads the record of key.
func (d *driver) Inspect(ctx context.Context, key string) (s backend.Status, err error) {
	v, err := d.look(ctx, key)
	if err == nil {
		s = v.status(time.Now())
	}
	return s, err
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
			s.Owner, s.Since, s.Kept = string(it.Owner), it.Since, it.Kind == kept
		}
		s.Held, s.TTL = true, max(s.TTL, rest)
	}
	s.Shared = s.Shared[:min(len(s.Shared), 1000)]
	return s
}

// Break writes the record without its holds.
func (d *driver) Break(ctx context.Context, key string) error {
	return d.update(ctx, key, time.Minute, nil, func(v *view, now time.Time) (*record, error) {
		return v.next(without(v.live(now), func(it item) bool { return !isIntent(it) }), now), nil
	})
}

// List scans the records whose key begins with prefix.
func (d *driver) List(ctx context.Context, prefix string, timeout time.Duration) iter.Seq2[backend.Entry, error] {
	return func(yield func(backend.Entry, error) bool) {
		for position, more := "", true; more; more = position != "" {
			views, next, err := d.page(ctx, prefix, position, 1000, timeout) // the most that backend.Lister allows
			position = next
			for _, v := range views {
				s := v.status(time.Now())
				if ctx.Err() == nil && (s.Held || len(s.Waiters) > 0) && !yield(backend.Entry{Key: string(v.rec.Key), Status: s}, nil) {
					return
				}
			}
			if err = cmp.Or(ctx.Err(), err); err != nil {
				yield(backend.Entry{}, err)
				return
			}
		}
	}
}

// page returns the views of one call of Scan, and the next position. It leaves out the values that
// other programs have written, and entries that were deleted during the Scan.
func (d *driver) page(ctx context.Context, prefix, position string, n int, timeout time.Duration) (views []*view, next string, err error) {
	call, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	es, next, err := d.store.Scan(call, position, n)
	for _, e := range es {
		if v, err := d.decode("", e, time.Now()); err == nil && e.Version != "" && strings.HasPrefix(string(v.rec.Key), prefix) {
			views = append(views, v)
		}
	}
	return views, next, err
}

// sweep reads one page of records. It removes dead items: those that this driver has seen unchanged
// for their whole term. It also removes records that have had no items for an hour. The number of a
// new record comes from the clock, so it is larger than the old number.
func (d *driver) sweep(ctx context.Context) error {
	position, _ := d.position.Swap("").(string) // after an error, "" stays: the store may have forgotten the position
	views, next, err := d.page(ctx, "", position, 200, time.Minute)
	if err != nil {
		return err
	}
	d.position.Store(next)
	now := time.Now()
	for _, v := range views {
		switch live := v.live(now); {
		case len(live) < len(v.rec.Items):
			_ = d.put(ctx, v, v.next(live, now)) // a later sweep does what this one has not done
		case len(live) == 0 && v.rec.Write < uint64(now.Add(-time.Hour).UnixMicro()):
			_ = d.store.Delete(ctx, name(string(v.rec.Key)), v.version)
		}
	}
	return nil
}
