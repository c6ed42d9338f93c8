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
	tls     *tls.Config // nil without TLS
	timeout atomic.Int64
	pool    int             // connections to a server; zero: as many as go-redis finds right
	open    context.Context // ends with the Store
	close   context.CancelFunc
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

// dial connects. It does not return an error but a connection that fails with
// it: go-redis logs dial errors to the standard error output, and after some
// of them repeats the last one, unasked, until it finds the server back.
func (d *dialer) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	// go-redis dials on a goroutine of its own, apart from any caller.
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
		config = config.Clone()
		config.ServerName, _, _ = net.SplitHostPort(addr)
	}
	secure := tls.Client(conn, config)
	if err := secure.HandshakeContext(ctx); err != nil {
		conn.Close()
		return deadConn{&handshakeError{err}}, nil
	}
	return conn.Secured(secure), nil
}

// DialError is a connection that could not be made: nothing was sent. Its Unwrap
// is of the form that go-redis, which strips one layer off an error, leaves
// alone.
type DialError struct{ err error }

// Error is without the address, which the store's errors have.
func (e *DialError) Error() string {
	var op *net.OpError
	if errors.As(e.err, &op) {
		return op.Err.Error()
	}
	return e.err.Error()
}

// Unwrap returns the cause.
func (e *DialError) Unwrap() []error { return []error{e.err} }

// handshakeError is a TLS handshake that failed. Its Unwrap is of the form
// that go-redis, which strips one layer off an error, leaves alone.
type handshakeError struct{ err error }

func (e *handshakeError) Error() string   { return fmt.Sprintf("TLS handshake: %v", e.err) }
func (e *handshakeError) Unwrap() []error { return []error{e.err} }

// deadConn is a connection that was never made.
type deadConn struct{ err error }

func (c deadConn) Read([]byte) (int, error)         { return 0, c.err }
func (c deadConn) Write([]byte) (int, error)        { return 0, c.err }
func (c deadConn) Close() error                     { return nil }
func (c deadConn) LocalAddr() net.Addr              { return nil }
func (c deadConn) RemoteAddr() net.Addr             { return nil }
func (c deadConn) SetDeadline(time.Time) error      { return nil }
func (c deadConn) SetReadDeadline(time.Time) error  { return nil }
func (c deadConn) SetWriteDeadline(time.Time) error { return nil }

// SyscallConn has the pool drop it, to which it comes if its caller did not
// wait so long: the next caller is not to hear of it.
func (c deadConn) SyscallConn() (syscall.RawConn, error) { return nil, c.err }
