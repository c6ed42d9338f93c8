//go:build unix

package pglock_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/pgtest"
)

// certificates are a certificate authority, and a server's certificate that it has signed.
type certificates struct{ authority, certificate, key []byte }

func newCertificates(t *testing.T) certificates {
	t.Helper()
	of := func(kind string, der []byte) []byte { return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}) }
	create := func(c, parent *x509.Certificate, key, signer *ecdsa.PrivateKey) []byte {
		c.SerialNumber, c.NotBefore, c.NotAfter = big.NewInt(1), time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
		der, err := x509.CreateCertificate(rand.Reader, c, parent, &key.PublicKey, signer)
		must(t, err)
		return der
	}
	authorityKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	authority := &x509.Certificate{Subject: pkix.Name{CommonName: "authority"}, IsCA: true,
		BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	root := create(authority, authority, authorityKey, authorityKey)
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	leaf := create(&x509.Certificate{Subject: pkix.Name{CommonName: "localhost"}, DNSNames: []string{"localhost"}}, authority, key, authorityKey)
	der, err := x509.MarshalPKCS8PrivateKey(key)
	must(t, err)
	return certificates{of("CERTIFICATE", root), of("CERTIFICATE", leaf), of("PRIVATE KEY", der)}
}

// A Client checks the certificate of the server, and its name. It sees over TLS as well that
// the server has ended a connection.
func TestTLS(t *testing.T) {
	t.Parallel()
	s := pgtest.Start(t)
	ctx := t.Context()
	good, other := newCertificates(t), newCertificates(t)
	info, err := os.Stat(s.File("PG_VERSION"))
	must(t, err)
	for name, text := range map[string][]byte{"server.crt": good.certificate, "server.key": good.key} {
		must(t, os.WriteFile(s.File(name), text, 0o600))
		own(t, s.File(name), info)
	}
	dir := t.TempDir()
	file := func(name string, text []byte) string {
		must(t, os.WriteFile(filepath.Join(dir, name), text, 0o600))
		return filepath.Join(dir, name)
	}
	right, wrong := file("right.pem", good.authority), file("wrong.pem", other.authority)
	s.Must(t, "ALTER SYSTEM SET ssl = on")
	must(t, s.Stop())
	must(t, s.Start())
	url := func(host, authority string) string {
		return "pglock+postgres://postgres@" + host + s.Addr[len("127.0.0.1"):] + "/postgres?sslmode=verify-full&sslrootcert=" + authority
	}

	_, err = hasp.Open(ctx, url("localhost", wrong), nil)
	clear(t, err, "certificate", "sslrootcert=")
	_, err = hasp.Open(ctx, url("127.0.0.1", right), nil)
	clear(t, err, "name the host that the certificate is for")

	c, err := hasp.Open(ctx, url("localhost", right), nil)
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
