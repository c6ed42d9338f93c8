package redisstore

import (
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

	"github.com/hasplock/hasp/internal/redisstore/resp"
)

// dialer makes the connections of a Store.
type dialer struct {
	tls     *tls.Config        // nil without TLS
	timeout atomic.Int64       // how long a dial or a search may take, as a time.Duration
	pool    int                // the most connections to a server for commands; zero leaves it to go-redis
	open    context.Context    // ends with the Store
	close   context.CancelFunc // ends open
	calls   resp.Calls
}

func newDialer(a address, params map[string]string) (*dialer, error) {
	d := &dialer{}
	if a.tls {
		var err error
		if d.tls, err = tlsConfig(params); err != nil {
			return nil, err
		}
	}

	d.timeout.Store(int64(dialTimeout))
	d.open, d.close = context.WithCancel(context.Background())
	return d, nil
}

// tlsConfig reads the files that params name.
func tlsConfig(params map[string]string) (*tls.Config, error) {
	c := &tls.Config{ServerName: params["server_name"], MinVersion: tls.VersionTLS12}
	if file := params["ca"]; file != "" {
		pem, err := os.ReadFile(file)
		if err != nil {
			return nil, invalid("parameter ca: %w", err)
		}
		c.RootCAs = x509.NewCertPool()
		if !c.RootCAs.AppendCertsFromPEM(pem) {
			return nil, invalid("parameter ca: %s holds no certificate in PEM", file)
		}
	}

	if params["cert"] != "" {
		pair, err := tls.LoadX509KeyPair(params["cert"], params["key"])
		if err != nil {
			return nil, invalid("parameters cert and key: %w", err)
		}
		c.Certificates = []tls.Certificate{pair}
	}
	return c, nil
}

// dial connects. It never returns an error. go-redis would log the error to standard
// error. After several errors go-redis would return the last one to its callers until a
// dial in the background succeeds. Instead dial returns a connection whose reads and
// writes fail with the error.
func (d *dialer) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	// A pool of go-redis dials on a goroutine of its own, so ctx is not the caller's there.
	ctx, cancel := context.WithTimeout(ctx, time.Duration(d.timeout.Load()))
	defer cancel()
	defer context.AfterFunc(d.open, cancel)()

	plain, err := (&net.Dialer{}).DialContext(ctx, network, addr)
	if err != nil {
		return deadConn{&DialError{err}}, nil
	}
	if d.tls == nil {
		return d.calls.Wrap(resp.Guard(plain)), nil
	}

	conn := d.calls.Wrap(plain)
	config := d.tls
	if config.ServerName == "" {
		// All dials share the config, so it must not change.
		config = config.Clone()
		config.ServerName, _, _ = net.SplitHostPort(addr)
	}
	secure := tls.Client(conn, config)
	if err := secure.HandshakeContext(ctx); err != nil {
		// The handshake's error is the cause; an error of Close adds nothing.
		conn.Close()
		return deadConn{&handshakeError{err}}, nil
	}
	return conn.Secured(secure), nil
}

// DialError is the error of a connection that could not be made: nothing was sent.
// If the setup of a connection fails, go-redis returns what the error unwraps to. If the
// error unwraps to a slice, go-redis returns the error itself.
type DialError struct{ err error }

// Error returns the cause without the address: the Store adds the server's name.
func (e *DialError) Error() string {
	var op *net.OpError
	if errors.As(e.err, &op) {
		return op.Err.Error()
	}
	return e.err.Error()
}

// Unwrap returns the cause.
func (e *DialError) Unwrap() []error { return []error{e.err} }

// handshakeError is the error of a TLS handshake. It unwraps to a slice for the same
// reason as DialError.
type handshakeError struct{ err error }

func (e *handshakeError) Error() string   { return fmt.Sprintf("TLS handshake: %v", e.err) }
func (e *handshakeError) Unwrap() []error { return []error{e.err} }

// deadConn stands for a connection that could not be made.
type deadConn struct{ err error }

func (c deadConn) Read([]byte) (int, error)         { return 0, c.err }
func (c deadConn) Write([]byte) (int, error)        { return 0, c.err }
func (c deadConn) Close() error                     { return nil }
func (c deadConn) LocalAddr() net.Addr              { return nil }
func (c deadConn) RemoteAddr() net.Addr             { return nil }
func (c deadConn) SetDeadline(time.Time) error      { return nil }
func (c deadConn) SetReadDeadline(time.Time) error  { return nil }
func (c deadConn) SetWriteDeadline(time.Time) error { return nil }

// SyscallConn makes the pool drop the connection. If the caller has left before the dial
// failed, go-redis puts the deadConn into its pool. Without SyscallConn, the next caller
// would get the error.
func (c deadConn) SyscallConn() (syscall.RawConn, error) { return nil, c.err }
