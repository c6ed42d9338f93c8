package redistest

import (
	"crypto/tls"
	"crypto/x509"
	"os"
)

// Certificate contains the names of PEM files. The certificate is its own authority, so CAFile and
// CertFile are the same file. Servers and clients use the same certificate.
type Certificate struct{ CAFile, CertFile, KeyFile string }

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
