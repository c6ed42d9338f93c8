package redistest

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/alicebob/miniredis/v2/server"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
	lua "github.com/yuin/gopher-lua"

	"github.com/hasplock/hasp/internal/faultproxy"
)

// miniredis makes a Lua state for each run of a script. With the default sizes it clears 120 KB for
// each state, which took a quarter of the time of a suite. The registry must have room for the
// 1,000 arguments of a fairlock poll.
func init() { lua.RegistrySize, lua.CallStackSize = 2560, 32 }

// VirtualServer is a miniredis in the virtual time of a testing/synctest bubble.
type VirtualServer struct {
	Mini  *miniredis.Miniredis
	Proxy *faultproxy.Proxy
	Dials atomic.Int64 // how often clients of Client have dialed

	t    testing.TB
	o    *Options
	addr string
	id   identity
	dead atomic.Bool
}

// Virtual starts a VirtualServer without a socket. Call it inside the bubble. The end of the test
// stops the server.
func Virtual(t testing.TB) *VirtualServer { return virtual(t, &Options{}, "virtual:6379") }

// VirtualNodes starts n servers with different addresses.
func VirtualNodes(t testing.TB, n int) VirtualServers {
	all := make(VirtualServers, n)
	for i := range all {
		all[i] = virtual(t, &Options{}, fmt.Sprintf("node%d:6379", i+1))
	}
	return all
}

func virtual(t testing.TB, o *Options, addr string) *VirtualServer {
	v := &VirtualServer{Mini: miniredis.NewMiniRedis(), t: t, o: o, addr: addr}
	v.Mini.ClockTTL(true)
	conn, err := v.Mini.Dial() // the first Dial starts the server
	must(t, "miniredis", err)
	conn.Close()

	switch {
	case o.User != "":
		v.Mini.RequireUserAuth(o.User, o.Password)
	case o.Password != "":
		v.Mini.RequireAuth(o.Password)
	}

	v.id.renew()
	v.Mini.Server().SetPreHook(v.id.answer)
	v.Proxy = faultproxy.New(v.Mini.Dial)
	t.Cleanup(func() { v.Proxy.Close(); v.Mini.Close() })
	return v
}

// Kill ends the server for all clients of its Proxy. New connections are refused.
func (v *VirtualServer) Kill() { v.dead.Store(true); v.Proxy.Down() }

// Start starts a killed server again. If data is false, the server has lost its data.
func (v *VirtualServer) Start(data bool) {
	if err := v.start(data); err != nil {
		v.t.Errorf("redistest: %v", err)
	}
}

func (v *VirtualServer) start(data bool) error {
	if !data {
		v.Mini.FlushAll()
	}
	err := v.Direct().ScriptFlush(context.Background()).Err() // a real server forgets its scripts
	v.id.renew()
	v.Proxy.Up()
	v.dead.Store(false)
	return err
}

// Restart is Kill and Start.
func (v *VirtualServer) Restart(data bool) { v.Kill(); v.Start(data) }

// Skew makes TIME report a clock that is ahead by d. The terms of keys do not change.
func (v *VirtualServer) Skew(d time.Duration) {
	v.id.mu.Lock()
	defer v.id.mu.Unlock()
	v.id.skew = d
}

// Skip shortens the terms of all keys by d. It does not move the clock of TIME, because miniredis
// takes the end of a PEXPIREAT from another clock.
func (v *VirtualServer) Skip(d time.Duration) { v.Mini.FastForward(d) }

// Client returns a go-redis client of the server, through its Proxy. The client sends each command
// once. A call ends only with its reply or with its context.
func (v *VirtualServer) Client() *redis.Client {
	dial := v.Proxy.Dialer()
	return v.client(func(ctx context.Context, network, addr string) (net.Conn, error) {
		v.Dials.Add(1)
		if v.dead.Load() {
			end, _ := net.Pipe()
			return refused{end}, nil
		}
		return dial(ctx, network, addr)
	})
}

// Link returns a client of the server and a new Proxy. The client connects through the new Proxy,
// and the new Proxy through the server's Proxy.
func (v *VirtualServer) Link() (*redis.Client, *faultproxy.Proxy) {
	return v.Named(func() *VirtualServer { return v })
}

// Named is like Link, but for each new connection it calls its parameter, which returns the server.
// Therefore this Link is like a DNS name whose address changes.
func (v *VirtualServer) Named(now func() *VirtualServer) (*redis.Client, *faultproxy.Proxy) {
	link := faultproxy.New(func() (net.Conn, error) {
		to := now()
		if to.dead.Load() {
			return nil, errRefused
		}
		return to.Proxy.Dialer()(context.Background(), "", "")
	})

	v.t.Cleanup(link.Close)
	return v.client(link.Dialer()), link
}

// The type refused is a connection to a dead server. The dialer returns it instead of an error,
// because go-redis would log an error.
type refused struct{ net.Conn }

// errRefused wraps its error once more (by Join), because go-redis removes one layer of an error.
var errRefused = errors.Join(&net.OpError{Op: "dial", Net: "tcp", Err: syscall.ECONNREFUSED})

func (refused) Read([]byte) (int, error)  { return 0, errRefused }
func (refused) Write([]byte) (int, error) { return 0, errRefused }

// Direct is Client without the Proxy.
func (v *VirtualServer) Direct() *redis.Client {
	return v.client(func(context.Context, string, string) (net.Conn, error) {
		return v.Mini.Dial()
	})
}

// dialer is the type of redis.Options.Dialer.
type dialer = func(ctx context.Context, network, addr string) (net.Conn, error)

func (v *VirtualServer) client(dial dialer) *redis.Client {
	rdb := redis.NewClient(&redis.Options{
		Addr:                  v.addr,
		Username:              v.o.User,
		Password:              v.o.Password,
		Dialer:                dial,
		ContextTimeoutEnabled: true,
		ReadTimeout:           -1,
		WriteTimeout:          -1,
		// Make the pool so large that no caller waits for a connection. To wait, go-redis uses
		// timers that it keeps for the whole process, and a timer of one bubble panics in another.
		PoolSize: 10_000,
		// By default go-redis has buffers of 32 KiB for a connection, and of 256 KiB for a
		// pipeline. Clearing these buffers would cost more than the test itself.
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

// VirtualServers are several servers, which are independent of each other.
type VirtualServers []*VirtualServer

// Clients returns a client of each server; see VirtualServer.Client.
func (vs VirtualServers) Clients() []redis.UniversalClient {
	all := make([]redis.UniversalClient, len(vs))
	for i, v := range vs {
		all[i] = v.Client()
	}
	return all
}

// inProcess is a miniredis behind a socket. The socket belongs to its Proxy, so the address stays
// when the server restarts.
type inProcess struct {
	*VirtualServer
	keep bool
}

func (s *Server) startInProcess() error {
	ln, err := s.listen()
	if err != nil {
		return err
	}
	p := &inProcess{virtual(s.t, &s.o, ""), s.o.Keep}
	p.Proxy.Serve(ln)
	s.Addr = p.Proxy.Addr()
	s.flav = p
	return s.ready()
}

// listen listens on a socket in a directory or on a port, with or without TLS, as the options say.
func (s *Server) listen() (net.Listener, error) {
	if !s.o.tls() && !s.o.Unix {
		return net.Listen("tcp", "127.0.0.1:0")
	}

	dir, err := s.tempDir(s.t, &s.o)
	if err != nil {
		return nil, err
	}
	if s.o.Unix {
		return net.Listen("unix", filepath.Join(dir, "redis.sock"))
	}

	config, err := s.config(true)
	if err != nil {
		return nil, err
	}
	if s.o.Mutual {
		config.ClientCAs = config.RootCAs
		config.ClientAuth = tls.RequireAndVerifyClientCert
	}

	return tls.Listen("tcp", "127.0.0.1:0", config)
}

func (p *inProcess) pause() error  { p.Proxy.Stall(); return nil }
func (p *inProcess) resume() error { p.Proxy.Flow(); return nil }
func (p *inProcess) kill() error   { p.Kill(); return nil }

func (p *inProcess) restart(data bool) error { return p.start(data && p.keep) }

// identity gives miniredis a run ID, and a clock that a test can set.
type identity struct {
	mu   sync.Mutex // guards the fields below
	run  string
	skew time.Duration
}

// renew makes a new run ID.
func (i *identity) renew() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.run = rand.Text()
}

// answer is a hook of miniredis. miniredis calls it for every command, even in scripts. answer
// reports whether it has answered the command.
func (i *identity) answer(c *server.Peer, cmd string, args ...string) bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	isServer := func(section string) bool { return strings.EqualFold(section, "server") }

	switch {
	case cmd == "INFO" && (len(args) == 0 || slices.ContainsFunc(args, isServer)):
		c.WriteBulk("# Server\r\nredis_version:7.0.0\r\nredis_mode:standalone\r\n" +
			"run_id:" + i.run + "\r\n")
		return true
	case cmd == "TIME" && i.skew != 0:
		now := time.Now().Add(i.skew)
		c.WriteLen(2)
		c.WriteBulk(strconv.FormatInt(now.Unix(), 10))
		c.WriteBulk(strconv.Itoa(now.Nanosecond() / 1000))
		return true
	}

	return false
}
