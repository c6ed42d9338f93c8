//go:build unix

package pglock_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/pgtest"
)

// A clock that was ahead has left a mark of a caller that waits for the end of shared holds. It
// keeps no shared hold out, and no such caller from its own mark.
func TestMarkOfAWrongClock(t *testing.T) {
	t.Parallel()
	s, ctx := pgtest.Start(t), t.Context()
	a, b := client(t, s.Addr, ""), client(t, s.Addr, "")
	first, err := a.Lock(ctx, "key", hasp.WithShared())
	must(t, err)
	s.Must(t, `UPDATE hasp_locks SET wanted = now() + interval '1 h', writer = 'gone', writer_until = now() + interval '1 h' WHERE key = 'key'`)
	second, err := b.TryLock(ctx, "key", hasp.WithShared())
	must(t, err)

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

// shareMany gives the key "k" many shared holds, which end after an interval. They make a
// statement about one more slow, so that an end may come while it runs.
func shareMany(t *testing.T, s *pgtest.Server, holds int, end string) {
	t.Helper()
	s.Must(t, fmt.Sprintf(`INSERT INTO hasp_locks (key, readers, since, expires, fence, fenced)
		SELECT 'k', jsonb_object_agg('f' || i, jsonb_build_object('owner', '', 'end', clock_timestamp() + interval '%s')),
			now(), clock_timestamp() + interval '5 s', 1, true
		FROM generate_series(1, %d) i
		ON CONFLICT (key) DO UPDATE SET readers = excluded.readers, expires = excluded.expires, token = NULL, writer_until = NULL`, end, holds))
}

// The last other shared holds end while one leaves: the key is free, or they have it.
func TestLeaveAtTheEndOfOthers(t *testing.T) {
	t.Parallel()
	s, ctx := pgtest.Start(t), t.Context()
	d := newDriver(t, s.Addr, "")
	for n := range 20 {
		shareMany(t, s, 3000, "300 ms")
		c := backend.Claim{Key: "k", Token: "leaves", TTL: time.Minute, Timeout: 5 * time.Second, Shared: true}
		_, err := d.Acquire(ctx, c)
		must(t, err)
		rows, err := s.Rows(ctx, `SELECT (extract(epoch FROM max((r.value ->> 'end')::timestamptz)) * 1000000)::bigint::text
			FROM hasp_locks, jsonb_each(readers) r WHERE r.key LIKE 'f%'`)
		must(t, err)
		var end int64
		fmt.Sscan(rows[0], &end)
		time.Sleep(time.Until(time.UnixMicro(end)) - time.Duration(n%20)*time.Millisecond)
		must(t, d.Release(ctx, c))
		rows, err = s.Rows(ctx, `SELECT ((readers IS NULL) = (expires IS NULL))::text FROM hasp_locks WHERE key = 'k'`)
		must(t, err)
		if len(rows) != 1 || rows[0] != "true" {
			t.Fatalf("round %d: shared holds without an end: %v", n, rows)
		}
	}
}

// A shared hold whose renewal arrives just before its end is either lost, or keeps the key for
// its whole term.
func TestRenewalAtTheEndOfASharedHold(t *testing.T) {
	t.Parallel()
	s, ctx := pgtest.Start(t), t.Context()
	d := newDriver(t, s.Addr, "")
	renewed := 0
	for n := range 60 {
		shareMany(t, s, 300, "4 s")
		c := backend.Claim{Key: "k", Token: fmt.Sprint("reader", n), TTL: backend.MinTTL, Timeout: 5 * time.Second, Shared: true}
		_, err := d.Acquire(ctx, c)
		must(t, err)
		var end int64
		rows, err := s.Rows(ctx, `SELECT (extract(epoch FROM (readers -> '`+c.Token+`' ->> 'end')::timestamptz) * 1000000)::bigint::text FROM hasp_locks WHERE key = 'k'`)
		must(t, err)
		if len(rows) == 0 {
			continue // this machine was too slow
		}
		fmt.Sscan(rows[0], &end)
		time.Sleep(time.Until(time.UnixMicro(end)) - time.Duration(300+n%24*100)*time.Microsecond)

		c.TTL = 20 * time.Second
		d.Renew(ctx, []backend.Claim{c}, func(_ int, _ backend.Grant, e error) { err = e })
		if err != nil {
			continue
		}
		renewed++
		rows, err = s.Rows(ctx, `SELECT ((readers -> '`+c.Token+`' ->> 'end')::timestamptz > expires)::text FROM hasp_locks WHERE key = 'k'`)
		must(t, err)
		if len(rows) != 1 || rows[0] != "false" {
			t.Fatalf("round %d: a hold that was renewed ends after its key: %v", n, rows)
		}
	}
	t.Logf("%d of 60 renewals came in time", renewed)
}
