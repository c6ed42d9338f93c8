package etcdlock_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/etcdtest"
)

// certify writes a certificate, which is its own authority, and its key into files.
func certify(t *testing.T) (certFile, keyFile string) {
	t.Helper()
	must := musts(t)
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(nil, err)
	cert := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "etcd.example"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
		DNSNames: []string{"etcd.example"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}}
	der, err := x509.CreateCertificate(rand.Reader, cert, cert, &key.PublicKey, key)
	must(nil, err)
	private, err := x509.MarshalECPrivateKey(key)
	must(nil, err)
	dir := t.TempDir()
	certFile, keyFile = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	for file, block := range map[string]*pem.Block{certFile: {Type: "CERTIFICATE", Bytes: der}, keyFile: {Type: "EC PRIVATE KEY", Bytes: private}} {
		must(nil, os.WriteFile(file, pem.EncodeToMemory(block), 0o600))
	}
	return certFile, keyFile
}

// TestTLS opens an etcd that wants certificates of its clients.
func TestTLS(t *testing.T) {
	t.Parallel()
	etcdtest.Need(t)
	cert, key := certify(t)
	all, err := newServers(t.TempDir(), 1)
	musts(t)(all, err)
	s := all[0]
	s.Args = append(s.Args, "--listen-client-urls", "https://"+s.Client, "--advertise-client-urls", "https://"+s.Client,
		"--cert-file", cert, "--key-file", key, "--trusted-ca-file", cert, "--client-cert-auth")
	t.Cleanup(s.Kill)
	musts(t)(nil, s.Start())

	q := url.Values{"ca": {cert}, "cert": {cert}, "key": {key}}
	eventually(t, "a lock over TLS", func() error {
		c, err := hasp.Open(context.Background(), "etcdlock+etcds://"+s.Client+"?"+q.Encode(), nil)
		if err != nil {
			return err
		}
		defer c.Close()
		return hasp.Do(context.Background(), c, "tls", func(context.Context, *hasp.Lease) error { return nil })
	})
	q.Set("server_name", "etcd.example")
	c, err := hasp.Open(context.Background(), "etcdlock+etcds://"+s.Client+"?"+q.Encode(), nil)
	if err != nil {
		t.Error(err)
	} else {
		c.Close()
	}

	q.Set("server_name", "other.example")
	refused(t, "etcds://"+s.Client+"?"+q.Encode(), false, "server_name")
	refused(t, "etcds://"+s.Client, false, "certificate", "ca")
	refused(t, "etcds://"+s.Client+"?"+url.Values{"ca": {cert}}.Encode(), false, "certificate")
	refused(t, "etcd://"+s.Client, false, "etcds://")
}
