package pglock

import (
	"context"
	"encoding/json"
	"errors"
	"iter"
	"maps"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/hasplock/hasp/backend"
)

// scanEntry reads a row that the statement inspect or list has returned.
func scanEntry(rows pgx.Rows) (backend.Entry, error) {
	var (
		key, owner        string
		held              bool
		since, fence, now int64
		left              *int64
		readers           *string
	)
	if err := rows.Scan(&key, &owner, &held, &since, &left, &fence, &readers, &now); err != nil {
		return backend.Entry{}, err
	}

	s := backend.Status{Held: held, Fence: uint64(fence)}
	if held {
		s.TTL = term(left)
		if readers == nil {
			s.Owner, s.Since = unhex(owner), time.UnixMicro(since)
		} else {
			s.Shared = owners(*readers, time.UnixMicro(now))
		}
	}

	return backend.Entry{Key: unhex(key), Status: s}, nil
}

// owners returns up to 1,000 owners of present shared holds. It ignores malformed holds.
func owners(readers string, now time.Time) (owners []string) {
	var holds map[string]struct{ Owner, End string }
	_ = json.Unmarshal([]byte(readers), &holds) // Unmarshal goes on after a value of a wrong type
	for _, token := range slices.Sorted(maps.Keys(holds)) {
		end, err := time.Parse(time.RFC3339, holds[token].End)
		if err == nil && end.After(now) && len(owners) < 1000 {
			owners = append(owners, unhex(holds[token].Owner))
		}
	}

	return owners
}

// Inspect returns the holder of key, without waiters, because the table has no names of them. Every
// hold raises the key's fence, but Status.Fence is zero if the last claim did not ask for a fence.
func (d *driver) Inspect(ctx context.Context, key string) (backend.Status, error) {
	if err := checkKey(key); err != nil {
		return backend.Status{}, err
	}
	var e backend.Entry
	err := d.query(ctx, d.sql.inspect, func(_ int, rows pgx.Rows) (err error) {
		e, err = scanEntry(rows)
		return err
	}, []byte(key))
	if errors.Is(err, errNoRow) {
		err = nil // the key has no row
	}
	return e.Status, err
}

// Break ends every hold of key, and wakes the next waiter.
func (d *driver) Break(ctx context.Context, key string) error {
	if err := checkKey(key); err != nil {
		return err
	}
	err := d.finish(ctx, d.sql.breakKey, []byte(key), d.channel, lockWait(maxRenewBlocked))
	if errors.Is(err, errNoRow) {
		return nil
	}
	return err
}

// List returns the keys that are held. Each statement looks at 1,000 rows.
func (d *driver) List(
	ctx context.Context, prefix string, timeout time.Duration,
) iter.Seq2[backend.Entry, error] {
	return func(yield func(backend.Entry, error) bool) {
		for after, end := []byte(nil), afterPrefix(prefix); ; {
			page, last, err := d.page(ctx, []byte(prefix), after, end, timeout)
			for _, e := range page {
				if e.Held && !yield(e, nil) {
					return
				}
			}

			if ctx.Err() != nil {
				err = ctx.Err()
			}
			if err != nil {
				yield(backend.Entry{}, err)
			}
			if err != nil || last == nil {
				return
			}
			after = last
		}
	}
}

// page returns the entries that list.sql finds in the next 1,000 rows, and the last key, after
// which the next page begins. If there are no more rows, all results are nil.
func (d *driver) page(
	ctx context.Context, prefix, after, end []byte, timeout time.Duration,
) (page []backend.Entry, last []byte, err error) {
	within, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	err = d.query(within, d.sql.list, func(row int, rows pgx.Rows) error {
		e, err := scanEntry(rows)
		page, last = append(page[:row], e), []byte(e.Key)
		return err
	}, prefix, after, end)
	if errors.Is(err, errNoRow) {
		return nil, nil, nil
	}
	return page, last, err
}

// afterPrefix returns the first key after all keys that begin with prefix, or nil if no key can
// follow them.
func afterPrefix(prefix string) []byte {
	b := []byte(prefix)
	for len(b) > 0 {
		last := len(b) - 1
		if b[last] < 0xff {
			b[last]++
			return b
		}
		b = b[:last]
	}

	return nil
}
