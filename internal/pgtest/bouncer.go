//go:build unix

package pgtest

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

// Bouncer starts a PgBouncer in front of s, in transaction mode. The end of the test stops it.
func (s *Server) Bouncer(t testing.TB) *Server {
	t.Helper()
	Need(t, "pgbouncer")
	b, err := s.NewBouncer()
	endsWith(t, b, err).Database = s.Database
	return b
}

// NewBouncer does the same as Bouncer, but without a test. The caller must call Remove.
func (s *Server) NewBouncer() (*Server, error) {
	return start("pgbouncer", nil, func(b *Server) error {
		users := filepath.Join(b.dir, "users")
		settings := fmt.Sprintf(`[databases]
* = host=%s port=%s user=postgres
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = %s
unix_socket_dir =
auth_type = any
auth_file = %s
pool_mode = transaction
max_client_conn = 500
default_pool_size = 20
`, host, s.port(), b.port(), users)
		return errors.Join(os.WriteFile(b.ini(), []byte(settings), 0o644),
			os.WriteFile(users, []byte(`"postgres" ""`), 0o644))
	})
}

func (s *Server) ini() string { return filepath.Join(s.dir, "bouncer.ini") }
