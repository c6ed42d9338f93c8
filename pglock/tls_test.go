//go:build unix

package pglock_test

import (
	"crypto/x509"
	"encoding/pem"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/pgtest"
)

// certificate returns the certificate of package httptest and its key. It is for 127.0.0.1, and is
// its own authority.
func certificate(t *testing.T) (cert, key []byte) {
	t.Helper()
	s := httptest.NewTLSServer(nil)
	defer s.Close()
	der, err := x509.MarshalPKCS8PrivateKey(s.TLS.Certificates[0].PrivateKey)
	must(t, err)
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw}),
		pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})
}

// A Client checks the certificate of the server, and its name. It sees over TLS as well that
// the server has ended a connection.
func TestTLS(t *testing.T) {
	t.Parallel()
	s := pgtest.Start(t)
	ctx := t.Context()
	info, err := os.Stat(s.File("PG_VERSION"))
	must(t, err)
	cert, key := certificate(t)
	for name, text := range map[string][]byte{"server.crt": cert, "server.key": key} {
		must(t, os.WriteFile(s.File(name), text, 0o600))
		own(t, s.File(name), info)
	}
	authority := filepath.Join(t.TempDir(), "authority.pem")
	must(t, os.WriteFile(authority, cert, 0o600))
	s.Must(t, "ALTER SYSTEM SET ssl = on")
	must(t, s.Stop())
	must(t, s.Start())
	url := "pglock+postgres://postgres@" + s.Addr + "/postgres?sslmode=verify-full"

	_, err = hasp.Open(ctx, url, patient)
	clear(t, err, "certificate", "sslrootcert=")
	url += "&sslrootcert=" + authority
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
