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
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/internal/redisstore/resp"
)

// dialer makes the connections of a Store.
type dialer struct {
	tls     *tls.Config        // nil without TLS
	timeout atomic.Int64       // how long a dial or a search may take, as a time.Duration
	size    int                // the maximum number of connections to a server for commands
	asksRun bool               // each connection asks its server for the run ID, because two connections may lead to different servers
	open    context.Context    // ends with the Store
	end     context.CancelFunc // ends the context open
	dial    func(ctx context.Context, network, addr string) (net.Conn, error)

	mu sync.Mutex     // makes spawn and close exclude each other
	wg sync.WaitGroup // counts the goroutines of the Store, except those of its subscriptions
}

// newDialer returns a dialer. The parameter size limits the connections of each pool. If size is 0,
// the limit is ten times the number of processors.
func newDialer(a address, params map[string]string, size int) (*dialer, error) {
	if size == 0 {
		size = 10 * runtime.GOMAXPROCS(0)
	}
	d := &dialer{size: size, dial: new(net.Dialer).DialContext}
	if a.tls {
		var err error
		if d.tls, err = tlsConfig(params); err != nil {
			return nil, err
		}
	}

	d.timeout.Store(int64(dialTimeout))
	d.open, d.end = context.WithCancel(context.Background())
	return d, nil
}

// spawn runs f on a goroutine of its own. Once the Store is being closed, it returns false instead.
func (d *dialer) spawn(f func()) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	// The method close holds mu while it ends d.open, so wg does not grow while close waits.
	if d.open.Err() != nil {
		return false
	}
	d.wg.Go(f)
	return true
}

// close closes all connections, and waits until all goroutines have ended.
func (d *dialer) close() {
	d.mu.Lock()
	d.end()
	d.mu.Unlock()
	d.wg.Wait()
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

// pool returns a pool for the server at addr, without connections. Each connection begins with the
// commands of setup.
func (d *dialer) pool(a address, addr string, setup [][]string) *resp.Pool {
	if d.asksRun {
		setup = append(slices.Clip(setup), []string{"info", "server"})
	}
	if d.tls != nil && len(setup) == 0 {
		// Send a PING, because with TLS 1.3 a server sends tickets before its first reply. Unless
		// these tickets are read, they look like a reply without a command.
		setup = [][]string{{"ping"}}
	}
	network := "tcp"
	if a.kind == aSocket {
		network = "unix"
	}
	p := resp.NewPool(d.open, addr, d.size, func(ctx context.Context) (*resp.Conn, error) {
		ctx, cancel := context.WithTimeout(ctx, time.Duration(d.timeout.Load()))
		defer cancel()
		conn, err := d.connect(ctx, network, addr)
		if err != nil || len(setup) == 0 {
			return conn, err
		}

		replies := make([]resp.Reply, len(setup))
		good := conn.Do(ctx, replies, setup...)
		for i, r := range replies {
			switch {
			case err != nil:
			case setup[i][0] == "role" && r.Err == nil && !isMaster(r.Value):
				err = errNotMaster
			case setup[i][0] == "info" && r.Err == nil:
				// Refuse a text that is no reply to INFO. A reply to INFO may lack run_id, but it
				// always has some field.
				if text, _ := r.Value.(string); !strings.Contains(text, ":") {
					err = resp.Unexpected(r.Value)
				}
				conn.Run = InfoField(r.Value, "run_id")
			case setup[i][0] == "ping" && resp.IsReply(r.Err): // the user may lack the right to PING
			default:
				err = r.Err
			}
		}
		if err == nil && !good {
			// Either ctx ended as the last reply arrived, or there are bytes that the next command
			// would receive as its reply.
			err = cmp.Or(ctx.Err(), errors.New("the server sends more replies than it gets commands"))
		}
		if err != nil {
			conn.Close()
			return nil, err
		}
		return conn, nil
	})
	d.spawn(p.CloseAtEnd) // if the Store is being closed, the pool makes no connection
	return p
}

// login returns the commands by which a connection logs in and selects a database.
func login(user, password string, db int) (setup [][]string) {
	switch {
	case user != "":
		setup = append(setup, []string{"auth", user, password})
	case password != "":
		setup = append(setup, []string{"auth", password})
	}
	if db != 0 {
		setup = append(setup, []string{"select", strconv.Itoa(db)})
	}
	return setup
}

// connect dials, and makes the TLS handshake if the URL asks for TLS.
func (d *dialer) connect(ctx context.Context, network, addr string) (*resp.Conn, error) {
	plain, err := d.dial(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	if d.tls == nil {
		return resp.NewConn(plain, plain), nil
	}

	config := d.tls
	if config.ServerName == "" {
		// Clone the config before the change, because all dials share it.
		config = config.Clone()
		config.ServerName, _, _ = net.SplitHostPort(addr)
	}
	secure := tls.Client(plain, config)
	if err := secure.HandshakeContext(ctx); err != nil {
		plain.Close()
		return nil, fmt.Errorf("%w: %w", errHandshake, err)
	}
	return resp.NewConn(secure, plain), nil
}

// errHandshake marks an error of a TLS handshake. That error also wraps the cause.
var errHandshake = errors.New("TLS handshake")
