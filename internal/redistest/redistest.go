// Package redistest starts Redis servers for tests.
//
// HASP_TEST_REDIS selects the kind:
//
//	process       redis-server, a new process for each Start
//	inprocess     miniredis, in the process of the test
//	redis://…     a running server; tests write keys of their own into it
//	container     as if unset, but the tests of internal/acceptance use containers
//
// Without HASP_TEST_REDIS, tests use redis-server if installed, and otherwise miniredis. If the
// selected kind is not available, the test fails. The first Start of a test binary prints the kind.
//
// HASP_TEST_REDIS_SERVER is the path of the server program, such as a newer Redis or a Valkey. The
// default is redis-server.
package redistest

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/redis/go-redis/v9"
)

// Env is the environment variable that selects the Redis of the tests.
const Env = "HASP_TEST_REDIS"

// ServerEnv is the environment variable that names the server program of the tests.
const ServerEnv = "HASP_TEST_REDIS_SERVER"

func program() string { return cmp.Or(os.Getenv(ServerEnv), "redis-server") }

// Options describe the server that a test needs. Nil means a server without special options.
type Options struct {
	// Own means that no other test uses the server. Therefore the test can stop, kill or flush it.
	// Every other option implies Own.
	Own bool

	// Real means a real Redis. With miniredis the test is skipped.
	Real bool

	// Args are further arguments of redis-server. They imply Real.
	Args []string

	// User and Password are the credentials of clients. If User is empty, Password is the password
	// of the default user.
	User, Password string

	// TLS makes the server use TLS, with a certificate for 127.0.0.1 and localhost. Clients verify
	// the certificate with CAFile.
	TLS bool

	// Mutual makes the server use TLS and demand a certificate of clients, such as CertFile with
	// KeyFile.
	Mutual bool

	// Unix makes the server listen on a socket in the file system.
	Unix bool

	// Keep makes the server write every command to a file before it answers, so that the
	// data survives Kill and Restart.
	Keep bool

	// SentinelUser and SentinelPassword are the credentials for the sentinels of StartSentinel.
	SentinelUser, SentinelPassword string

	// Bare makes StartCluster start a cluster without replicas.
	Bare bool
}

// Own and Real are Options that many tests use. Each sets the field of the same name.
var (
	Own  = &Options{Own: true}
	Real = &Options{Real: true}
)

func (o *Options) own() bool {
	credentials := o.User != "" || o.Password != ""
	special := o.real() || o.tls() || credentials
	return o.Own || special || o.Unix || o.Keep
}

func (o *Options) tls() bool { return o.TLS || o.Mutual }

func (o *Options) real() bool { return o.Real || len(o.Args) > 0 }

// Start starts a Redis for t. If HASP_TEST_REDIS is a URL, it returns the server at that URL.
func Start(t testing.TB, o *Options) *Server {
	t.Helper()
	if o == nil {
		o = &Options{}
	}

	s := &Server{t: t, o: *o}
	kind, err := choose(os.Getenv(Env), o.own())
	must(t, "start", err)
	if o.real() && kind == "inprocess" {
		t.Skip("needs a real Redis; this run uses miniredis")
	}

	switch kind {
	case "process":
		err = s.startProcess()
	case "inprocess":
		err = s.startInProcess()
	default:
		err = s.useURL(kind)
	}

	must(t, Env, err)
	announce(kind)
	return s
}

// choose returns which kind of server to use: "process", "inprocess" or a URL.
func choose(asked string, own bool) (string, error) {
	_, missing := exec.LookPath(program())
	switch {
	case asked == "process" && missing != nil:
		return "", fmt.Errorf("%s=process, but there is no %s: %w", Env, program(), missing)
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

	return "", fmt.Errorf("%s=%s: want container, process, inprocess or redis://host:port", Env,
		asked)
}

// version returns the version of the installed server, such as "Redis server v=7.0.15".
func version() string {
	out, _ := exec.Command(program(), "--version").Output()
	version, _, _ := strings.Cut(string(out), " sha=")
	return version
}

var announced sync.Map

func announce(kind string) {
	if _, again := announced.LoadOrStore(kind, true); again {
		return
	}

	text := "miniredis, in process"
	if kind == "process" {
		text = "a redis-server process (" + version() + ")"
	} else if o, err := redis.ParseURL(kind); err == nil {
		text = "the Redis at " + o.Addr
	}

	if os.Getenv(Env) == "container" {
		text += "; containers are for internal/acceptance"
	}

	fmt.Fprintf(os.Stderr, "redistest: tests use %s\n", text)
}

func (s *Server) useURL(raw string) error {
	o, err := redis.ParseURL(raw)
	if err != nil {
		return errors.New("not a URL of a Redis") // leave out err, which may contain the password
	}
	s.Addr = o.Addr
	s.db = o.DB
	s.o.User = o.Username
	s.o.Password = o.Password
	return s.ready()
}

// Serve starts a server that calls f for each connection, until the test ends. f must close the
// connection.
func Serve(t testing.TB, f func(net.Conn)) (addr string) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, "serve", err)
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

// atATime is the minimum number of parallel tests that Main runs at the same time.
const atATime = 8

// Main runs the tests of m and returns the exit code. Parallel tests against a Redis mostly sleep,
// so Main runs more of them at the same time than there are processors. A flag on the command line
// takes precedence.
//
// Main makes garbage collection rarer, because miniredis makes a Lua state for each run of a
// script. A test with virtual servers had spent half of its time in garbage collection.
func Main(m *testing.M) int {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(800)
	}

	flag.Parse()
	given := false
	flag.Visit(func(f *flag.Flag) {
		given = given || f.Name == "test.parallel" || f.Name == "test.fuzz"
	})

	if !given && runtime.GOMAXPROCS(0) < atATime {
		if err := flag.Set("test.parallel", fmt.Sprint(atATime)); err != nil {
			panic(err)
		}
	}

	return m.Run()
}

// Lab is a testing.TB for programs that start servers outside of a test.
type Lab struct {
	testing.TB // nil, because this package calls only the methods below

	mu       sync.Mutex // guards cleanups
	cleanups []func()
}

type labError struct{ error }

func (l *Lab) Helper()                   {}
func (l *Lab) Fatal(args ...any)         { l.Check(errors.New(fmt.Sprint(args...))) }
func (l *Lab) Fatalf(f string, a ...any) { l.Check(fmt.Errorf(f, a...)) }
func (l *Lab) Skip(args ...any)          { l.Fatal(args...) }

// Cleanup makes Close call f. Several goroutines may call Cleanup at the same time.
func (l *Lab) Cleanup(f func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cleanups = append(l.cleanups, f)
}

// If err is not nil, Check ends the enclosing call of Do, which returns err.
func (l *Lab) Check(err error) {
	if err != nil {
		panic(labError{err})
	}
}

// Close calls the functions that were passed to Cleanup, the last one first. This ends all servers.
func (l *Lab) Close() {
	all := l.cleanups
	l.cleanups = nil
	for _, f := range slices.Backward(all) {
		f()
	}
}

// Do runs f and returns its error. If f or a function of this package that f calls fails by Check,
// Fatal or Skip, f ends there, and Do returns that error.
func (l *Lab) Do(f func() error) (err error) {
	defer func() {
		switch r := recover().(type) {
		case nil:
		case labError:
			err = r.error
		default:
			panic(r)
		}
	}()

	return f()
}
