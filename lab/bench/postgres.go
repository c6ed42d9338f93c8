package main

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// onPostgres is the number of nodes of contestants that use a PostgreSQL.
const onPostgres = -1

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
	return unlock(func(ctx context.Context) error {
		defer conn.Release()
		_, err := conn.Exec(ctx, "SELECT pg_advisory_unlock(hashtext($1))", key)
		return err
	}), nil
}

func (a advisory) close() { a.pool.Close() }
