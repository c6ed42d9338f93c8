//go:build unix

package pglock_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/pgtest"
	"github.com/hasplock/hasp/pglock"
)

// contend has each Client lock one key rounds times with a fence. It fails the test if two
// have the key at once, if a fence is not larger than the one before, or if a call fails.
func contend(t *testing.T, clients []*hasp.Client, rounds int) {
	t.Helper()
	var inside sync.Mutex // guards the field last
	var last uint64
	var wg sync.WaitGroup
	for _, c := range clients {
		wg.Go(func() {
			for range rounds {
				lease, err := c.Lock(t.Context(), "contended", hasp.WithFence())
				if err != nil {
					t.Errorf("Lock: %v", err)
					return
				}
				if !inside.TryLock() {
					t.Error("two holders at once")
					return
				}
				if lease.Fence() <= last {
					t.Errorf("fence %d after %d", lease.Fence(), last)
				}
				last = lease.Fence()
				inside.Unlock()
				if err := lease.Unlock(t.Context()); err != nil {
					t.Errorf("Unlock: %v", err)
					return
				}
			}
		})
	}
	wg.Wait()
}

// Fences grow although all rows are deleted all the time.
func TestFencesGrowAfterSweeps(t *testing.T) {
	t.Parallel()
	s, d := onServer(t)
	var clients []*hasp.Client
	for range 64 {
		clients = append(clients, client(t, s.Where(), "&pool_size=2"))
	}
	ctx, stop := context.WithCancel(t.Context())
	var sweeps sync.WaitGroup
	sweeps.Go(func() {
		for ctx.Err() == nil {
			if err := d.Sweep(ctx, 0); err != nil && ctx.Err() == nil {
				t.Errorf("sweep: %v", err)
				return
			}
		}
	})
	contend(t, clients, 5)
	stop()
	sweeps.Wait()
}

// Drivers sweep after grants. The sweep deletes what is old, more than one batch of it, and nothing
// else. One client sweeps in a minute.
func TestSweep(t *testing.T) {
	t.Parallel()
	s, c := withClient(t)
	ctx := t.Context()
	held := await.Value(c.Lock(ctx, "held"))
	defer held.Unlock(ctx)
	lockOnce(t, c, "new")
	s.Must(t, `INSERT INTO hasp_locks (key, since, expires, fence, fenced)
		SELECT ('old' || n)::bytea, now() - interval '2 h', CASE WHEN n % 2 = 0 THEN now() - interval '61 min' END, 1, true FROM generate_series(1, 2500) n`)
	s.Must(t, `INSERT INTO hasp_locks (key, since, expires, fence, fenced) VALUES ('recent', now() - interval '2 h', now() - interval '59 min', 1, true)`)
	// The fence of a clock that was ahead. If its row went, the next fence could be smaller.
	s.Must(t, `INSERT INTO hasp_locks (key, since, fence, fenced) VALUES ('fence', now() - interval '2 h', extract(epoch FROM now()) * 1000000, true)`)

	for _, when := range []string{"after the sweep", "after a second sweep within the minute"} {
		d := newDriver(t, s.Where())
		wait := d.SweepOften()
		await.Value(d.Acquire(ctx, claim(when, "one")))
		wait()
		rows := await.Value(s.Rows(ctx, `SELECT encode(key, 'escape') FROM hasp_locks WHERE length(key) > 0 AND key NOT LIKE 'after%' ORDER BY key`))
		if got := fmt.Sprint(rows); got != "[fence held new recent]" {
			t.Errorf("%s: %s", when, got)
		}
		s.Must(t, `UPDATE hasp_locks SET since = now() - interval '2 h', expires = now() - interval '2 h' WHERE key = 'recent'`)
		must(t, d.Break(ctx, when))
	}
	for entry, err := range c.List(ctx, "") {
		must(t, err)
		if entry.Key != "held" {
			t.Errorf("List yields %q", entry.Key)
		}
	}
}

// The isolation level that a database has by default does not matter, also over a pool whose
// sessions are not the driver's own.
func TestIsolation(t *testing.T) {
	t.Parallel()
	for _, level := range []string{"repeatable read", "serializable"} {
		t.Run(level, func(t *testing.T) {
			s := pgtest.Shared(t, "default_transaction_isolation = '"+level+"'")
			var clients []*hasp.Client
			for range 4 {
				d := await.Value(pglock.NewDriver(t.Context(), newPool(t, s.URL()), nil))
				clients = append(clients, client(t, s.Where()), overDriver(t, d, patient))
			}
			contend(t, clients, 20)
		})
	}
}

// A renewal that PostgreSQL undoes at its commit confirms nothing. Its second attempt finds only the
// holds that are still there.
func TestRenewalUndoneAtCommit(t *testing.T) {
	t.Parallel()
	s, d := onServer(t)
	cs := []backend.Claim{claim("held", "one"), claim("lost", "two"), reader("alone", "three")}
	for _, c := range cs {
		await.Value(d.Acquire(t.Context(), c))
	}
	// The attempts with odd numbers fail at their commit, and the others find no row but held.
	s.Must(t, `CREATE SEQUENCE attempts; CREATE FUNCTION lose() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF nextval('attempts') % 2 = 1 THEN RETURN NEW; END IF; RETURN NULL; END $$`)
	s.Must(t, `CREATE FUNCTION undo() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'undone' USING ERRCODE = '40001'; END $$`)
	s.Must(t, `CREATE TRIGGER lose BEFORE UPDATE ON hasp_locks FOR EACH ROW WHEN (OLD.key <> 'held') EXECUTE FUNCTION lose()`)
	s.Must(t, `CREATE CONSTRAINT TRIGGER undo AFTER UPDATE ON hasp_locks INITIALLY DEFERRED FOR EACH ROW WHEN (OLD.key <> 'held') EXECUTE FUNCTION undo()`)
	d.Renew(t.Context(), cs, func(i int, _ backend.Grant, err error) {
		if lost := cs[i].Key != "held"; errors.Is(err, backend.ErrLost) != lost || !lost && err != nil {
			t.Errorf("renewal of %s: %v", cs[i].Key, err)
		}
	})
}

// Renewals in any order never deadlock.
func TestRenewalsDoNotDeadlock(t *testing.T) {
	t.Parallel()
	s, d := onServer(t)
	ctx := t.Context()
	cs := make([]backend.Claim, 256)
	for i := range cs {
		cs[i] = claim(fmt.Sprint("k", i), fmt.Sprint("t", i))
		cs[i].Shared = i%4 == 0
		await.Value(d.Acquire(ctx, cs[i]))
	}

	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 15 {
				var some []backend.Claim
				for _, i := range rand.Perm(len(cs)) {
					some = append(some, cs[i])
				}
				d.Renew(ctx, some, func(i int, _ backend.Grant, err error) {
					if err != nil {
						t.Errorf("renewal of %s: %v", some[i].Key, err)
					}
				})
			}
		})
	}
	wg.Wait()
	// The driver repeats what a deadlock has undone, so ask the server. It counts with delay.
	time.Sleep(time.Second)
	if finds(s, `SELECT FROM pg_stat_database WHERE datname = current_database() AND deadlocks > 0`) {
		t.Error("renewals have deadlocked")
	}
}

// What was confirmed before a crash of the server is there after it: it was on the disk, and so
// would be on that of a synchronous replica.
func TestKilled(t *testing.T) {
	t.Parallel()
	s := pgtest.Start(t, "wal_writer_delay=10s") // what is not written at a commit is lost
	ctx := t.Context()
	a, b := client(t, s.Where()), client(t, s.Where())
	lease := await.Value(a.Lock(ctx, "key", hasp.WithFence(), hasp.WithTTL(time.Hour)))
	kept := await.Value(a.Lock(ctx, "kept", hasp.WithMinHold(time.Hour)))
	must(t, kept.Unlock(ctx))
	s.Kill()
	if _, err := b.TryLock(ctx, "key"); !errors.Is(err, hasp.ErrUnavailable) {
		t.Errorf("TryLock while the server is down: %v, want ErrUnavailable", err)
	}
	must(t, s.Start())

	until(t, "an answer after the crash", func() bool {
		_, err := b.TryLock(ctx, "key")
		return errors.Is(err, hasp.ErrHeld)
	})
	if st := await.Value(b.Inspect(ctx, "kept")); st.TTL < time.Hour/2 {
		t.Errorf("a key that was kept is held for %v after the crash, want an hour", st.TTL)
	}
	must(t, lease.Extend(ctx, time.Hour))
	must(t, lease.Unlock(ctx))
	next := await.Value(b.Lock(ctx, "key", hasp.WithFence()))
	if next.Fence() <= lease.Fence() {
		t.Errorf("fence %d after %d and a crash", next.Fence(), lease.Fence())
	}
	must(t, next.Unlock(ctx))
}

// A failover to a replica that lags loses the newest locks: the key is granted again, with a
// larger fence, and the first holder learns of the loss at its next renewal.
func TestFailover(t *testing.T) {
	t.Parallel()
	s := pgtest.Start(t)
	r := s.Replica(t)
	ctx := t.Context()
	_, err := hasp.Open(ctx, urlOf(r.Where()), patient)
	clear(t, err, "replica", "primary")

	both := s.Addr + "," + r.Where()
	a, b := client(t, both), client(t, both)

	old := await.Value(a.Lock(ctx, "old", hasp.WithFence(), hasp.WithTTL(5*time.Second)))
	defer old.Unlock(ctx)
	until(t, "the replica has the first lock", func() bool {
		rows, err := r.Rows(ctx, `SELECT token FROM hasp_locks WHERE key = 'old' AND token IS NOT NULL`)
		return err == nil && len(rows) == 1
	})
	must(t, r.Signal("walreceiver", syscall.SIGSTOP))
	lost := await.Value(a.Lock(ctx, "lost", hasp.WithFence(), hasp.WithTTL(5*time.Second)))

	s.Kill()
	must(t, r.Signal("walreceiver", syscall.SIGKILL))
	promote(t, r)

	next := await.Value(b.Lock(ctx, "lost", hasp.WithFence()))
	defer next.Unlock(ctx)
	if next.Fence() <= lost.Fence() {
		t.Errorf("fence %d after %d and a failover", next.Fence(), lost.Fence())
	}
	select {
	case <-lost.Context().Done():
	case <-time.After(await.Patience):
		t.Error("the first holder did not learn of the loss")
	}

	// The lock that the replica had was renewed by the new primary, or has ended in time.
	if st, err := b.Inspect(ctx, "old"); (err != nil || !st.Held) && old.Err() == nil {
		t.Errorf("a lock that the replica had is %+v, want it held: %v", st, err)
	}
}

// When the server has no connection left, a Client goes on with those that it has, and seldom
// asks for another.
func TestConnectionLimit(t *testing.T) {
	t.Parallel()
	s := pgtest.Start(t, "max_connections=14",
		"superuser_reserved_connections=3", // a connection that was refused takes one for a moment
		"log_connections=on")
	s.Must(t, "CREATE ROLE app LOGIN; GRANT ALL ON SCHEMA public TO app")
	ctx := t.Context()
	url := "postgres://app@" + s.Addr + "/postgres?sslmode=disable"
	c := await.Value(hasp.Open(ctx, "pglock+"+url, patient))
	defer c.Close()
	for {
		other, err := pgx.Connect(ctx, url)
		if err != nil {
			break
		}
		defer other.Close(ctx)
	}

	// asks checks how many connections are asked for while 16 callers call f. There may be one
	// for each place of the pool, and then one after each pause.
	asks := func(f func(i int)) {
		t.Helper()
		asked := func() int { return strings.Count(s.Log(), "connection received: host=127.0.0.1") }
		before, began := asked(), time.Now()
		var wg sync.WaitGroup
		for i := range 16 {
			wg.Go(func() { f(i) })
		}
		wg.Wait()
		most := 10 + int(time.Since(began)/(100*time.Millisecond)) + 1
		if n := asked() - before; n > most {
			t.Errorf("asked for %d connections in %v, want up to %d", n, time.Since(began), most)
		}
	}
	asks(func(i int) {
		for range 20 {
			if err := <-locks(ctx, c, fmt.Sprint("key", i)); err != nil {
				t.Errorf("Lock without free connections: %v", err)
			}
		}
	})

	// The Client has no connection for renewals, but it has one for other statements.
	renewed := await.Value(c.Lock(ctx, "renewed"))
	must(t, renewed.Extend(ctx, time.Hour))
	must(t, renewed.Unlock(ctx))

	_, err := hasp.Open(ctx, "pglock+"+url, patient)
	clear(t, err, "max_connections")

	// It has no connection at all.
	s.Must(t, "ALTER ROLE app CONNECTION LIMIT 0")
	must(t, s.Kick(ctx))
	refused := func(i int) bool {
		_, err := c.TryLock(ctx, fmt.Sprint("key", i))
		return errors.Is(err, hasp.ErrUnavailable) && strings.Contains(err.Error(), "too many connections")
	}
	until(t, "the end of all connections", func() bool { return refused(0) })
	asks(func(i int) {
		for range 100 {
			if !refused(i) {
				t.Error("TryLock without a connection has another error")
			}
		}
	})
	s.Must(t, "ALTER ROLE app CONNECTION LIMIT -1")
	lockOnce(t, c, "key")
}

// While another statement locks the whole table, a free key is not reported as held, also if
// the server has a lock_timeout. That is an outage.
func TestTableLock(t *testing.T) {
	t.Parallel()
	s := pgtest.Shared(t, "lock_timeout = 100")
	b := s.Bouncer(t)
	ctx := t.Context()
	o := &hasp.Options{Timeout: 2 * time.Second}
	pd := await.Value(pglock.NewDriver(ctx, newPool(t, s.URL()), nil))
	clients := map[string]*hasp.Client{"own": overDriver(t, newDriver(t, s.Where()), o), "pool": overDriver(t, pd, o),
		"bouncer": overDriver(t, newDriver(t, b.Where()), o)}

	for _, mode := range []string{"SHARE", "ACCESS EXCLUSIVE"} {
		tx := begin(t, s, "LOCK TABLE hasp_locks IN "+mode+" MODE")
		for name, c := range clients {
			if _, err := c.TryLock(ctx, "free"); !errors.Is(err, hasp.ErrUnavailable) || errors.Is(err, hasp.ErrHeld) {
				t.Errorf("%s: TryLock while the table is locked in mode %s: %v, want ErrUnavailable", name, mode, err)
			}
		}
		must(t, tx.Rollback(ctx))
		for name, c := range clients {
			until(t, name+": a key after the table lock", func() bool { return <-locks(ctx, c, "free") == nil })
		}
	}
}

// An attempt may wait for locks of PostgreSQL that are not for the row of its key. That does
// not mean that the key is held.
func TestOtherLocks(t *testing.T) {
	t.Parallel()
	s, d := onServer(t)
	ctx := t.Context()
	tx := begin(t, s, `INSERT INTO hasp_locks (key, since, fence, fenced) VALUES ('free', now(), 1, true)`)

	got := acquires(ctx, d, claim("free", "one"))
	until(t, "an attempt that waits", func() bool {
		return len(got) > 0 || finds(s, `SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock' AND now() - query_start > interval '100 ms'`)
	})
	must(t, tx.Rollback(ctx))
	must(t, <-got)
}

// Of several hosts, the first does not answer at all. A Client opens within its Timeout, and
// its callers are woken by releases.
func TestSilentHost(t *testing.T) {
	t.Parallel()
	s := pgtest.Shared(t)
	silent := await.Value(net.Listen("tcp", "127.0.0.1:0")) // it accepts nothing
	defer silent.Close()
	ctx := t.Context()
	c := client(t, silent.Addr().String()+","+s.Where())
	lease := await.Value(c.Lock(ctx, "key"))

	got := locks(ctx, client(t, silent.Addr().String()+","+s.Where()), "key")
	until(t, "listening", func() bool {
		return finds(s, `SELECT FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN hasp%'`)
	})
	must(t, lease.Unlock(ctx))
	must(t, <-got)
}

// The old primary lives on, and refuses writes with advice. A Client whose callers wait listens at
// the new one.
func TestListensAtTheNewPrimary(t *testing.T) {
	t.Parallel()
	s := pgtest.Start(t)
	r := s.Replica(t)
	ctx := t.Context()
	both := s.Addr + "," + r.Where()
	d, old := newDriver(t, both), newDriver(t, s.Where())
	await.Value(d.Acquire(ctx, claim("key", "one")))
	got := locks(ctx, client(t, both), "key")
	listens := func(at *pgtest.Server) func() bool {
		return func() bool {
			return finds(at, "SELECT FROM pg_stat_activity WHERE query LIKE 'LISTEN %' ")
		}
	}
	until(t, "a listener at the primary", listens(s))

	s.Must(t, "ALTER SYSTEM SET default_transaction_read_only = on")
	s.Must(t, "SELECT pg_reload_conf()")
	var err error
	until(t, "a refusal", func() bool {
		_, err = old.Acquire(ctx, claim("other", "one"))
		return err != nil && strings.Contains(err.Error(), "25006")
	})
	clear(t, err, "default_transaction_read_only is on for this user")
	promote(t, r)
	until(t, "a listener at the new primary", listens(r))
	await.Success(t, "Break at the new primary", func() error { return d.Break(ctx, "key") })
	must(t, <-got)
}

// A connection that listens exists only while callers wait.
func TestListensOnlyWhileWaiting(t *testing.T) {
	t.Parallel()
	s, d := onServer(t)
	ctx := t.Context()
	c := overDriver(t, d, patient)
	lockOnce(t, c, "key")
	if d.Listens() {
		t.Error("listens although nobody waits")
	}
	other := client(t, s.Where())
	held := await.Value(other.Lock(ctx, "held"))
	too := await.Value(other.Lock(ctx, "held too"))
	waiting, leave := context.WithCancel(ctx)
	got := locks(waiting, c, "held")
	long := newDriver(t, s.Where())
	later := locks(ctx, overDriver(t, long, patient), "held")
	until(t, "listening", func() bool { return d.Listens() && long.Listens() })

	// The session is older than the next waits, so their repeated attempts get the last refusal again.
	for range 20 {
		brief, cancel := context.WithTimeout(ctx, 10*time.Millisecond)
		<-locks(brief, c, "held too")
		cancel()
	}
	leave()
	<-got
	// A caller that left during its attempt is forgotten at a later attempt.
	until(t, "the end of all waiters", func() bool {
		lockOnce(t, c, "key")
		return d.Waiters() == 0
	})
	// Also while others hand keys over.
	until(t, "the end of listening", func() bool {
		s.Must(t, "NOTIFY "+d.Channel()+", 'other'; NOTIFY "+long.Channel()+", 'other'")
		return !d.Listens()
	})
	until(t, "listening, because a caller waits", long.Listens)
	must(t, held.Unlock(ctx))
	must(t, <-later)
	must(t, too.Unlock(ctx))
}

// The program itself uses all connections of the pool that it has passed. Renewals, an Unlock and a
// Break work nevertheless, and the error of a Lock names the pool. A statement that has waited for a
// connection waits for locks no longer than its caller waits for it. Close leaves the pool open.
func TestPoolThatIsUsedUp(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool := newPool(t, pgtest.Shared(t).URL()+"&pool_max_conns=2")
	d := await.Value(pglock.NewDriver(ctx, pool, nil)).(*pglock.Driver)
	cs := []backend.Claim{claim("alone", "one"), reader("read", "two")}
	for _, c := range cs {
		await.Value(d.Acquire(ctx, c))
	}
	c := await.Value(pglock.New(ctx, pool, &pglock.Options{Client: hasp.Options{Timeout: 3 * time.Second}}))
	held := await.Value(c.Lock(ctx, "held"))
	await.Value(c.Lock(ctx, "broken"))
	one, two := await.Value(pool.Acquire(ctx)), await.Value(pool.Acquire(ctx))

	_, err := c.TryLock(ctx, "free")
	if !errors.Is(err, hasp.ErrUnavailable) || !strings.Contains(err.Error(), "all 2 of the pool are in use") {
		t.Errorf("TryLock: %v", err)
	}
	await.Success(t, "Break", func() error { return c.Break(ctx, "broken") })
	await.Success(t, "Unlock", func() error {
		if err := held.Unlock(ctx); !errors.Is(err, hasp.ErrReleased) {
			return err
		}
		return nil
	})
	within, cancel := context.WithTimeout(ctx, await.Patience)
	defer cancel()
	d.Renew(within, cs, func(i int, _ backend.Grant, err error) {
		if err != nil {
			t.Errorf("renewal of %s: %v", cs[i].Key, err)
		}
	})

	end, _ := within.Deadline()
	var left time.Duration
	time.AfterFunc(200*time.Millisecond, func() {
		left = time.Until(end)
		one.Release()
		two.Release()
	})
	text := await.Value(d.LockTimeout(within, time.Hour))
	if ms, err := strconv.Atoi(text); err != nil || int64(ms) > left.Milliseconds() {
		t.Errorf("lock_timeout %s ms, and the caller leaves in %v", text, left)
	}
	if text = await.Value(d.LockTimeout(ctx, time.Second)); text != "1000" {
		t.Errorf("lock_timeout %s ms, want 1000", text)
	}

	must(t, errors.Join(c.Close(), d.Close()))
	must(t, pool.Ping(ctx))
}
