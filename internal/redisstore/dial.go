package redisstore

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"
)

// dialer makes the connections of a Store that was opened by a URL.
type dialer struct {
	net.Dialer
	network string
	secure  bool               // connections use TLS
	params  map[string]string  // for tlsConfig
	timeout atomic.Int64       // how long a dial may take, as a time.Duration
	size    int                // the maximum number of connections to a server for commands
	open    context.Context    // ends with the Store
	end     context.CancelFunc // ends the context open

	sentinels *sentinels // nil without sentinels
	nodes     *nodes     // nil without a cluster
	wires     []*wire    // nil for a cluster
}

// newDialer returns a dialer. The parameter size limits the connections to each server. If size is
// 0, the limit is twice as high as the number of flights.
func newDialer(a address, params map[string]string, size int) (*dialer, error) {
	d := &dialer{network: "tcp", secure: a.tls, params: params, size: cmp.Or(size, 2*mostFlights)}
	if a.kind == aSocket {
		d.network = "unix"
	}
	if a.tls {
		// Report bad files now. Each connection reads them again.
		if _, err := tlsConfig(params, ""); err != nil {
			return nil, invalid("%w", err)
		}
	}

	d.timeout.Store(int64(dialTimeout))
	d.open, d.end = context.WithCancel(context.Background())
	return d, nil
}

// close ends the dials in progress, and closes the clients except that of the Store.
func (d *dialer) close() {
	d.end()
	for _, w := range d.wires {
		w.rdb.Close()
	}
	if d.nodes != nil {
		for _, node := range d.nodes.first {
			node.Close() // the client of the cluster closes its own
		}
	}

	if t := d.sentinels; t != nil {
		t.timer.Stop()
		for _, s := range t.asked {
			s.Close()
		}
	}
}

// options returns the options of a client for servers of a URL.
func (d *dialer) options(a address, addrs ...string) *redis.UniversalOptions {
	return &redis.UniversalOptions{
		Addrs: addrs, Username: a.user, Password: a.password, DB: a.db, Dialer: d.dial,
		Protocol: 2, DisableIdentity: true, // commands that the user may have no right to
		MaxRetries: -1, MinRetryBackoff: -1, MaxRedirects: maxHops, DialerRetries: 1,
		DialTimeout: dialTimeout,
		// only deadlines limit a call
		ReadTimeout: -1, WriteTimeout: -1, ContextTimeoutEnabled: true,
		PoolSize: d.size, PipelinePoolSize: -1,
		ReadBufferSize: bufferSize, WriteBufferSize: bufferSize,
	}
}

const bufferSize = 16 << 10 // of a connection, for each direction

// tlsConfig returns the configuration of a connection to host. It reads the files that params name.
// Each error names the file.
func tlsConfig(params map[string]string, host string) (*tls.Config, error) {
	c := &tls.Config{ServerName: cmp.Or(params["server_name"], host), MinVersion: tls.VersionTLS12}
	if file := params["ca"]; file != "" {
		pem, err := os.ReadFile(file)
		if err != nil {
			return nil, fmt.Errorf("parameter ca: %w", err)
		}
		c.RootCAs = x509.NewCertPool()
		if !c.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("parameter ca: %s holds no certificate in PEM", file)
		}
	}

	if cert, key := params["cert"], params["key"]; cert != "" {
		pair, err := tls.LoadX509KeyPair(cert, key)
		if err != nil {
			return nil, fmt.Errorf("parameters cert=%s and key=%s: %w", cert, key, err)
		}
		c.Certificates = []tls.Certificate{pair}
	}

	return c, nil
}

// dial makes a connection, and the TLS handshake if the URL asks for TLS.
func (d *dialer) dial(ctx context.Context, _, addr string) (net.Conn, error) {
	return failLater(d.connect(ctx, whole(addr)))
}

// failLater returns the result of a dial. If the dial failed, the result is an undialed connection,
// whose first write returns the error, and no error. If the dial returned the error, go-redis would
// log it, and after some errors it would dial only once a second.
func failLater(conn net.Conn, err error) (net.Conn, error) {
	if err != nil {
		end, _ := net.Pipe()
		conn = undialed{end, fmt.Errorf("%w", err)} // go-redis unwraps the error once
	}
	return conn, nil
}

// undialed is a connection that could not be made. It has one end of a pipe, which accepts
// deadlines.
type undialed struct {
	net.Conn
	err error
}

func (u undialed) Read([]byte) (int, error)  { return 0, u.err }
func (u undialed) Write([]byte) (int, error) { return 0, u.err }

// connect makes a connection to addr, and the TLS handshake if the URL asks for TLS. The dial ends
// with ctx, with the Store, or after the time d.timeout.
func (d *dialer) connect(ctx context.Context, addr string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Duration(d.timeout.Load()))
	defer cancel()
	defer context.AfterFunc(d.open, cancel)()
	plain, err := d.DialContext(ctx, d.network, addr)
	if err != nil || !d.secure {
		return plain, err
	}

	// Read the files again, because certificates are renewed while the program runs.
	host, _, _ := net.SplitHostPort(addr)
	config, err := tlsConfig(d.params, host)
	if err != nil {
		plain.Close()
		return nil, located{err}
	}

	secure := tls.Client(plain, config)
	if err := secure.HandshakeContext(ctx); err != nil {
		plain.Close()
		return nil, fmt.Errorf("%w: %w", errHandshake, err)
	}

	return checked{secure, plain.(rawConn)}, nil
}

// rawConn is a connection of which go-redis can check whether it was closed while it was idle.
type rawConn interface {
	net.Conn
	syscall.Conn
}

// checked is a rawConn that uses TLS.
type checked struct {
	*tls.Conn
	plain syscall.Conn
}

func (c checked) SyscallConn() (syscall.RawConn, error) { return c.plain.SyscallConn() }

// errHandshake marks an error of a TLS handshake. That error also wraps the cause.
var errHandshake = errors.New("TLS handshake")
