package pglock

import (
	"context"
	"encoding/json"
	"iter"
	"maps"
	"slices"
	"strings"
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
		if readers == nil { // the hold is exclusive
			s.Owner = unhex(owner)
			s.Since = time.UnixMicro(since)
		} else {
			s.Shared = owners(*readers, time.UnixMicro(now))
		}
	}

	return backend.Entry{Key: unhex(key), Status: s}, nil
}

// owners returns the owners of the shared holds that end after now, but not more than 1,000. The
// parameter readers is the JSON of all shared holds of a key, by token. Malformed holds are
// ignored.
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
	_, err := d.query(ctx, "inspect", func(_ int, rows pgx.Rows) (err error) {
		e, err = scanEntry(rows)
		return err
	}, []byte(key))
	return e.Status, err
}

// Break ends every hold of key, and wakes the next waiter.
func (d *driver) Break(ctx context.Context, key string) error {
	if err := checkKey(key); err != nil {
		return err
	}
	_, err := d.finish(ctx, "release", key, maxRenewBlocked, nil, nil) // of any token
	return err
}

// List returns the keys that are held. Each statement looks at 1,000 rows.
func (d *driver) List(
	ctx context.Context, prefix string, timeout time.Duration,
) iter.Seq2[backend.Entry, error] {
	return func(yield func(backend.Entry, error) bool) {
		from := []byte(prefix)
		for {
			page, err := d.page(ctx, from, timeout)
			last := "" // the last key that the statement has looked at, which may be free
			for _, e := range page {
				last = e.Key
				isListed := e.Held && strings.HasPrefix(e.Key, prefix)
				if isListed && !yield(e, nil) {
					return
				}
			}

			if ctx.Err() != nil {
				err = ctx.Err() // the cause of the database's error, if there is one
			}
			if err != nil {
				yield(backend.Entry{}, err)
				return
			}
			if last == "" || !strings.HasPrefix(last, prefix) {
				return // there are no more rows, or no more keys with the prefix
			}
			from = append([]byte(last), 0) // the first key after last
		}
	}
}

// page looks at 1,000 rows, beginning with the key from. It returns an entry for each held key, and
// an entry for the last row even if that key is free. If there are no more rows, page returns none.
func (d *driver) page(
	ctx context.Context, from []byte, timeout time.Duration,
) (entries []backend.Entry, err error) {
	within, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	n, err := d.query(within, "list", func(row int, rows pgx.Rows) error {
		e, err := scanEntry(rows)
		entries = append(entries[:row], e) // an attempt that is repeated counts rows from 0 again
		return err
	}, from)
	return entries[:n], err
}
