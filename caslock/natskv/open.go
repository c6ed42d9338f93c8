package natskv

import (
	"context"
	"fmt"
	"net"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/caslock"
)

// fileParams are the parameters that name a file.
var fileParams = []string{"creds", "ca", "cert", "key"}

func init() {
	hasp.Register("nats", open, append([]string{"create", "replicas", "clock"}, fileParams...)...)
}

const (
	form        = "nats://user:password@host:4222,host2:4222/bucket, or nats+tls://…"
	defaultPort = "4222"
	maxReplicas = 5 // of JetStream
)

func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{backend.ErrInvalid}, args...)...)
}

// settings is what a Config says.
type settings struct {
	servers []string // URLs without user
	options []nats.Option
	bucket  jetstream.KeyValueConfig
	create  bool
	clock   bool
}

// owned is a Store whose connection is closed with the driver.
type owned struct {
	*Store
	nc *nats.Conn
}

// Close closes the connection.
func (o owned) Close() error {
	o.nc.Close()
	return nil
}

// The function open returns a driver for a nats:// or nats+tls:// URL.
func open(ctx context.Context, c hasp.Config) (backend.Driver, error) {
	set, err := parse(c)
	if err != nil {
		return nil, err
	}

	// If the user lacks a right, the server answers no request, but reports it to the ErrorHandler.
	// So the handler ends ctx, and open does not wait for the timeout.
	within, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	set.options = append(set.options, nats.Timeout(timeoutPerHost(ctx, len(set.servers))),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
			if isForbidden(err) {
				cancel(err)
			}
		}))

	d, err := set.driver(within)
	if cause := context.Cause(within); err != nil && isForbidden(cause) {
		err = cause
	}
	return d, diagnose(set.servers, err)
}

// driver connects to the servers, and returns a driver that owns the connection.
func (s *settings) driver(ctx context.Context) (backend.Driver, error) {
	nc, err := connect(ctx, strings.Join(s.servers, ","), s.options)
	if err != nil {
		return nil, err
	}

	d, err := s.over(ctx, nc)
	if err != nil {
		nc.Close()
		return nil, err
	}
	return d, nil
}

func (s *settings) over(ctx context.Context, nc *nats.Conn) (backend.Driver, error) {
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, err
	}
	store, err := newStore(ctx, js, s.bucket, s.clock, s.create)
	if err != nil {
		return nil, err
	}
	return caslock.NewDriver(ctx, owned{store, nc})
}

// connect returns when ctx ends, also while the library looks up the name of a host.
func connect(ctx context.Context, servers string, o []nats.Option) (*nats.Conn, error) {
	var nc *nats.Conn
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		nc, err = nats.Connect(servers, o...)
	}()

	select {
	case <-done:
		return nc, err
	case <-ctx.Done():
		go func() { // ends with the connection attempt
			if <-done; nc != nil {
				nc.Close()
			}
		}()
		return nil, ctx.Err()
	}
}

// timeoutPerHost returns how long a connection attempt may take. Hosts are tried one after another,
// so that a host that does not answer leaves time for the next one.
func timeoutPerHost(ctx context.Context, hosts int) time.Duration {
	rest := hasp.DefaultTimeout
	if end, ok := ctx.Deadline(); ok {
		rest = time.Until(end)
	}
	return max(rest*9/10/time.Duration(hosts), 100*time.Millisecond)
}

// parse returns the settings of c. Its errors do not repeat the node, which may contain a password.
func parse(c hasp.Config) (*settings, error) {
	if len(c.Nodes) != 1 {
		return nil, invalid("nodes: want one node with all servers and a bucket, not %d: %s",
			len(c.Nodes), form)
	}
	scheme, rest, ok := strings.Cut(c.Nodes[0], "://")
	if !ok {
		scheme, rest = "nats", c.Nodes[0]
	}
	if scheme != "nats" && scheme != "tls" {
		return nil, invalid("node: want %s", form)
	}

	// A dead connection is noticed within three pings. Each reconnect tries all servers. No refused
	// password ends that, because the password may be changed at the server first.
	s := &settings{options: []nats.Option{
		nats.Name("hasp"),
		nats.MaxReconnects(-1),
		nats.ReconnectBufSize(-1),
		nats.ReconnectWait(200 * time.Millisecond),
		nats.IgnoreAuthErrorAbort(),
		nats.PingInterval(2 * time.Second),
		nats.MaxPingsOutstanding(2),
	}}

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
	for _, host := range strings.Split(hosts, ",") {
		name, port, err := net.SplitHostPort(host)
		if err != nil {
			name, port = strings.Trim(host, "[]"), defaultPort
		}
		n, err := strconv.ParseUint(port, 10, 16)
		if err != nil || n == 0 || name == "" {
			return nil, invalid("node: a host or a port is wrong: want %s", form)
		}
		s.servers = append(s.servers, scheme+"://"+net.JoinHostPort(name, port))
	}

	s.bucket.Bucket = strings.TrimSuffix(bucket, "/")
	if s.bucket.Bucket == "" {
		return nil, invalid("node: no bucket after the hosts, such as /locks: want %s", form)
	}
	if strings.Trim(s.bucket.Bucket, bucketRunes) != "" {
		return nil, invalid("node: bucket %q: want letters, digits, - and _", s.bucket.Bucket)
	}
	return s, s.params(c.Params)
}

const bucketRunes = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"

// userOption returns the option for USER:PASSWORD or TOKEN.
func userOption(text string) (nats.Option, error) {
	user, password, both := strings.Cut(text, ":")
	user, err1 := url.PathUnescape(user)
	password, err2 := url.PathUnescape(password)
	switch {
	case err1 != nil || err2 != nil:
		return nil, invalid("node: user or password is not percent-encoded as in a URL: " +
			"write %%25 for %%")
	case both:
		return nats.UserInfo(user, password), nil
	}

	return nats.Token(user), nil
}

// params sets what the parameters say.
func (s *settings) params(params map[string]string) (err error) {
	if s.create, err = boolean(params, "create", true); err != nil {
		return err
	}
	if s.clock, err = boolean(params, "clock", false); err != nil {
		return err
	}
	if text, ok := params["replicas"]; ok {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 || n > maxReplicas {
			return invalid("parameter replicas=%q: want a number from 1 to %d", text, maxReplicas)
		}
		s.bucket.Replicas = n
	}

	for _, name := range fileParams {
		if file, ok := params[name]; ok {
			if _, err := os.ReadFile(file); err != nil {
				return invalid("parameter %s: %v", name, err)
			}
		}
	}

	// The library reads these files again when it reconnects.
	if file := params["creds"]; file != "" {
		s.options = append(s.options, nats.UserCredentials(file))
	}
	if file := params["ca"]; file != "" {
		s.options = append(s.options, nats.RootCAs(file))
	}
	cert, key := params["cert"], params["key"]
	if (cert == "") != (key == "") {
		return invalid("parameters cert and key: want both or neither")
	}
	if cert != "" {
		s.options = append(s.options, nats.ClientCert(cert, key))
	}
	return nil
}

func boolean(params map[string]string, name string, otherwise bool) (bool, error) {
	text, ok := params[name]
	if !ok {
		return otherwise, nil
	}
	v, err := strconv.ParseBool(text)
	if err != nil {
		return false, invalid("parameter %s=%q: want true or false", name, text)
	}
	return v, nil
}
