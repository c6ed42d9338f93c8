//go:build unix

package pglock_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/pgtest"
	"github.com/hasplock/hasp/pglock"
)

// guard is what a transaction runs before it writes. It returns a row if the fence is the
// last one of its key, and then no later holder gets the key before the transaction ends.
const guard = `SELECT FROM hasp_locks WHERE key = $1 AND fence = $2 AND expires > clock_timestamp() FOR KEY SHARE`

var errSuperseded = errors.New("the lock is lost")

// guarded runs write in a transaction that commits only if lease still has its lock.
func guarded(ctx context.Context, db *pgxpool.Pool, lease *hasp.Lease, write func(tx pgx.Tx) error) error {
	return pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, guard, []byte(lease.Key()), int64(lease.Fence()))
		if err == nil && tag.RowsAffected() == 0 {
			err = errSuperseded
		}
		if err != nil {
			return err
		}
		return write(tx)
	})
}

// A holder that writes under a guard is safe however late it is: its successor waits for the
// end of the transaction, and a holder whose successor has come writes nothing.
func TestGuard(t *testing.T) {
	t.Parallel()
	s := pgtest.Shared(t)
	s.Must(t, "CREATE TABLE accounts (id int PRIMARY KEY, balance int NOT NULL); INSERT INTO accounts VALUES (7, 100)")
	ctx, db := t.Context(), newPool(t, s.URL())
	a, b := client(t, s.Where()), client(t, s.Where())

	lease := await.Value(a.Lock(ctx, "account/7", hasp.WithFence(), hasp.WithTTL(time.Hour)))
	set := func(balance int, then func()) error {
		return guarded(ctx, db, lease, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, "UPDATE accounts SET balance = $1 WHERE id = 7", balance)
			then()
			return err
		})
	}
	inside, finished, ended := make(chan bool), make(chan bool), make(chan error, 1)
	finish := sync.OnceFunc(func() { close(finished) })
	defer finish()
	go func() { ended <- set(80, func() { close(inside); <-finished }) }()
	<-inside

	// The holder's renewals pass the guard.
	must(t, lease.Extend(ctx, time.Hour))

	// The hold is broken, and another caller wants the key. It waits for the transaction. While it
	// has the key, the old holder writes nothing any more.
	must(t, b.Break(ctx, "account/7"))
	balance := 0
	next := make(chan error, 1)
	go func() {
		next <- hasp.Do(ctx, b, "account/7", func(ctx context.Context, _ *hasp.Lease) error {
			err := db.QueryRow(ctx, "SELECT balance FROM accounts WHERE id = 7").Scan(&balance)
			return errors.Join(err, set(95, func() {}))
		}, hasp.WithFence())
	}()
	select {
	case err := <-next:
		t.Fatalf("the successor got the key during the guarded transaction: %v", err)
	case <-time.After(1500 * time.Millisecond): // longer than an attempt waits for a row
	}
	if _, err := b.TryLock(ctx, "account/7"); !errors.Is(err, hasp.ErrHeld) {
		t.Errorf("TryLock during the guarded transaction: %v, want ErrHeld", err)
	}

	finish()
	must(t, <-ended)
	if err := <-next; !errors.Is(err, errSuperseded) || balance != 80 {
		t.Errorf("the successor read %d, want 80; a late guarded write: %v, want errSuperseded", balance, err)
	}
	_ = lease.Unlock(ctx)
}

// guardAll takes keys, has one transaction guard them all, and breaks their locks. The keys are
// free when the transaction ends.
func guardAll(t *testing.T, s *pgtest.Server, n int) (keys []string, tx pgx.Tx) {
	t.Helper()
	ctx, d := t.Context(), newDriver(t, s.Where())
	tx = begin(t, s, "SELECT 1")
	for i := range n {
		key := fmt.Sprint("guarded/", i)
		c := claim(key, "one")
		c.Fenced = true
		g := await.Value(d.Acquire(ctx, c))
		tag, err := tx.Exec(ctx, guard, []byte(key), int64(g.Fence))
		if err != nil || tag.RowsAffected() != 1 {
			t.Fatal(tag, err)
		}
		must(t, d.Break(ctx, key))
		keys = append(keys, key)
	}
	return keys, tx
}

// While callers of a Client wait for many guarded keys, its other locks are about as fast as
// before, and an attempt at a guarded key is refused.
func TestGuardsLeaveOthersPrompt(t *testing.T) {
	t.Parallel()
	s, c := withClient(t)
	ctx := t.Context()
	pairs := func() time.Duration {
		var all []time.Duration
		for range 50 {
			began := time.Now()
			lockOnce(t, c, "free")
			all = append(all, time.Since(began))
		}
		slices.Sort(all)
		return all[len(all)/2]
	}
	keys, tx := guardAll(t, s, 40)
	alone := pairs()

	var got []<-chan error
	for _, key := range keys {
		got = append(got, locks(ctx, c, key))
	}
	time.Sleep(time.Second)
	look := newPool(t, s.URL())
	waiting := func() (n int) {
		must(t, look.QueryRow(ctx, "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'").Scan(&n))
		return n
	}
	await.Undisturbed(t, 50*time.Millisecond, func() { waiting() }, func() string {
		// Behind attempts that wait for a row for 50 ms each, a pair takes longer than that.
		if beside := pairs(); beside > 15*alone+40*time.Millisecond {
			return fmt.Sprintf("a pair takes %v while others wait for guarded keys, %v without them", beside, alone)
		}
		// They poll, and leave most of the connections to others.
		blocked := 0
		for range 50 {
			blocked += waiting()
			time.Sleep(10 * time.Millisecond)
		}
		if blocked > 4*50 {
			return fmt.Sprintf("%.1f connections wait for guards, on average", float64(blocked)/50)
		}
		return ""
	})
	if _, err := c.TryLock(ctx, keys[0]); !errors.Is(err, hasp.ErrHeld) {
		t.Errorf("TryLock of a guarded key: %v, want ErrHeld", err)
	}
	must(t, tx.Commit(ctx))
	for i := range keys {
		must(t, <-got[i])
	}
}

// An attempt at a guarded key waits for the guard a little, but not while all places of
// attempts are taken: others need them.
func TestAttemptsMakeRoom(t *testing.T) {
	t.Parallel()
	s, d := onServer(t)
	keys, _ := guardAll(t, s, 1)
	attempt := func() time.Duration {
		began := time.Now()
		if _, err := d.Acquire(t.Context(), claim(keys[0], "one")); !errors.Is(err, hasp.ErrHeld) {
			t.Fatalf("Acquire of a guarded key: %v, want ErrHeld", err)
		}
		return time.Since(began)
	}
	if took := attempt(); took < pglock.MaxBlocked {
		t.Errorf("an attempt takes %v", took)
	}
	vacate := d.TakePlaces(1)
	defer vacate()
	until(t, "an attempt that does not wait", func() bool { return attempt() < pglock.MaxBlocked })
}

// An attempt ends without a place, because other attempts have all of them. While the server
// answers other calls, the key counts as held, so the caller waits on. If the server answers nobody,
// that is an outage.
func TestFullQueueIsNoOutage(t *testing.T) {
	t.Parallel()
	_, d := onServer(t)
	defer d.TakePlaces(0)()
	attempt := func(meanwhile func()) error {
		ctx, leave := context.WithCancel(t.Context())
		c := claim("key", "one")
		c.Timeout, c.WillRetry = 1, true
		got := acquires(ctx, d, c)
		meanwhile()
		leave()
		return <-got
	}

	if err := attempt(func() {}); err == nil || errors.Is(err, backend.ErrHeld) {
		t.Errorf("Acquire without an answer: %v, want an outage", err)
	}
	until(t, "the key counts as held", func() bool {
		return errors.Is(attempt(func() {
			time.Sleep(10 * time.Millisecond) // the attempt has begun, or the next one will have
			await.Value(d.Inspect(t.Context(), "key"))
		}), backend.ErrHeld)
	})
}

// A transaction that commits only while its lock is the newest. Exactly this is tested by
// TestGuard.
func Example_fence() {
	var db *pgxpool.Pool // the database that has both the locks and the accounts
	ctx := context.Background()
	locks, err := pglock.New(ctx, db, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer locks.Close()

	lease, err := locks.Lock(ctx, "account/7", hasp.WithFence())
	if err != nil {
		fmt.Println(err)
		return
	}
	defer lease.Unlock(ctx)

	err = pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		// With Options.Prefix, the prefix is a part of the key.
		tag, err := tx.Exec(ctx, `SELECT FROM hasp_locks
			WHERE key = $1 AND fence = $2 AND expires > clock_timestamp() FOR KEY SHARE`,
			[]byte(lease.Key()), int64(lease.Fence()))
		if err == nil && tag.RowsAffected() == 0 {
			err = errors.New("the lock is lost")
		}
		if err != nil {
			return err
		}
		_, err = tx.Exec(ctx, "UPDATE accounts SET balance = balance - 20 WHERE id = 7")
		return err
	})
	if err != nil {
		fmt.Println(err)
	}
}

// A reader joins another reader although a third one changes the row for longer than an
// attempt usually waits.
func TestAReaderWaitsForAnotherOnesCommit(t *testing.T) {
	t.Parallel()
	s, d := onServer(t)
	ctx := t.Context()
	await.Value(d.Acquire(ctx, reader("k", "first")))

	// An attempt that has waited for a second gives up, so the server itself looks for one, in the
	// transaction that has locked the row. On a slow machine, another attempt is due.
	await.Success(t, "the second reader joins", func() error {
		tx := begin(t, s, "SELECT FROM hasp_locks FOR UPDATE")
		joined := acquires(ctx, d, reader("k", "second"))
		await.Value(tx.Exec(ctx, fmt.Sprintf(`DO $$ BEGIN
			WHILE clock_timestamp() < now() + interval '20 s' AND NOT EXISTS (SELECT FROM pg_stat_activity
					WHERE datname = current_database() AND wait_event_type = 'Lock' AND clock_timestamp() - query_start > interval '%d ms') LOOP
				PERFORM pg_sleep(0.005), pg_stat_clear_snapshot();
			END LOOP;
		END $$`, 2*pglock.MaxBlocked.Milliseconds())))
		must(t, tx.Rollback(ctx))
		return <-joined
	})
}
