//go:build unix

package pglock_test

import (
	"os"
	"strings"
	"testing"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/pgtest"
	"github.com/hasplock/hasp/internal/testcert"
)

// A Client checks the certificate of the server, and its name. It sees over TLS as well that
// the server has ended a connection.
func TestTLS(t *testing.T) {
	t.Parallel()
	s := pgtest.Start(t)
	ctx := t.Context()
	info, err := os.Stat(s.File("PG_VERSION"))
	must(t, err)
	cert, key, err := testcert.Write(t.TempDir(), "postgres.example")
	must(t, err)
	for name, file := range map[string]string{"server.crt": cert, "server.key": key} {
		must(t, os.Rename(file, s.File(name)))
		own(t, s.File(name), info)
	}
	s.Must(t, "ALTER SYSTEM SET ssl = on")
	must(t, s.Stop())
	must(t, s.Start())
	url := "pglock+postgres://postgres@" + s.Addr + "/postgres?sslmode=verify-full"

	_, err = hasp.Open(ctx, url, patient)
	clear(t, err, "certificate", "sslrootcert=")
	url += "&sslrootcert=" + s.File("server.crt")
	_, err = hasp.Open(ctx, strings.Replace(url, "127.0.0.1", "localhost", 1), patient)
	clear(t, err, "name the host that the certificate is for")

	c, err := hasp.Open(ctx, url, patient)
	must(t, err)
	defer c.Close()
	for range 2 {
		lease, err := c.Lock(ctx, "key")
		must(t, err)
		rows, err := s.Rows(ctx, "SELECT count(*) > 0 FROM pg_stat_ssl WHERE ssl")
		must(t, err)
		if len(rows) != 1 || rows[0] != "t" {
			t.Errorf("connections with TLS: %v", rows)
		}
		must(t, lease.Unlock(ctx))
		must(t, s.Kick(ctx))
	}
}
