package natskv

import (
	"context"
	"net"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/caslock"
	"github.com/hasplock/hasp/caslock/internal/adapter"
)

func init() {
	hasp.Register("nats", open, "create", "replicas", "clock", "creds", "ca", "cert", "key")
}

const (
	form        = "nats://user:password@host:4222,host2:4222/bucket, or nats+tls://…"
	defaultPort = "4222"
	maxReplicas = 5 // of JetStream
)

// settings is what a Config says.
type settings struct {
	servers []string // URLs without user
	options []nats.Option
	bucket  jetstream.KeyValueConfig
	create  bool // see Store
	clock   bool // see Store
}

// ownStore is a Store whose connection is closed with the driver.
type ownStore struct {
	*Store
	nc *nats.Conn
}

// Close closes the connection.
func (o ownStore) Close() error {
	o.nc.Close()
	return nil
}

// The function open returns a driver for a nats:// or nats+tls:// URL.
func open(ctx context.Context, c hasp.Config) (backend.Driver, error) {
	set, err := parse(c)
	if err != nil {
		return nil, err
	}

	// If the user lacks a right, the server does not answer the request, but the library calls the
	// ErrorHandler. The handler cancels within, so that open does not wait for the timeout.
	within, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	set.options = append(set.options, nats.Timeout(timeoutPerHost(ctx, len(set.servers))),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
			if isForbidden(err) {
				cancel(err)
			}
		}))

	d, err := set.driver(within)
	if err == nil {
		return d, nil
	}
	if cause := context.Cause(within); isForbidden(cause) {
		err = cause // instead of the cancellation
	}
	return nil, adapter.Explain(strings.Join(set.servers, ",")+": ", err, hint(err))
}

// driver connects to the servers, and returns a driver that owns the connection.
func (s *settings) driver(ctx context.Context) (d backend.Driver, err error) {
	nc, err := nats.Connect(strings.Join(s.servers, ","), s.options...)
	if err != nil {
		return nil, err
	}

	defer func() {
		if err != nil {
			nc.Close()
		}
	}()

	if len(s.servers) > 1 && nc.ConnectedClusterName() == "" {
		return nil, adapter.Invalid("the server that answers belongs to no cluster: name one server, " +
			"or the members of one cluster")
	}

	js, err := jetstream.New(nc)
	if err != nil {
		return nil, err
	}
	store, err := newStore(ctx, js, s.bucket, s.clock, s.create)
	if err != nil {
		return nil, err
	}
	return caslock.NewDriver(ctx, ownStore{store, nc})
}

// timeoutPerHost returns the library's timeout for one host. The function nats.Connect takes no
// context, and tries the hosts one after another. So each host gets an equal part of nine tenths of
// the time until ctx ends. The rest is for the bucket. The library applies the timeout to the dial,
// and once more to the handshake after it.
func timeoutPerHost(ctx context.Context, hosts int) time.Duration {
	rest := hasp.DefaultTimeout
	if end, ok := ctx.Deadline(); ok {
		rest = time.Until(end)
	}
	return max(rest*9/10/time.Duration(hosts), 100*time.Millisecond)
}

// parse returns the settings of c. A node of a nats:// URL has no scheme, and a node of a
// nats+tls:// URL has the scheme tls. The errors do not repeat the node, which may contain a
// password.
func parse(c hasp.Config) (*settings, error) {
	node, err := adapter.Node(c, form)
	if err != nil {
		return nil, err
	}
	scheme, rest, hasScheme := strings.Cut(node, "://")
	if !hasScheme {
		scheme = "nats"
		rest = node
	}
	if scheme != "nats" && scheme != "tls" {
		return nil, adapter.Invalid("node: want %s", form)
	}

	s := &settings{options: newOptions()}

	// A password may contain @, so the last @ ends the password.
	if i := strings.LastIndex(rest, "@"); i >= 0 {
		user, err := userOption(rest[:i])
		if err != nil {
			return nil, err
		}
		s.options = append(s.options, user)
		rest = rest[i+1:]
	}

	hosts, bucket, _ := strings.Cut(rest, "/")
	s.servers, err = serverURLs(scheme, hosts)
	if err != nil {
		return nil, err
	}

	s.bucket.Bucket = strings.TrimSuffix(bucket, "/")
	if s.bucket.Bucket == "" {
		return nil, adapter.Invalid("node: no bucket after the hosts, such as /locks: want %s", form)
	}
	if strings.Trim(s.bucket.Bucket, bucketRunes) != "" {
		return nil, adapter.Invalid("node: bucket %q: want letters, digits, - and _", s.bucket.Bucket)
	}
	return s, s.params(c.Params)
}

// newOptions returns the options of every connection.
func newOptions() []nats.Option {
	return []nats.Option{
		nats.Name("hasp"),
		nats.ReconnectWait(200 * time.Millisecond),

		// Reconnect for ever, and send no request after its caller has left.
		nats.MaxReconnects(-1),
		nats.ReconnectBufSize(-1),

		// Reconnect also after a refused password, because it may be changed at the server first.
		nats.IgnoreAuthErrorAbort(),

		// Notice a dead connection within three pings.
		nats.PingInterval(2 * time.Second),
		nats.MaxPingsOutstanding(2),

		// Let the timeout of a host bound the lookup of its name.
		nats.SkipHostLookup(),
	}
}

// serverURLs returns a URL for each host in a list such as host:4222,host2.
func serverURLs(scheme, hosts string) (urls []string, err error) {
	for host := range strings.SplitSeq(hosts, ",") {
		name, port, err := net.SplitHostPort(host)
		if err != nil { // host has no port, or is malformed
			name = strings.Trim(host, "[]") // of an IPv6 address
			port = defaultPort
		}

		n, err := strconv.ParseUint(port, 10, 16)
		if err != nil || n == 0 || name == "" {
			return nil, adapter.Invalid("node: a host or a port is wrong: want %s", form)
		}
		urls = append(urls, scheme+"://"+net.JoinHostPort(name, port))
	}
	return urls, nil
}

const bucketRunes = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"

// userOption returns the option for a text USER:PASSWORD, or TOKEN without a colon.
func userOption(text string) (nats.Option, error) {
	user, password, hasPassword := strings.Cut(text, ":")
	user, err1 := url.PathUnescape(user)
	password, err2 := url.PathUnescape(password)
	if err1 != nil || err2 != nil {
		return nil, adapter.Invalid("node: user or password is not percent-encoded as in a URL: " +
			"write %%25 for %%")
	}
	if !hasPassword {
		return nats.Token(user), nil
	}
	return nats.UserInfo(user, password), nil
}

// params sets what the parameters say, or returns the first error. The library reads the files
// again when it reconnects.
func (s *settings) params(values map[string]string) error {
	params := adapter.Params{Values: values}
	s.create = params.Bool("create", true)
	s.clock = params.Bool("clock", false)
	s.bucket.Replicas = params.Int("replicas", 0, maxReplicas)

	if file := params.File("creds"); file != "" {
		s.options = append(s.options, nats.UserCredentials(file))
	}
	if file := params.File("ca"); file != "" {
		s.options = append(s.options, nats.RootCAs(file))
	}
	cert := params.File("cert")
	key := params.File("key")
	if params.Err != nil {
		return params.Err
	}

	if (cert == "") != (key == "") {
		return adapter.Invalid("parameters cert and key: want both or neither")
	}
	if cert != "" {
		s.options = append(s.options, nats.ClientCert(cert, key))
	}
	return nil
}
