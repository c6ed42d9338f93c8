//go:build unix

package pglock_test

import (
	"context"
	"crypto/rand"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/pgtest"
	"github.com/hasplock/hasp/pglock"
)

// The bare statements: what a program without hasp would write, on a table of the same form.
const (
	bareTake = `INSERT INTO bare AS l (key, token, owner, since, expires, fence)
		VALUES ($1, $2, $3, clock_timestamp(), clock_timestamp() + $4::bigint * interval '1 us',
			(extract(epoch FROM clock_timestamp()) * 1000000)::bigint)
		ON CONFLICT (key) DO UPDATE SET token = excluded.token, owner = excluded.owner, since = clock_timestamp(),
			expires = clock_timestamp() + $4::bigint * interval '1 us',
			fence = greatest(l.fence + 1, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint)
		WHERE l.token IS NULL OR l.expires <= clock_timestamp() RETURNING fence`
	bareRelease = `UPDATE bare SET token = NULL WHERE key = $1 AND token = $2 RETURNING expires > clock_timestamp()`
	bareTable   = `CREATE TABLE bare (key bytea PRIMARY KEY, token text, owner bytea, since timestamptz, expires timestamptz, fence bigint)
		WITH (fillfactor = 50)`
)

const benchPool = 16

// durable is a server that waits for its disk, as servers do.
func durable(b *testing.B, opts ...string) *pgtest.Server {
	return pgtest.Start(b, append(opts, "fsync=on")...)
}

// inParallel runs f n times, by g goroutines, each with keys of its own. It returns the time.
func inParallel(b *testing.B, g, n int, f func(key string) error) time.Duration {
	var left atomic.Int64
	left.Store(int64(n))
	var wg sync.WaitGroup
	began := time.Now()
	for i := range g {
		wg.Go(func() {
			key := fmt.Sprint("key", i)
			for left.Add(-1) >= 0 {
				if err := f(key); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	return time.Since(began)
}

// compare runs two functions in turns, and reports how often each runs in a second.
func compare(b *testing.B, g int, hasp, bare func(key string) error) {
	inParallel(b, g, 20*g, hasp) // connections are made, statements prepared
	inParallel(b, g, 20*g, bare)
	b.ResetTimer()
	var took [2]time.Duration
	n := 0
	for done := 0; done < b.N; n++ {
		chunk := min(b.N-done, 50*g)
		for i := range 2 {
			which := (i + n) % 2
			took[which] += inParallel(b, g, chunk, []func(string) error{hasp, bare}[which])
		}
		done += chunk
	}
	h, w := float64(b.N)/took[0].Seconds(), float64(b.N)/took[1].Seconds()
	b.ReportMetric(h, "hasp/s")
	b.ReportMetric(w, "bare/s")
	b.ReportMetric(h/w, "ratio")
}

// BenchmarkPairs compares Lock and Unlock with the bare statements, with equal pools.
func BenchmarkPairs(b *testing.B) {
	s := durable(b)
	s.Must(b, bareTable)
	db := newPool(b, fmt.Sprintf("%s&pool_max_conns=%d", s.URL(), benchPool))
	c := client(b, s.Addr, fmt.Sprintf("&pool_size=%d", benchPool), nil)
	ctx := context.Background()
	for _, g := range []int{1, 16, 64} {
		b.Run(fmt.Sprint("goroutines=", g), func(b *testing.B) {
			compare(b, g, func(key string) error {
				lease, err := c.Lock(ctx, key, hasp.WithFence())
				if err != nil {
					return err
				}
				return lease.Unlock(ctx)
			}, func(key string) error { return barePair(ctx, db, key) })
		})
	}
}

func barePair(ctx context.Context, db *pgxpool.Pool, key string) error {
	var fence int64
	var live bool
	token := rand.Text()
	if err := db.QueryRow(ctx, bareTake, []byte(key), token, []byte("me"), int64(30e6)).Scan(&fence); err != nil {
		return err
	}
	return db.QueryRow(ctx, bareRelease, []byte(key), token).Scan(&live)
}

func median(ds []time.Duration) float64 {
	slices.Sort(ds)
	return float64(ds[len(ds)/2].Microseconds())
}

// handOver returns the time from Unlock in one Client to the grant in another, which waits.
func handOver(b *testing.B, one, two *hasp.Client) time.Duration {
	type grant struct {
		lease *hasp.Lease
		at    time.Time
		err   error
	}
	ctx := context.Background()
	lease, err := one.Lock(ctx, "key")
	must(b, err)
	got := make(chan grant, 1)
	go func() {
		l, err := two.Lock(ctx, "key")
		got <- grant{l, time.Now(), err}
	}()
	time.Sleep(20 * time.Millisecond) // it waits now
	began := time.Now()
	must(b, lease.Unlock(ctx))
	g := <-got
	must(b, g.err)
	must(b, g.lease.Unlock(ctx))
	return g.at.Sub(began)
}

// BenchmarkHandOver compares the time from Unlock in one Client to the grant in another, which
// waits, with a NOTIFY that another session receives and answers with one take.
func BenchmarkHandOver(b *testing.B) {
	s := durable(b)
	s.Must(b, bareTable)
	ctx := context.Background()
	one, two := client(b, s.Addr, "", nil), client(b, s.Addr, "", nil)
	db := newPool(b, s.URL())
	listens, err := pgx.Connect(ctx, s.URL())
	must(b, err)
	defer listens.Close(ctx)
	_, err = listens.Exec(ctx, "LISTEN bare")
	must(b, err)

	var locks, bare []time.Duration
	for b.Loop() {
		locks = append(locks, handOver(b, one, two))

		taken := make(chan time.Time, 1)
		go func() {
			if _, err := listens.WaitForNotification(ctx); err == nil {
				var fence int64
				db.QueryRow(ctx, bareTake, []byte("bare"), rand.Text(), []byte("me"), int64(1)).Scan(&fence)
			}
			taken <- time.Now()
		}()
		time.Sleep(5 * time.Millisecond)
		began := time.Now()
		_, err = db.Exec(ctx, "SELECT pg_notify('bare', 'x')")
		must(b, err)
		bare = append(bare, (<-taken).Sub(began))
	}
	h, w := median(locks), median(bare)
	b.ReportMetric(h, "hasp-µs")
	b.ReportMetric(w, "bare-µs")
	b.ReportMetric(h/w, "ratio")
}

// polling hides that a driver can wait.
type polling struct{ backend.Driver }

// changes has callers in several Clients lock one key and hold it for 20 ms. It returns how often
// in a second the key went from one Client to another, and how often it was granted.
func changes(b *testing.B, s *pgtest.Server, clients, callers int, poll bool) (changes, grants float64) {
	const runs = 3 * time.Second
	var cs []*hasp.Client
	for range clients {
		d, err := open(context.Background(), s.Addr)
		must(b, err)
		if poll {
			d = polling{d}
		}
		c := hasp.New(d, nil)
		defer c.Close()
		cs = append(cs, c)
	}
	ctx, cancel := context.WithTimeout(context.Background(), runs)
	defer cancel()
	var wg sync.WaitGroup
	var mu sync.Mutex
	last, n, all := -1, 0, 0
	for i, c := range cs {
		for range callers {
			wg.Go(func() {
				for ctx.Err() == nil {
					lease, err := c.Lock(ctx, "key")
					if err != nil {
						if ctx.Err() == nil {
							b.Error(err)
						}
						return
					}
					mu.Lock()
					if last >= 0 && last != i {
						n++
					}
					last = i
					all++
					mu.Unlock()
					time.Sleep(20 * time.Millisecond)
					if err := lease.Unlock(context.Background()); err != nil {
						b.Error(err)
					}
				}
			})
		}
	}
	wg.Wait()
	return float64(n) / runs.Seconds(), float64(all) / runs.Seconds()
}

// BenchmarkChanges compares waiting with polling. One iteration takes six seconds. Callers of
// one Client hand a hold to one another up to five times in a row, however they wait for it.
func BenchmarkChanges(b *testing.B) {
	s := durable(b)
	for _, n := range []struct{ clients, callers int }{{4, 16}, {16, 1}, {2, 1}} {
		b.Run(fmt.Sprintf("clients=%d,callers=%d", n.clients, n.callers), func(b *testing.B) {
			var waits, polls, waitGrants, pollGrants float64
			for b.Loop() {
				c, g := changes(b, s, n.clients, n.callers, false)
				waits, waitGrants = waits+c, waitGrants+g
				c, g = changes(b, s, n.clients, n.callers, true)
				polls, pollGrants = polls+c, pollGrants+g
			}
			n := float64(b.N)
			b.ReportMetric(waits/n, "waiting/s")
			b.ReportMetric(polls/n, "polling/s")
			b.ReportMetric(waitGrants/n, "waiting-grants/s")
			b.ReportMetric(pollGrants/n, "polling-grants/s")
			b.ReportMetric(waits/max(polls, 0.3), "ratio")
		})
	}
}

// BenchmarkListeners measures hand-overs between two Clients, and pairs that nobody waits for,
// while other Clients of the table wait for another key.
func BenchmarkListeners(b *testing.B) {
	for _, n := range []int{0, 300} {
		b.Run(fmt.Sprint("listening=", n), func(b *testing.B) {
			s := durable(b, "max_connections=700")
			ctx := context.Background()
			one, two := client(b, s.Addr, "", nil), client(b, s.Addr, "", nil)
			must(b, listen(b, s, n))
			pairs := inParallel(b, 16, 1000, func(key string) error {
				lease, err := one.Lock(ctx, key)
				if err != nil {
					return err
				}
				return lease.Unlock(ctx)
			})
			var took []time.Duration
			for b.Loop() {
				took = append(took, handOver(b, one, two))
			}
			b.ReportMetric(median(took), "hand-over-µs")
			b.ReportMetric(1000/pairs.Seconds(), "pairs/s")
		})
	}
}

// listen opens n sessions that listen to the channel of the table, as waiting Clients do.
func listen(b *testing.B, s *pgtest.Server, n int) error {
	d, err := open(context.Background(), s.Addr)
	if err != nil {
		return err
	}
	defer d.Close()
	for range n {
		c, err := pgx.Connect(context.Background(), s.URL())
		if err != nil {
			return err
		}
		if _, err := c.Exec(context.Background(), "LISTEN "+d.(*pglock.Driver).Channel()); err != nil {
			return err
		}
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan bool)
		go func() {
			defer close(done)
			for {
				if _, err := c.WaitForNotification(ctx); err != nil {
					return
				}
			}
		}()
		b.Cleanup(func() { cancel(); <-done; c.Close(context.Background()) })
	}
	return nil
}
