//go:build unix

package pglock_test

import (
	"context"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/pgtest"
	"github.com/hasplock/hasp/pglock"
)

var must, until = await.Must, await.Until

// own gives a file to the owner of another one.
func own(t testing.TB, path string, like os.FileInfo) {
	t.Helper()
	if stat, ok := like.Sys().(*syscall.Stat_t); ok && os.Getuid() == 0 {
		must(t, os.Chown(path, int(stat.Uid), int(stat.Gid)))
	}
}

// newDriver opens a driver that ends with the test. On a busy machine the first connection to a
// server may take longer than Open has, so it tries again. Params begin with &.
func newDriver(t testing.TB, where string, params ...string) *pglock.Driver {
	t.Helper()
	c := await.Value(hasp.ParseURL(urlOf(where, params...)))
	var d backend.Driver
	await.Success(t, "Open", func() (err error) {
		d, err = c.Driver(t.Context())
		return err
	})
	t.Cleanup(func() { d.Close() })
	return d.(*pglock.Driver)
}

// onServer opens a driver over a new database.
func onServer(t testing.TB) (*pgtest.Server, *pglock.Driver) {
	t.Helper()
	s := pgtest.Shared(t)
	return s, newDriver(t, s.Where())
}

// withClient opens a Client over a new database.
func withClient(t testing.TB) (*pgtest.Server, *hasp.Client) {
	t.Helper()
	s, d := onServer(t)
	return s, overDriver(t, d, patient)
}

// claim returns a claim for an hour.
func claim(key, token string) backend.Claim {
	return backend.Claim{Key: key, Token: token, TTL: time.Hour, Timeout: time.Hour}
}

// reader returns a shared claim for an hour.
func reader(key, token string) backend.Claim {
	c := claim(key, token)
	c.Shared = true
	return c
}

// finds reports whether a query returns rows.
func finds(s *pgtest.Server, sql string) bool {
	ctx := context.Background()
	c := await.Value(pgx.Connect(ctx, s.URL()))
	defer c.Close(ctx)
	return await.Value(c.Query(ctx, sql)).Next()
}

// patient has a Timeout that the slowest machine keeps. Close may wait for as long, so a test
// unlocks what it has locked.
var patient = &hasp.Options{Timeout: await.Patience}

// client is a patient Client over newDriver.
func client(t testing.TB, where string, params ...string) *hasp.Client {
	t.Helper()
	return overDriver(t, newDriver(t, where, params...), patient)
}

// overDriver returns a Client that ends with the test.
func overDriver(t testing.TB, d backend.Driver, o *hasp.Options) *hasp.Client {
	t.Helper()
	c := await.Value(hasp.New(d, o))
	t.Cleanup(func() { c.Close() })
	return c
}

// newPool returns a pool that ends with the test.
func newPool(t testing.TB, url string) *pgxpool.Pool {
	t.Helper()
	p := await.Value(pgxpool.New(t.Context(), url))
	t.Cleanup(p.Close)
	return p
}

// relay returns a proxy to a server.
func relay(t *testing.T, server string) *faultproxy.Proxy {
	t.Helper()
	p := await.Value(faultproxy.Listen(func() (net.Conn, error) { return net.Dial("tcp", server) }))
	t.Cleanup(p.Close)
	return p
}

// begin begins a transaction, which the end of the test rolls back, and runs a statement in it.
func begin(t *testing.T, s *pgtest.Server, sql string, args ...any) pgx.Tx {
	t.Helper()
	tx := await.Value(newPool(t, s.URL()).Begin(t.Context()))
	t.Cleanup(func() { tx.Rollback(context.Background()) })
	await.Value(tx.Exec(t.Context(), sql, args...))
	return tx
}

// promote makes a replica the primary.
func promote(t *testing.T, r *pgtest.Server) {
	t.Helper()
	until(t, "the replica is promoted", func() bool {
		return r.Exec(t.Context(), "SELECT pg_promote()") == nil || r.Exec(t.Context(), "CREATE TEMP TABLE t ()") == nil
	})
}

// lockOnce locks a free key of c, and unlocks it.
func lockOnce(t *testing.T, c *hasp.Client, key string) {
	t.Helper()
	must(t, <-locks(t.Context(), c, key))
}

// locks locks a key of c, unlocks it, and sends the outcome.
func locks(ctx context.Context, c *hasp.Client, key string) <-chan error {
	got := make(chan error, 1)
	go func() {
		lease, err := c.Lock(ctx, key)
		if err == nil {
			err = lease.Unlock(ctx)
		}
		got <- err
	}()
	return got
}

// acquires makes an attempt, and sends the outcome.
func acquires(ctx context.Context, d backend.Driver, c backend.Claim) <-chan error {
	got := make(chan error, 1)
	go func() {
		_, err := d.Acquire(ctx, c)
		got <- err
	}()
	return got
}
