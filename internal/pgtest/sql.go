//go:build unix

package pgtest

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"testing"
)

// Exec runs statements as the superuser, in one transaction.
func (s *Server) Exec(ctx context.Context, sql string) error {
	_, err := s.Rows(ctx, sql)
	return err
}

// Must calls Exec. If Exec fails, the test fails.
func (s *Server) Must(t testing.TB, sql string) {
	t.Helper()
	if err := s.Exec(context.Background(), sql); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

// Rows returns the rows of a query as text. There are no spaces around the values, a NULL is empty,
// and columns are separated by |. It prepares no statement.
func (s *Server) Rows(ctx context.Context, sql string) ([]string, error) {
	out, err := s.command(ctx, "psql", "-XqAt", "-h", host, "-p", s.port(), "-U", "postgres", "-d",
		s.Database, "-c", sql).Output()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return nil, fmt.Errorf("psql: %w: %s", err, exit.Stderr)
	}
	if err != nil || len(out) == 0 {
		return nil, err
	}
	return strings.Split(strings.TrimSuffix(string(out), "\n"), "\n"), nil
}

// Kick ends the connections of all clients.
func (s *Server) Kick(ctx context.Context) error {
	return s.Exec(ctx, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "+
		"WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()")
}
