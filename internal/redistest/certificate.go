package redistest

import (
	"crypto/tls"
	"crypto/x509"
	"os"
)

// Certificate names PEM files: a certificate that is its own authority, and its
// key. CAFile and CertFile are the same file. Servers and clients both use them.
type Certificate struct{ CAFile, CertFile, KeyFile string }

// params returns the parameters of a URL with TLS.
func (c Certificate) params(o *Options) map[string]string {
	p := map[string]string{}
	if o.tls() {
		p["ca"] = c.CAFile
	}
	if o.Mutual {
		p["cert"], p["key"] = c.CertFile, c.KeyFile
	}
	return p
}

// config returns the TLS configuration of a client.
func (c Certificate) config(mutual bool) (*tls.Config, error) {
	pem, err := os.ReadFile(c.CAFile)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(pem)
	config := &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}
	if mutual {
		pair, err := tls.LoadX509KeyPair(c.CertFile, c.KeyFile)
		if err != nil {
			return nil, err
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return config, nil
}
