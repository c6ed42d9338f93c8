package etcdlock

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"math/rand/v2"
	"net"
	"net/url"
	"os"
	"strconv"
	"strings"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	hostclock "github.com/hasplock/hasp/internal/clock"
)

const (
	form = "etcdlock+etcd://user:password@host:2379,host:2379, or etcdlock+etcds://… with TLS, " +
		"or in a Config the same without etcdlock+"
	defaultPort = "2379"
)

// tlsParams are the parameters of etcds://.
var tlsParams = []string{"ca", "cert", "key", "server_name"}

func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{backend.ErrInvalid}, args...)...)
}

// The function open returns a driver for an etcdlock+etcd:// or etcdlock+etcds:// URL.
func open(ctx context.Context, c hasp.Config) (backend.Driver, error) {
	o := &Options{}
	if text, ok := c.Params["window"]; ok {
		var err error
		if o.Window, err = hostclock.ParseDuration(text); err != nil || o.Window < minTTL {
			return nil, invalid("parameter window=%q: want a duration of %v or more, such as %v",
				text, minTTL, defaultWindow)
		}
	}

	if len(c.Nodes) != 1 {
		return nil, invalid("nodes: want one node with all members, not %d: %s", len(c.Nodes), form)
	}
	conf, err := parse(c.Nodes[0])
	if err != nil {
		return nil, err
	}
	// Check the files now, and read them again for each connection.
	if conf.TLS, err = tlsConfig(conf, c.Params); err != nil {
		return nil, err
	}
	certs := func() (*tls.Config, error) { return tlsConfig(conf, c.Params) }

	if name := c.Params["server_name"]; name != "" {
		conf.DialOptions = append(conf.DialOptions, grpc.WithAuthority(name)) // the name that gRPC checks
	}
	return connect(ctx, conf, o, certs)
}

// probe returns an error if etcd does not answer, its version is too old, it ignores the password,
// or the user may not read. It refuses etcd's grpc-proxy, which delays keep-alives by a schedule of
// its own.
func (d *driver) probe(ctx context.Context) error {
	conf := &d.cluster.conf
	_, err := call(ctx, d.cluster, func(m *member) (any, error) {
		r, err := pb.NewMaintenanceClient(m.client.ActiveConnection()).Status(ctx, &pb.StatusRequest{})
		switch {
		case err == nil:
			err = checkVersion(r.Version, conf.Username != "")
		case is(err, rpctypes.ErrPermissionDenied):
			err = nil // only versions that are new enough require a right for this request
		}

		token := m.user.token.Load() // nil if conf has no user
		if err == nil && token != nil && *token == "" {
			err = invalid("etcd has authentication switched off, so it ignores the password: " +
				"remove user and password from the URL, or run etcdctl auth enable")
		}
		return nil, err
	})

	if err == nil {
		_, err = d.entries(ctx, "probe") // fails if the user may not read
	}
	if err != nil {
		return err
	}

	// Send a keep-alive for a lease that does not exist. A member answers it with 0, and the proxy
	// with a number below 0.
	b := d.cluster.beat(ctx, rand.Int64N(1<<62)+1)
	if b.err == nil && b.ttl < 0 {
		return invalid("that is etcd's grpc-proxy, which delays keep-alives: name the members of the etcd")
	}
	return b.err
}

// checkVersion refuses versions that the driver cannot use. etcd 3.4 is not supported, but it works
// without a user. With a user, the client could not replace a token that has expired.
func checkVersion(version string, user bool) error {
	oldest := 4 // of the versions 3.x
	if user {
		oldest = 5
	}
	var major, minor int
	_, err := fmt.Sscanf(version, "%d.%d.", &major, &minor)
	if err != nil || major < 3 || major == 3 && minor < oldest {
		return invalid("etcd has version %q: want 3.5 or later", version)
	}
	return nil
}

// parse returns the settings in a node of the form etcd://user:password@host:port,host:port. The
// user and the ports may be missing. The errors do not repeat the node, which may contain a
// password.
func parse(node string) (conf clientv3.Config, err error) {
	scheme, rest, _ := strings.Cut(node, "://")
	if scheme != "etcd" && scheme != "etcds" {
		return conf, invalid("node: want %s", form)
	}

	// A password may contain @, so the last @ ends the password.
	hosts := rest
	if i := strings.LastIndex(rest, "@"); i >= 0 {
		hosts = rest[i+1:]
		user, password, _ := strings.Cut(rest[:i], ":")
		var userErr, passwordErr error
		conf.Username, userErr = url.PathUnescape(user)
		conf.Password, passwordErr = url.PathUnescape(password)
		switch {
		case userErr != nil || passwordErr != nil:
			return conf, invalid("node: user or password is not percent-encoded as in a URL: write %%25 for %%")
		case conf.Username == "" || conf.Password == "":
			return conf, invalid("node: a user without a password, or the reverse: want %s", form)
		}
	}

	hosts = strings.TrimSuffix(hosts, "/")
	if strings.ContainsAny(hosts, "/#") {
		return conf, invalid("node: text after the hosts: want %s", form)
	}
	web := "http://"
	if scheme == "etcds" {
		web = "https://"
	}
	for _, host := range strings.Split(hosts, ",") {
		if host == "" {
			return conf, invalid("node: an empty host: want %s", form)
		}
		name, port, err := net.SplitHostPort(host)
		if err != nil { // the host has no port
			name = strings.Trim(host, "[]")
			port = defaultPort
		}
		if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 || name == "" {
			return conf, invalid("node: a host or a port is wrong: want %s", form)
		}
		conf.Endpoints = append(conf.Endpoints, web+net.JoinHostPort(name, port))
	}

	return conf, nil
}

// tlsConfig returns the settings for etcds://. For etcd://, which uses no TLS, both results are
// nil.
func tlsConfig(conf clientv3.Config, params map[string]string) (*tls.Config, error) {
	if !strings.HasPrefix(conf.Endpoints[0], "https:") {
		for _, name := range tlsParams {
			if params[name] != "" {
				return nil, invalid("parameter %s: that is for etcds://", name)
			}
		}

		return nil, nil
	}

	t := &tls.Config{MinVersion: tls.VersionTLS12}
	if file := params["ca"]; file != "" {
		pem, err := os.ReadFile(file)
		if err != nil {
			return nil, invalid("parameter ca: %v", err)
		}
		if t.RootCAs = x509.NewCertPool(); !t.RootCAs.AppendCertsFromPEM(pem) {
			return nil, invalid("parameter ca: no certificate in %s: want a PEM file", file)
		}
	}

	cert, key := params["cert"], params["key"]
	if (cert == "") != (key == "") {
		return nil, invalid("parameters cert and key: want both files, or none")
	}
	if cert != "" {
		pair, err := tls.LoadX509KeyPair(cert, key)
		if err != nil {
			return nil, invalid("parameters cert and key: %v", err)
		}
		t.Certificates = []tls.Certificate{pair}
	}

	return t, nil
}
