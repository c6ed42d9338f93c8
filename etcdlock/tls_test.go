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

// authority makes certificates.
type authority struct {
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t *testing.T, dir string) *authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	a := &authority{dir: dir, key: key, cert: &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "authority"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}}
	a.write(t, "ca", a.cert, key)
	return a
}

// write signs a certificate, and writes it and its key into files.
func (a *authority) write(t *testing.T, name string, cert *x509.Certificate, key *ecdsa.PrivateKey) (certFile, keyFile string) {
	t.Helper()
	der, err := x509.CreateCertificate(rand.Reader, cert, a.cert, &key.PublicKey, a.key)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	certFile, keyFile = filepath.Join(a.dir, name+".pem"), filepath.Join(a.dir, name+"-key.pem")
	for file, block := range map[string]*pem.Block{certFile: {Type: "CERTIFICATE", Bytes: der}, keyFile: {Type: "EC PRIVATE KEY", Bytes: private}} {
		if err := os.WriteFile(file, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return certFile, keyFile
}

func (a *authority) issue(t *testing.T, name string) (certFile, keyFile string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return a.write(t, name, &x509.Certificate{SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), DNSNames: []string{name}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}}, key)
}

// TestTLS opens an etcd that wants certificates of its clients.
func TestTLS(t *testing.T) {
	t.Parallel()
	etcdtest.Need(t)
	dir := t.TempDir()
	a := newAuthority(t, dir)
	serverCert, serverKey := a.issue(t, "etcd.example")
	cert, key := a.issue(t, "client")
	ca := filepath.Join(dir, "ca.pem")

	all, err := newServers(dir, 1)
	if err != nil {
		t.Fatal(err)
	}
	s := all[0]
	s.Args = append(s.Args, "--listen-client-urls", "https://"+s.Client, "--advertise-client-urls", "https://"+s.Client,
		"--cert-file", serverCert, "--key-file", serverKey, "--trusted-ca-file", ca, "--client-cert-auth")
	t.Cleanup(s.Kill)
	if err := s.Start(); err != nil {
		t.Fatal(err)
	}

	q := url.Values{"ca": {ca}, "cert": {cert}, "key": {key}}
	eventually(t, "a lock over TLS", func() error {
		c, err := hasp.Open(context.Background(), "etcdlock+etcds://"+s.Client+"?"+q.Encode(), nil)
		if err != nil {
			return err
		}
		defer c.Close()
		return pair(context.Background(), c, "tls")
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
	refused(t, "etcds://"+s.Client+"?"+url.Values{"ca": {ca}}.Encode(), false, "certificate")
	refused(t, "etcd://"+s.Client, false, "etcds://")
}
