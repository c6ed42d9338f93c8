package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"hash/fnv"
	mathrand "math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	_ "github.com/hasplock/hasp/pglock"
)

// onPostgres is the nodes of contestants on a PostgreSQL.
const onPostgres = -1

// poolSize is the size of the pool of every contestant on a PostgreSQL.
const poolSize = 16

func connectPostgres(ctx context.Context, url string, size int) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	config.MaxConns = int32(size)
	return pgxpool.NewWithConfig(ctx, config)
}

func openPglock(ctx context.Context, s stores, term time.Duration) (locker, error) {
	return openURL(ctx, fmt.Sprintf("pglock+%s&pool_size=%d", s.Postgres, poolSize), term)
}

// rowCaller sends only the statements of a lock in a row. A release keeps the row.
type rowCaller struct {
	pool *pgxpool.Pool
	term time.Duration
}

type rowLock struct {
	pool       *pgxpool.Pool
	key, token string
}

const rowTable = `CREATE TABLE IF NOT EXISTS bare_locks (key text PRIMARY KEY, token text, expires timestamptz NOT NULL)
	WITH (fillfactor = 50)`

func openRows(ctx context.Context, s stores, term time.Duration) (locker, error) {
	pool, err := connectPostgres(ctx, s.Postgres, poolSize)
	if err != nil {
		return nil, err
	}
	// Workers that create the table at the same time may get an error.
	for range 5 {
		if _, err = pool.Exec(ctx, rowTable); err == nil {
			return &rowCaller{pool, term}, nil
		}
	}
	pool.Close()
	return nil, err
}

const takeRow = `INSERT INTO bare_locks AS l VALUES ($1, $2, clock_timestamp() + $3 * interval '1 us')
	ON CONFLICT (key) DO UPDATE SET token = excluded.token, expires = excluded.expires
	WHERE l.token IS NULL OR l.expires <= clock_timestamp()`

func (c *rowCaller) lock(ctx context.Context, key string) (held, error) {
	l := &rowLock{c.pool, key, rand.Text()}
	for {
		tag, err := c.pool.Exec(ctx, takeRow, key, l.token, c.term.Microseconds())
		switch {
		case err != nil:
			return nil, err
		case tag.RowsAffected() == 1:
			return l, nil
		}
		time.Sleep(polling/2 + mathrand.N(polling))
	}
}

func (l *rowLock) Unlock(ctx context.Context) error {
	tag, err := l.pool.Exec(ctx, "UPDATE bare_locks SET token = NULL WHERE key = $1 AND token = $2", l.key, l.token)
	if err == nil && tag.RowsAffected() != 1 {
		err = fmt.Errorf("%s was lost", l.key)
	}
	return err
}

func (c *rowCaller) close() { c.pool.Close() }

// advisoryCaller uses advisory locks of a session, by hand. Each lock and each waiter keeps
// a connection.
type advisoryCaller struct{ pool *pgxpool.Pool }

type advisoryLock struct {
	conn *pgxpool.Conn
	key  int64
}

func openAdvisory(ctx context.Context, s stores, _ time.Duration) (locker, error) {
	pool, err := connectPostgres(ctx, s.Postgres, poolSize)
	if err != nil {
		return nil, err
	}
	return &advisoryCaller{pool}, nil
}

func (a *advisoryCaller) lock(ctx context.Context, key string) (held, error) {
	h := fnv.New64a()
	h.Write([]byte(key))
	conn, err := a.pool.Acquire(ctx)
	if err != nil {
		return nil, err
	}
	l := &advisoryLock{conn, int64(h.Sum64())}
	if _, err := conn.Exec(ctx, "SELECT pg_advisory_lock($1)", l.key); err != nil {
		conn.Release()
		return nil, err
	}
	return l, nil
}

func (l *advisoryLock) Unlock(ctx context.Context) error {
	defer l.conn.Release()
	var ok bool
	err := l.conn.QueryRow(ctx, "SELECT pg_advisory_unlock($1)", l.key).Scan(&ok)
	if err == nil && !ok {
		err = errors.New("the advisory lock was lost")
	}
	return err
}

func (a *advisoryCaller) close() { a.pool.Close() }
