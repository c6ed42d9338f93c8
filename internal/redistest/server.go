package redistest

import (
	"context"
	"fmt"
	"net"
	"net/url"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// Server is a running Redis. The end of the test stops it.
type Server struct {
	// Addr is host:port, or the path of a socket.
	Addr string

	// Certificate is set if the server uses TLS.
	Certificate

	t    testing.TB
	o    Options
	db   int
	flav flavour     // nil if the server was found by a URL
	away atomic.Bool // paused or killed
}

// flavour controls a server of one kind, such as a process.
type flavour interface {
	pause() error            // makes the server keep its connections and answer nothing
	resume() error           // undoes pause
	kill() error             // ends the server at once, as SIGKILL does
	restart(data bool) error // starts a killed server at its old address, with or without its data
}

// Real reports whether the server is a real Redis.
func (s *Server) Real() bool { _, mini := s.flav.(*inProcess); return !mini }

// URL returns the URL of the server for hasp. hasp also needs the parameters of Params.
func (s *Server) URL() string {
	user := userinfo(s.o.User, s.o.Password)
	switch {
	case s.o.Unix:
		return "unix://" + user + s.Addr
	case s.o.tls():
		return "rediss://" + user + s.Addr
	}
	return fmt.Sprint("redis://", user, s.Addr, "/", s.db)
}

func userinfo(user, password string) string {
	if user == "" && password == "" {
		return ""
	}
	return url.UserPassword(user, password).String() + "@"
}

// Params returns the parameters that hasp needs together with URL.
func (s *Server) Params() map[string]string { return s.params(&s.o) }

// ClientOptions returns options for a go-redis client of the server. The timeouts are long enough
// for any machine. The test may change the options.
func (s *Server) ClientOptions() *redis.Options {
	o := &redis.Options{
		Addr:         s.Addr,
		Username:     s.o.User,
		Password:     s.o.Password,
		DB:           s.db,
		DialTimeout:  time.Minute,
		ReadTimeout:  time.Minute,
		WriteTimeout: time.Minute,
		PoolTimeout:  time.Minute,
		MaintNotificationsConfig: &maintnotifications.Config{
			Mode: maintnotifications.ModeDisabled,
		},
	}

	if s.o.tls() {
		config, err := s.config(s.o.Mutual)
		must(s.t, "client", err)
		o.TLSConfig = config
	}

	return o
}

// Client returns a client of the server. The end of the test closes it.
func (s *Server) Client() *redis.Client {
	rdb := redis.NewClient(s.ClientOptions())
	s.t.Cleanup(func() { rdb.Close() })
	return rdb
}

// Proxy starts a fault proxy in front of the server.
func (s *Server) Proxy() *faultproxy.Proxy {
	p, err := faultproxy.Listen(func() (net.Conn, error) { return net.Dial(s.network(), s.Addr) })
	must(s.t, "proxy", err)
	s.t.Cleanup(p.Close)
	return p
}

func (s *Server) network() string {
	if s.o.Unix {
		return "unix"
	}
	return "tcp"
}

// The method own returns the flavour that controls s. If s was found by a URL, it skips the test.
func (s *Server) own() flavour {
	if s.flav == nil {
		s.t.Skip("needs a server of its own")
	}
	return s.flav
}

// Pause makes the server hang. The server keeps its connections and answers nothing.
func (s *Server) Pause() {
	s.t.Helper()
	s.away.Store(true)
	must(s.t, "pause", s.own().pause())
}

// Resume undoes Pause.
func (s *Server) Resume() {
	s.t.Helper()
	must(s.t, "resume", s.own().resume())
	s.away.Store(false)
}

// Kill ends the server as SIGKILL does.
func (s *Server) Kill() { s.t.Helper(); must(s.t, "kill", s.Stop()) }

// Restart starts a killed server again at the same address. If Options.Keep was not set, its data
// is lost.
func (s *Server) Restart() { s.t.Helper(); must(s.t, "restart", s.Start(true)) }

// Start is like Restart, but returns its error, and any goroutine may call it. If data is false,
// the server has lost its data.
func (s *Server) Start(data bool) error {
	if err := s.own().restart(data); err != nil {
		return err
	}
	err := s.ready()
	s.away.Store(err != nil)
	return err
}

// Stop is like Kill, but returns its error, and any goroutine may call it.
func (s *Server) Stop() error { s.away.Store(true); return s.own().kill() }

// Demoted waits until the server is a replica.
func (s *Server) Demoted() {
	s.t.Helper()
	must(s.t, "demoted", until(func(ctx context.Context) error { return s.is(ctx, "slave") }))
}

// role returns the reply to ROLE. The reply begins with "master" or "slave". For a replica, the
// master's host, its port and the state of the link follow.
func (s *Server) role(ctx context.Context) ([]any, error) {
	parts, err := s.command(ctx, "role").Slice()
	if err == nil && len(parts) < 3 {
		err = fmt.Errorf("short reply to role: %v", parts)
	}
	return parts, err
}

func (s *Server) is(ctx context.Context, role string) error {
	parts, err := s.role(ctx)
	if err == nil && parts[0] != role {
		err = fmt.Errorf("%s is a %v", s.Addr, parts[0])
	}
	return err
}

// inStep returns an error unless the server is a replica that is in step with its master.
func (s *Server) inStep(ctx context.Context) error {
	parts, err := s.role(ctx)
	if err == nil && (parts[0] != "slave" || parts[3] != "connected") {
		err = fmt.Errorf("%s is no replica in step: %v", s.Addr, parts)
	}
	return err
}

func (s *Server) follows(ctx context.Context, master *Server) bool {
	parts, err := s.role(ctx)
	if err != nil || parts[0] != "slave" {
		return false
	}
	return net.JoinHostPort(fmt.Sprint(parts[1]), fmt.Sprint(parts[2])) == master.Addr
}

// The method followed returns an error unless the given number of replicas are in step with s.
func (s *Server) followed(ctx context.Context, replicas int64) error {
	n, err := s.command(ctx, "wait", replicas, 1000).Int64()
	if err == nil && n < replicas {
		err = fmt.Errorf("%s has %d replicas", s.Addr, n)
	}
	return err
}

// ready waits until the server answers.
func (s *Server) ready() error {
	return until(func(ctx context.Context) error { return s.command(ctx, "ping").Err() })
}

// Ready waits until the Redis at addr answers.
func Ready(addr string) error { return (&Server{Addr: addr}).ready() }

// command sends one command on a new connection. Several goroutines may call it at the same time.
func (s *Server) command(ctx context.Context, args ...any) *redis.Cmd {
	cmd := redis.NewCmd(ctx, args...)
	s.process(ctx, cmd)
	return cmd
}

// process sends a command once. It waits for the reply until ctx ends.
func (s *Server) process(ctx context.Context, cmd redis.Cmder) error {
	conn, err := (&net.Dialer{}).DialContext(ctx, s.network(), s.Addr)
	if err != nil { // dial here, because go-redis would log this error
		cmd.SetErr(err)
		return err
	}

	conn.Close()

	o := s.ClientOptions()
	o.DialerRetries = 1
	o.MaxRetries = -1
	o.ContextTimeoutEnabled = true
	o.ReadTimeout = -1
	rdb := redis.NewClient(o)
	defer rdb.Close()
	return rdb.Process(ctx, cmd)
}

// patience is how long a test waits until a server has done what a command says. It is much longer
// than a server needs, because the machine may be busy.
const patience = 3 * time.Minute

// The function until repeats ask while it fails, for the time patience, and returns the last error.
func until(ask func(ctx context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()

	for {
		within, done := context.WithTimeout(ctx, 20*time.Second)
		err := ask(within)
		done()
		if err == nil {
			return nil
		}

		select {
		case <-ctx.Done():
			return err
		case <-time.After(5 * time.Millisecond):
		}
	}
}

func must(t testing.TB, what string, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("redistest: %s: %v", what, err)
	}
}
