// Package redistest starts Redis servers for tests.
//
// HASP_TEST_REDIS selects the kind:
//
//	process       a redis-server of this machine, one for each Start
//	inprocess     miniredis, in the process of the test
//	redis://…     a running server; tests write keys of their own into it
//	container     as if unset; the tests of internal/acceptance use containers
//
// If it is unset, tests use a process if redis-server is installed, and miniredis
// otherwise. If the selected kind is not available, the test fails. The first
// Start of a test binary prints the kind.
package redistest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// Env is the environment variable that selects the Redis of the tests.
const Env = "HASP_TEST_REDIS"

// Options describe the server that a test needs. Nil means a plain server.
type Options struct {
	// Own means that no other test uses the server, so that the test can stop,
	// kill or flush it. The other options imply it.
	Own bool

	// Real means a real Redis. With miniredis the test is skipped.
	Real bool

	// Args are further arguments of redis-server. They imply Real.
	Args []string

	// User and Password are the credentials of clients. Without a User, the
	// password is for the default user.
	User, Password string

	// TLS makes the server use TLS, with a certificate for 127.0.0.1 and
	// localhost. Clients verify it with CAFile.
	TLS bool

	// Mutual is TLS with client certificates. Clients can use CertFile and
	// KeyFile.
	Mutual bool

	// Unix makes the server listen on a socket in the file system.
	Unix bool

	// Keep makes the server write every command to disk, so that the data
	// survives Kill and Restart.
	Keep bool

	// Clock means a real Redis with a wall clock that Skew sets. If that is not
	// available, the test is skipped. See [ClocksCanJump].
	Clock bool

	// SentinelUser and SentinelPassword are the credentials for the sentinels of
	// StartSentinel.
	SentinelUser, SentinelPassword string

	// Bare means a cluster without replicas, for StartCluster.
	Bare bool
}

func (o *Options) own() bool {
	return o.Own || o.real() || o.User != "" || o.Password != "" || o.tls() || o.Unix || o.Keep
}

func (o *Options) tls() bool { return o.TLS || o.Mutual }

func (o *Options) real() bool { return o.Real || o.Clock || len(o.Args) > 0 }

// Server is a running Redis. It ends with the test.
type Server struct {
	// Addr is host:port, or the path of the socket.
	Addr string

	// Certificate is the certificate of a TLS server.
	Certificate

	t    testing.TB
	o    Options
	db   string
	flav flavour
	away atomic.Bool // paused or killed
}

// flavour has the operations that differ between the kinds of servers.
type flavour interface {
	pause() error   // the server hangs: it keeps connections and answers nothing
	resume() error  // ends pause
	kill() error    // ends the server at once, as SIGKILL does
	wipe() error    // deletes the data of a killed server
	restart() error // starts a killed server at its old address
}

// Start starts a Redis for t, or returns the one at the URL in HASP_TEST_REDIS.
func Start(t testing.TB, o *Options) *Server {
	t.Helper()
	if o == nil {
		o = &Options{}
	}
	s := &Server{t: t, o: *o}
	kind, err := choose(os.Getenv(Env), o.own())
	if err != nil {
		t.Fatalf("redistest: %v", err)
	}
	if o.real() && kind == "inprocess" {
		t.Skip("needs a real Redis; this run uses miniredis")
	}
	o.needClock(t)
	switch kind {
	case "process":
		err = s.startProcess()
	case "inprocess":
		err = s.startInProcess()
	default:
		err = s.useURL(kind)
	}
	if err != nil {
		t.Fatalf("redistest: %s: %v", Env, err)
	}
	announce(kind)
	return s
}

// choose returns "process", "inprocess" or a URL.
func choose(asked string, own bool) (string, error) {
	_, missing := exec.LookPath("redis-server")
	switch {
	case asked == "process" && missing != nil:
		return "", fmt.Errorf("%s=process, but there is no redis-server: %w", Env, missing)
	case asked == "process", asked == "inprocess":
		return asked, nil
	case strings.HasPrefix(asked, "redis://") && !own:
		return asked, nil
	case asked == "", asked == "container", strings.HasPrefix(asked, "redis://"):
		if missing == nil {
			return "process", nil
		}
		return "inprocess", nil
	}
	return "", fmt.Errorf("%s=%s: want container, process, inprocess or redis://host:port", Env, asked)
}

var announced sync.Map

// announce prints the kind of server, once for each kind.
func announce(kind string) {
	if _, again := announced.LoadOrStore(kind, true); again {
		return
	}
	text := kind
	switch kind {
	case "process":
		out, _ := exec.Command("redis-server", "--version").Output()
		version, _, _ := strings.Cut(string(out), " sha=")
		text = "a redis-server process (" + version + ")"
	case "inprocess":
		text = "miniredis, in process"
	default:
		if u, err := url.Parse(kind); err == nil {
			text = "the Redis at " + u.Host
		}
	}
	note := ""
	if os.Getenv(Env) == "container" {
		note = "; containers are for internal/acceptance"
	}
	fmt.Fprintf(os.Stderr, "redistest: tests use %s%s\n", text, note)
}

func (s *Server) useURL(raw string) error {
	u, err := url.Parse(raw)
	if err != nil {
		return fmt.Errorf("not a URL")
	}
	s.Addr, s.db = u.Host, strings.Trim(u.Path, "/")
	if u.Port() == "" {
		s.Addr = net.JoinHostPort(u.Hostname(), "6379")
	}
	s.o.User = u.User.Username()
	s.o.Password, _ = u.User.Password()
	s.flav = foreign{s.t}
	return s.ready(startTimeout)
}

// foreign is a running server, which tests may not stop.
type foreign struct{ t testing.TB }

func (f foreign) no() error      { f.t.Skip("needs a server of its own"); return nil }
func (f foreign) pause() error   { return f.no() }
func (f foreign) resume() error  { return f.no() }
func (f foreign) kill() error    { return f.no() }
func (f foreign) wipe() error    { return f.no() }
func (f foreign) restart() error { return f.no() }

// Real reports whether the server is a real Redis.
func (s *Server) Real() bool {
	_, mini := s.flav.(*inProcess)
	return !mini
}

// URL returns the URL of the server for hasp. Params belong to it.
func (s *Server) URL() string {
	user := userinfo(s.o.User, s.o.Password)
	switch {
	case s.o.Unix:
		return "unix://" + user + s.Addr
	case s.o.tls():
		return "rediss://" + user + s.Addr
	}
	return "redis://" + user + s.Addr + "/" + cmp.Or(s.db, "0")
}

func userinfo(user, password string) string {
	if user == "" && password == "" {
		return ""
	}
	return url.UserPassword(user, password).String() + "@"
}

// Params returns the parameters that belong to URL.
func (s *Server) Params() map[string]string { return s.params(&s.o) }

func (c Certificate) params(o *Options) map[string]string {
	p := map[string]string{}
	if o.tls() {
		p["ca"] = c.CAFile
	}
	if o.Mutual {
		p["cert"], p["key"] = c.CertFile, c.KeyFile
	}
	return p
}

// ClientOptions returns options of a go-redis client of the server. Its timeouts
// are longer than any machine needs. The test may change them.
func (s *Server) ClientOptions() *redis.Options {
	o := &redis.Options{Addr: s.Addr, Username: s.o.User, Password: s.o.Password,
		DialTimeout: time.Minute, ReadTimeout: time.Minute, WriteTimeout: time.Minute, PoolTimeout: time.Minute,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}}
	fmt.Sscan(s.db, &o.DB)
	if s.o.tls() {
		config, err := s.config(s.o.Mutual)
		if err != nil {
			s.t.Fatal(err)
		}
		o.TLSConfig = config
	}
	return o
}

// Client returns a client of the server, which ends with the test.
func (s *Server) Client() *redis.Client {
	rdb := redis.NewClient(s.ClientOptions())
	s.t.Cleanup(func() { rdb.Close() })
	return rdb
}

// Proxy returns a fault proxy in front of the server.
func (s *Server) Proxy() *faultproxy.Proxy {
	p, err := faultproxy.Listen(func() (net.Conn, error) { return net.Dial(s.network(), s.Addr) })
	if err != nil {
		s.t.Fatalf("redistest: proxy: %v", err)
	}
	s.t.Cleanup(p.Close)
	return p
}

// Serve returns the address of a server that calls f for each connection, until
// the test ends. f closes the connection.
func Serve(t testing.TB, f func(net.Conn)) (addr string) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go f(c)
		}
	}()
	return ln.Addr().String()
}

// Pause makes the server hang: it keeps its connections and answers nothing.
func (s *Server) Pause() {
	s.t.Helper()
	s.away.Store(true)
	s.must("pause", s.flav.pause())
}

// Resume ends Pause.
func (s *Server) Resume() {
	s.t.Helper()
	s.must("resume", s.flav.resume())
	s.away.Store(false)
}

// Kill ends the server as SIGKILL does.
func (s *Server) Kill() { s.t.Helper(); s.must("kill", s.Stop()) }

// Restart starts a killed server again at its address, without its data
// unless Options.Keep.
func (s *Server) Restart() { s.t.Helper(); s.must("restart", s.Start(true)) }

// Start is Restart, but returns its error, and may be called on any goroutine. If
// data is false, the server has lost its data.
func (s *Server) Start(data bool) error {
	if !data {
		if err := s.flav.wipe(); err != nil {
			return err
		}
	}
	if err := s.flav.restart(); err != nil {
		return err
	}
	err := s.ready(startTimeout)
	s.away.Store(err != nil)
	return err
}

// Stop is Kill, but returns its error, and may be called on any goroutine.
func (s *Server) Stop() error {
	s.away.Store(true)
	return s.flav.kill()
}

func (s *Server) must(what string, err error) {
	s.t.Helper()
	if err != nil {
		s.t.Fatalf("redistest: %s: %v", what, err)
	}
}

const startTimeout = time.Minute

// ready waits until the server answers.
func (s *Server) ready(patience time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for {
		err := s.ping(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s does not answer: %w", s.Addr, err)
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// ping asks the server once. It dials first, because go-redis logs failed dials.
func (s *Server) ping(ctx context.Context) error {
	conn, err := (&net.Dialer{}).DialContext(ctx, s.network(), s.Addr)
	if err != nil {
		return err
	}
	conn.Close()
	rdb := s.patient()
	defer rdb.Close()
	return rdb.Ping(ctx).Err()
}

// Forget makes the server forget all scripts.
func (s *Server) Forget(ctx context.Context) error {
	rdb := s.patient()
	defer rdb.Close()
	return rdb.ScriptFlush(ctx).Err()
}

// Kick makes the server close all connections. With miniredis, p closes the
// connections through it.
func (s *Server) Kick(ctx context.Context, p *faultproxy.Proxy) error {
	if !s.Real() {
		p.Cut()
		return nil
	}
	rdb := s.patient()
	defer rdb.Close()
	return errors.Join(
		rdb.ClientKillByFilter(ctx, "TYPE", "pubsub").Err(),
		rdb.ClientKillByFilter(ctx, "TYPE", "normal", "SKIPME", "yes").Err())
}

// patient returns a client that sends a command once and waits until its context
// ends.
func (s *Server) patient() *redis.Client {
	o := s.ClientOptions()
	o.DialerRetries, o.MaxRetries, o.ContextTimeoutEnabled, o.ReadTimeout = 1, -1, true, -1
	return redis.NewClient(o)
}

func (s *Server) network() string {
	if s.o.Unix {
		return "unix"
	}
	return "tcp"
}
