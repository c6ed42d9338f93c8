// Package redistest is a Redis for tests.
//
// HASP_TEST_REDIS says which:
//
//	process       a redis-server of this machine, one for each Start
//	inprocess     miniredis, in the test's own process
//	redis://…     one that runs already; tests write keys of their own into it
//	container     as if unset; the tests of internal/acceptance use containers
//
// Unset means a process if redis-server is installed, and else miniredis. What
// was asked for and is not there fails the test. The first Start of a test
// binary prints which it is.
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

// Env is the environment variable that says which Redis the tests use.
const Env = "HASP_TEST_REDIS"

// Options say what a test needs. Nil is a plain server.
type Options struct {
	// Own is a server that no other test uses: one to be stopped, killed or
	// flushed. The other options imply it.
	Own bool

	// Real is a real Redis, not miniredis; the test is skipped in process.
	Real bool

	// Args are further arguments of redis-server. They imply Real.
	Args []string

	// User and Password are what a client must give. Without a User it is
	// the password of the default user.
	User, Password string

	// TLS has the server speak TLS with a certificate for 127.0.0.1 and
	// localhost that CAFile vouches for.
	TLS bool

	// Mutual is TLS where the server wants a certificate of its clients, too;
	// CertFile and KeyFile will do.
	Mutual bool

	// Unix has the server listen on a socket in the file system.
	Unix bool

	// Keep has the server write down what it is told, at once, so that the
	// data survives Kill and Restart.
	Keep bool

	// Clock is a real Redis with a wall clock that Skew sets; the test is
	// skipped where there is none. See [ClocksCanJump].
	Clock bool

	// SentinelUser and SentinelPassword are what the sentinels of
	// StartSentinel want to hear.
	SentinelUser, SentinelPassword string

	// Bare is a cluster without replicas, for StartCluster.
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

	// Certificate is that of a TLS server.
	Certificate

	t    testing.TB
	o    Options
	db   string
	flav flavour
	away atomic.Bool // paused or killed
}

// flavour is what the kinds of server do in their own way.
type flavour interface {
	pause() error   // the server hangs: connections stay, nothing is answered
	resume() error  // and goes on
	kill() error    // the server dies at once, as by SIGKILL
	wipe() error    // what a killed server wrote down is gone
	restart() error // a killed server starts again where it was
}

// Start starts a Redis for t, or names the one that HASP_TEST_REDIS gives.
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

// announce prints once for each kind what the tests use.
func announce(kind string) {
	if _, again := announced.LoadOrStore(kind, true); again {
		return
	}
	what := kind
	switch kind {
	case "process":
		out, _ := exec.Command("redis-server", "--version").Output()
		version, _, _ := strings.Cut(string(out), " sha=")
		what = "a redis-server process (" + version + ")"
	case "inprocess":
		what = "miniredis, in process"
	default:
		if u, err := url.Parse(kind); err == nil {
			what = "the Redis at " + u.Host
		}
	}
	note := ""
	if os.Getenv(Env) == "container" {
		note = "; containers are for internal/acceptance"
	}
	fmt.Fprintf(os.Stderr, "redistest: tests use %s%s\n", what, note)
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

// foreign is a server that is not ours to stop.
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

// URL is how hasp is told of the server, with Params.
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

// Params are the parameters that go with URL.
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

// ClientOptions are those of a go-redis client of the server, which has more
// patience than any machine needs; the test may change them.
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

// Proxy returns a way to the server that can be made to fail.
func (s *Server) Proxy() *faultproxy.Proxy {
	p, err := faultproxy.Listen(func() (net.Conn, error) { return net.Dial(s.network(), s.Addr) })
	if err != nil {
		s.t.Fatalf("redistest: proxy: %v", err)
	}
	s.t.Cleanup(p.Close)
	return p
}

// Serve is the address of a server that is no Redis, until the test ends. Each
// of its connections is f's, to close, too.
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

// Pause has the server hang: it keeps its connections and answers nothing.
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

// Start is Restart as a function that returns its error, and may be called on
// any goroutine. Without data the server has lost what it kept.
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

// Stop is Kill as a function that returns its error, and may be called on any
// goroutine.
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

// ping asks the server once. It looks first whether anybody listens, since
// go-redis logs what it cannot dial.
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

// Forget has the server drop all scripts.
func (s *Server) Forget(ctx context.Context) error {
	rdb := s.patient()
	defer rdb.Close()
	return rdb.ScriptFlush(ctx).Err()
}

// Kick ends all connections to the server, from its side. In a process of the
// tests, p ends those through it.
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

// patient returns a client that asks once and waits as long as its context.
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
