package main

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	_ "github.com/hasplock/hasp/pglock"
)

// onPostgres is the number of nodes of contestants that use a PostgreSQL.
const onPostgres = -1

func openPglock(ctx context.Context, s stores, term time.Duration) (locker, error) {
	return openURL(ctx, "pglock+"+s.Postgres, term)
}

// advisory takes PostgreSQL's own advisory locks, each on a session of its own.
type advisory struct{ pool *pgxpool.Pool }

func openAdvisory(ctx context.Context, s stores, _ time.Duration) (locker, error) {
	pool, err := pgxpool.New(ctx, s.Postgres+"&pool_max_conns=64")
	return advisory{pool}, err
}

func (a advisory) lock(ctx context.Context, key string) (held, error) {
	conn, err := a.pool.Acquire(ctx)
	if err != nil {
		return nil, err
	}
	if _, err := conn.Exec(ctx, "SELECT pg_advisory_lock(hashtext($1))", key); err != nil {
		conn.Release()
		return nil, err
	}
	return advisoryHold{conn, key}, nil
}

func (a advisory) close() { a.pool.Close() }

type advisoryHold struct {
	conn *pgxpool.Conn
	key  string
}

func (h advisoryHold) Unlock(ctx context.Context) error {
	defer h.conn.Release()
	_, err := h.conn.Exec(ctx, "SELECT pg_advisory_unlock(hashtext($1))", h.key)
	return err
}
