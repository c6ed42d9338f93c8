package main

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	_ "github.com/hasplock/hasp/pglock"
)

// onPostgres is the number of nodes of contestants that use a PostgreSQL.
const onPostgres = -1

func openPglock(ctx context.Context, s stores, term time.Duration) (locker, error) {
	return openURL(ctx, "pglock+"+s.Postgres, term)
}

// advisory locks by PostgreSQL's own advisory locks. Each caller needs a session of its own.
type advisory struct {
	locker // nil, because no caller uses it
	url    string
}

func openAdvisory(_ context.Context, s stores, _ time.Duration) (locker, error) {
	return advisory{url: s.Postgres}, nil
}

func (a advisory) caller(ctx context.Context) (locker, error) {
	conn, err := pgx.Connect(ctx, a.url)
	return session{conn}, err
}

func (advisory) close() {}

// session is one session of advisory locks.
type session struct{ conn *pgx.Conn }

func (s session) lock(ctx context.Context, key string) (held, error) {
	_, err := s.conn.Exec(ctx, "SELECT pg_advisory_lock(hashtext($1))", key)
	return advisoryHold{s, key}, err
}

func (s session) close() { s.conn.Close(context.Background()) }

type advisoryHold struct {
	session
	key string
}

func (h advisoryHold) Unlock(ctx context.Context) error {
	_, err := h.conn.Exec(ctx, "SELECT pg_advisory_unlock(hashtext($1))", h.key)
	return err
}
