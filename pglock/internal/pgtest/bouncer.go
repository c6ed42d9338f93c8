//go:build unix

package pgtest

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

func bouncerPath() (string, error) {
	const debian = "/usr/sbin/pgbouncer"
	if _, err := os.Stat(debian); err == nil {
		return debian, nil
	}
	return exec.LookPath("pgbouncer")
}

// Bouncer starts a PgBouncer in transaction mode before s. It ends with the test.
func (s *Server) Bouncer(t testing.TB) *Server {
	t.Helper()
	Need(t, "pgbouncer")
	b, err := s.StartBouncer(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Remove)
	return b
}

// StartBouncer is Bouncer without a test. The caller calls Remove.
func (s *Server) StartBouncer(ctx context.Context) (*Server, error) {
	b, err := empty(nil)
	if err != nil {
		return nil, err
	}
	host, port, _ := net.SplitHostPort(s.Addr)
	_, own, _ := net.SplitHostPort(b.Addr)
	ini, users := filepath.Join(b.dir, "bouncer.ini"), filepath.Join(b.dir, "users")
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
`, host, port, own, users)
	path, err := bouncerPath()
	for file, text := range map[string]string{ini: settings, users: `"postgres" ""`} {
		if err == nil {
			err = os.WriteFile(file, []byte(text), 0o644)
		}
	}
	if err != nil {
		b.Remove()
		return nil, err
	}

	log, err := os.OpenFile(filepath.Join(b.dir, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o666)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	c := exec.Command(path, ini)
	c.Dir, c.Stdout, c.Stderr = b.dir, log, log
	c.SysProcAttr = &syscall.SysProcAttr{Credential: credential()}
	if err := c.Start(); err != nil {
		b.Remove()
		return nil, err
	}
	b.cmd, b.done = c, make(chan struct{})
	go func() { c.Wait(); close(b.done) }()

	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		conn, err := pgx.Connect(ctx, b.URL("postgres"))
		if err == nil {
			return b, conn.Close(ctx)
		}
		select {
		case <-b.done:
			err = fmt.Errorf("pgbouncer has ended: %s", b.Log())
		case <-ctx.Done():
			err = fmt.Errorf("pgbouncer does not answer: %w: %s", err, b.Log())
		case <-time.After(20 * time.Millisecond):
			continue
		}
		b.Remove()
		return nil, err
	}
}
