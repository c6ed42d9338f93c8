//go:build unix

package pglock_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/pglock"
)

// A clock that was ahead has left a waiter that wants the key alone. It keeps no shared hold out, and
// no caller from its place in the line.
func TestWaiterOfAWrongClock(t *testing.T) {
	t.Parallel()
	s, a := withClient(t)
	ctx, b := t.Context(), client(t, s.Where())
	first := await.Value(a.Lock(ctx, "key", hasp.WithShared()))
	s.Must(t, `UPDATE hasp_locks SET waiters = '{7}', ends = ARRAY[now() + interval '1 h'] WHERE key = 'key'`)
	second := await.Value(b.TryLock(ctx, "key", hasp.WithShared()))

	got := locks(ctx, a, "key")
	until(t, "the mark of the caller that waits", func() bool {
		third, err := b.TryLock(ctx, "key", hasp.WithShared(), hasp.WithoutReentry())
		if err == nil {
			must(t, third.Unlock(ctx))
		}
		return errors.Is(err, hasp.ErrHeld)
	})
	must(t, errors.Join(first.Unlock(ctx), second.Unlock(ctx)))
	must(t, <-got)
}

// sharedRace gives the key "k" a shared hold c beside many others that end after an interval, so
// that a statement about c is slow. It returns when c or the others end, by the server's clock.
func sharedRace(t *testing.T, db *pgxpool.Pool, d *pglock.Driver, c backend.Claim, others int, interval, whose string) (end time.Time) {
	t.Helper()
	await.Value(db.Exec(t.Context(), fmt.Sprintf(`INSERT INTO hasp_locks (key, readers, since, expires, fence, fenced)
		SELECT 'k', jsonb_object_agg('f' || i, jsonb_build_object('owner', '', 'end', clock_timestamp() + interval '%s')),
			now(), clock_timestamp() + interval '5 s', 1, true
		FROM generate_series(1, %d) i
		ON CONFLICT (key) DO UPDATE SET readers = excluded.readers, expires = excluded.expires, token = NULL, waiters = NULL`, interval, others)))
	await.Value(d.Acquire(t.Context(), c))
	must(t, db.QueryRow(t.Context(), `SELECT coalesce(max((r.value ->> 'end')::timestamptz), clock_timestamp())
		FROM hasp_locks, jsonb_each(readers) r WHERE r.key LIKE $1`, whose).Scan(&end))
	return end
}

// has reports whether the row of the key "k" has a condition.
func has(t *testing.T, db *pgxpool.Pool, condition string) (yes bool) {
	t.Helper()
	must(t, db.QueryRow(t.Context(), "SELECT count("+condition+" OR NULL) > 0 FROM hasp_locks WHERE key = 'k'").Scan(&yes))
	return yes
}

// The last other shared holds end while one leaves: the key is free, or they have it.
func TestLeaveAtTheEndOfOthers(t *testing.T) {
	t.Parallel()
	s, d := onServer(t)
	db, c := newPool(t, s.URL()), reader("k", "leaves")
	for n := range 20 {
		end := sharedRace(t, db, d, c, 3000, "100 ms", "f%")
		time.Sleep(time.Until(end) - time.Duration(n)*time.Millisecond)
		must(t, d.Release(t.Context(), c))
		if has(t, db, "(readers IS NULL) <> (expires IS NULL)") {
			t.Fatalf("round %d: shared holds without an end", n)
		}
	}
}

// A shared hold whose renewal arrives just before its end is either lost, or keeps the key for
// its whole term.
func TestRenewalAtTheEndOfASharedHold(t *testing.T) {
	t.Parallel()
	s, d := onServer(t)
	db, renewed := newPool(t, s.URL()), 0
	for n := range 60 {
		c := reader("k", fmt.Sprint("reader", n))
		c.TTL = backend.MinTTL
		end := sharedRace(t, db, d, c, 300, "4 s", c.Token)
		time.Sleep(time.Until(end) - time.Duration(300+n%24*100)*time.Microsecond)

		c.TTL = 20 * time.Second
		d.Renew(t.Context(), []backend.Claim{c}, func(_ int, _ backend.Grant, err error) {
			if err == nil {
				renewed++
			}
		})
		if has(t, db, "(readers -> '"+c.Token+"' ->> 'end')::timestamptz > expires") {
			t.Fatalf("round %d: a hold that was renewed ends after its key", n)
		}
	}
	t.Logf("%d of 60 renewals came in time", renewed)
}
