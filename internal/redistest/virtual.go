package redistest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// VirtualServer is a Redis with the virtual time of a testing/synctest bubble.
type VirtualServer struct {
	Mini  *miniredis.Miniredis
	Proxy *faultproxy.Proxy
	Dials atomic.Int64 // how often Client dialed

	t    testing.TB
	addr string
	id   identity
	dead atomic.Bool
}

// Virtual starts a VirtualServer without a socket. Call it inside the bubble. The
// server ends with the test.
func Virtual(t testing.TB) *VirtualServer { return virtual(t, "virtual:6379") }

// VirtualNodes starts n servers with different addresses.
func VirtualNodes(t testing.TB, n int) VirtualServers {
	all := make(VirtualServers, n)
	for i := range all {
		all[i] = virtual(t, fmt.Sprintf("node%d:6379", i+1))
	}
	return all
}

func virtual(t testing.TB, addr string) *VirtualServer {
	v := &VirtualServer{Mini: miniredis.NewMiniRedis(), t: t, addr: addr}
	v.Mini.ClockTTL(true)
	conn, err := v.Mini.Dial() // this starts it
	if err != nil {
		t.Fatalf("redistest: %v", err)
	}
	conn.Close()
	v.id.renew()
	v.Mini.Server().SetPreHook(v.id.answer)
	v.Proxy = faultproxy.New(v.Mini.Dial)
	t.Cleanup(func() {
		v.Proxy.Close()
		v.Mini.Close()
	})
	return v
}

// Kill ends the server for all clients of its Proxy. New connections are refused.
func (v *VirtualServer) Kill() {
	v.dead.Store(true)
	v.Proxy.Down()
}

// Start starts a killed server again, with or without its data.
func (v *VirtualServer) Start(data bool) {
	if !data {
		v.Mini.FlushAll()
	}
	if err := v.Direct().ScriptFlush(context.Background()).Err(); err != nil {
		v.t.Errorf("redistest: %v", err)
	}
	v.id.renew()
	v.Proxy.Up()
	v.dead.Store(false)
}

// Restart is Kill and Start.
func (v *VirtualServer) Restart(data bool) { v.Kill(); v.Start(data) }

// Skew sets the clock of TIME ahead by d. It does not change terms.
func (v *VirtualServer) Skew(d time.Duration) {
	v.id.mu.Lock()
	defer v.id.mu.Unlock()
	v.id.skew = d
}

// Client returns a go-redis client of the server, through its Proxy. Only their
// contexts bound its calls, and each is sent once.
func (v *VirtualServer) Client() *redis.Client {
	dial := v.Proxy.Dialer()
	return v.client(func(ctx context.Context, network, addr string) (net.Conn, error) {
		v.Dials.Add(1)
		if v.dead.Load() {
			return refused{}, nil
		}
		return dial(ctx, network, addr)
	})
}

// Link returns a client of the server with a Proxy of its own, in front of the
// server's Proxy.
func (v *VirtualServer) Link() (*redis.Client, *faultproxy.Proxy) {
	behind := v.Proxy.Dialer()
	link := faultproxy.New(func() (net.Conn, error) {
		if v.dead.Load() {
			return nil, errRefused
		}
		return behind(context.Background(), "", "")
	})
	v.t.Cleanup(link.Close)
	return v.client(link.Dialer()), link
}

// refused is a connection that could not be made. go-redis would log an error of
// the dialer.
type refused struct{ net.Conn }

// errRefused is a joined error, because go-redis unwraps errors by one layer.
var errRefused = errors.Join(&net.OpError{Op: "dial", Net: "tcp", Err: syscall.ECONNREFUSED})

func (refused) Read([]byte) (int, error)         { return 0, errRefused }
func (refused) Write([]byte) (int, error)        { return 0, errRefused }
func (refused) Close() error                     { return nil }
func (refused) RemoteAddr() net.Addr             { return nil }
func (refused) SetDeadline(time.Time) error      { return nil }
func (refused) SetReadDeadline(time.Time) error  { return nil }
func (refused) SetWriteDeadline(time.Time) error { return nil }

// Direct is Client without the Proxy.
func (v *VirtualServer) Direct() *redis.Client {
	return v.client(func(context.Context, string, string) (net.Conn, error) { return v.Mini.Dial() })
}

func (v *VirtualServer) client(dial func(context.Context, string, string) (net.Conn, error)) *redis.Client {
	rdb := redis.NewClient(&redis.Options{
		Addr:                  v.addr,
		Dialer:                dial,
		ContextTimeoutEnabled: true,
		ReadTimeout:           -1,
		WriteTimeout:          -1,
		// No caller may wait for a connection: go-redis keeps its timers for the
		// whole process, and a timer of one bubble is fatal in another.
		PoolSize: 10_000,
		// go-redis takes 32 KiB for a connection, and 256 KiB for one of pipelines.
		// To clear them costs more than to use them.
		ReadBufferSize:          1024,
		WriteBufferSize:         1024,
		PipelineReadBufferSize:  1024,
		PipelineWriteBufferSize: 1024,

		DialerRetries:   1,
		MaxRetries:      -1,
		DisableIdentity: true,
		MaintNotificationsConfig: &maintnotifications.Config{
			Mode: maintnotifications.ModeDisabled,
		},
	})
	v.t.Cleanup(func() { rdb.Close() })
	return rdb
}

// VirtualServers are independent of each other.
type VirtualServers []*VirtualServer

// Clients returns a client of each, as Client does.
func (vs VirtualServers) Clients() []redis.UniversalClient {
	all := make([]redis.UniversalClient, len(vs))
	for i, v := range vs {
		all[i] = v.Client()
	}
	return all
}
