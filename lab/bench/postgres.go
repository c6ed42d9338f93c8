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

// session is a session of PostgreSQL's own advisory locks. Each caller needs one of its own.
type session struct {
	url  string
	conn *pgx.Conn // nil before the first lock, and closed after a lock whose context has ended
}

func openAdvisory(_ context.Context, s stores, _ time.Duration) (locker, error) {
	return &session{url: s.Postgres}, nil
}

func (s *session) caller(context.Context) (locker, error) { return &session{url: s.url}, nil }

func (s *session) lock(ctx context.Context, key string) (held, error) {
	if s.conn == nil || s.conn.IsClosed() {
		conn, err := pgx.Connect(ctx, s.url)
		if err != nil {
			return nil, err
		}
		s.conn = conn
	}
	_, err := s.conn.Exec(ctx, "SELECT pg_advisory_lock(hashtext($1))", key)
	return advisoryHold{s.conn, key}, err
}

func (s *session) close() {
	if s.conn != nil {
		s.conn.Close(context.Background())
	}
}

type advisoryHold struct {
	conn *pgx.Conn
	key  string
}

func (h advisoryHold) Unlock(ctx context.Context) error {
	_, err := h.conn.Exec(ctx, "SELECT pg_advisory_unlock(hashtext($1))", h.key)
	return err
}
