package etcdlock_test

import (
	"context"
	"net/url"
	"testing"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/etcdtest"
	"github.com/hasplock/hasp/internal/testcert"
)

// TestTLS opens an etcd that wants certificates of its clients.
func TestTLS(t *testing.T) {
	t.Parallel()
	etcdtest.Need(t)
	cert, key, err := testcert.Write(t.TempDir(), "etcd.example")
	musts(t)(nil, err)
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
