package redisstore

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/internal/testcert"
)

func TestMain(m *testing.M) { os.Exit(redistest.Main(m)) }

func open(t *testing.T, node string, params map[string]string) (*Store, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	s, err := Open(ctx, node, params)
	if s != nil {
		t.Cleanup(func() { s.Close() })
	}
	return s, err
}

// opened returns the open Store, or stops the test.
func opened(t *testing.T, node string, params map[string]string) *Store {
	t.Helper()
	s := await.Value(open(t, node, params))
	return s
}

// prepared returns a Store that has not called its server, and its probe.
func prepared(t *testing.T, node string, params map[string]string, connections int) (*Store, func(context.Context) error) {
	t.Helper()
	s, probe, err := Prepare(node, params, connections)
	await.Must(t, err)
	t.Cleanup(func() { s.Close() })
	return s, probe
}

// pings stops the test unless the server answers a command.
func pings(t *testing.T, s *Store) {
	t.Helper()
	if v, err := s.Do(t.Context(), "ping"); v != "PONG" {
		t.Fatalf("ping: got %v, %v", v, err)
	}
}

func TestOpenUsesTheDatabase(t *testing.T) {
	for _, unix := range []bool{false, true} {
		srv := redistest.Start(t, &redistest.Options{Own: true, Unix: unix})
		node, params := strings.TrimSuffix(srv.URL(), "/0")+"/3", map[string]string(nil)
		if unix {
			node, params = srv.URL(), map[string]string{"db": "3"}
		}
		s := opened(t, node, params)
		await.Value(s.Do(t.Context(), "set", "db", "three"))
		other := srv.Client()
		if n := other.Exists(t.Context(), "db").Val(); n != 0 {
			t.Errorf("unix %v: the key is in database 0", unix)
		}
	}
}

// The error for a wrong URL is one line that says what to do. It has no password, and
// comes within the time given.
func TestOpenSaysWhatIsWrong(t *testing.T) {
	t.Parallel()
	const secret = "hunter2"
	plain := redistest.Start(t, &redistest.Options{Own: true})
	locked := redistest.Start(t, &redistest.Options{Password: "other"})
	secure := redistest.Start(t, &redistest.Options{TLS: true})
	ca := map[string]string{"ca": secure.CAFile}
	dir := t.TempDir()
	// These servers answer nothing; all others answer at once.
	silent := map[string]bool{"tls to a plain port": plain.Real(), "hangs": true, "tls hangs": true}
	for _, c := range []struct {
		name, node string
		params     map[string]string
		want       []string
	}{
		{"wrong password", "redis://:" + secret + "@" + locked.Addr, nil, []string{locked.Addr, "WRONGPASS", "check user and password"}},
		{"wrong user", "redis://joe:" + secret + "@" + locked.Addr, nil, []string{locked.Addr, "WRONGPASS", "check user and password"}},
		{"no password", "redis://" + locked.Addr, nil, []string{locked.Addr, "NOAUTH", "user and password"}},
		{"password not wanted", "redis://joe:" + secret + "@" + plain.Addr, nil, []string{plain.Addr, "check user and password"}},
		{"no server listens", "redis://:" + secret + "@" + deadPort, nil, []string{"connection refused", "is Redis running there"}},
		{"no such socket", "unix://" + dir + "/no.sock", nil, []string{dir + "/no.sock", "no such socket", "is Redis running"}},
		{"no such database", "redis://" + plain.Addr + "/999", nil, []string{plain.Addr, "number of the database"}},
		{"tls to a plain port", "rediss://:" + secret + "@" + plain.Addr, ca, []string{plain.Addr, "TLS", "redis://"}},
		{"plain to a tls port", "redis://:" + secret + "@" + secure.Addr, nil, []string{secure.Addr, "rediss://"}},
		{"unknown authority", "rediss://:" + secret + "@" + secure.Addr, nil, []string{secure.Addr, "certificate", "?ca="}},
		{"wrong name", "rediss://:" + secret + "@" + secure.Addr, map[string]string{"ca": secure.CAFile, "server_name": "example.org"}, []string{"example.org", "?server_name="}},
		{"hangs", "redis://:" + secret + "@" + redistest.Serve(t, hang), nil, []string{"no answer within", "check host and port"}},
		{"hangs up", "redis://:" + secret + "@" + redistest.Serve(t, func(c net.Conn) { c.Close() }), nil, []string{"closed the connection", "rediss://"}},
		{"tls hangs", "rediss://:" + secret + "@" + redistest.Serve(t, hang), nil, []string{"TLS handshake", "does this port speak TLS"}},
		{"not a redis", "redis://:" + secret + "@" + redistest.Serve(t, func(c net.Conn) { io.WriteString(c, "HTTP/1.1 400 Bad Request\r\n\r\n") }), nil, []string{"is that a Redis"}},
		{"repeats what it got", "redis://:" + secret + "@" + redistest.Serve(t, parrot("-ERR unknown command 'x', with args beginning with: ")), nil, []string{"unknown command"}},
		{"repeats what it got in its own way", "redis://:" + secret + "@" + redistest.Serve(t, parrot("-ERR what do you mean by ")), nil, []string{"what do you mean", "***"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			if c.name == "no such database" && !plain.Real() {
				t.Skip("miniredis has every database")
			}
			within := 10 * soon
			if silent[c.name] {
				within = 5 * time.Second
			}
			ctx, cancel := context.WithTimeout(t.Context(), within)
			defer cancel()
			began := time.Now()
			s, err := Open(ctx, c.node, c.params)
			took := time.Since(began)
			if err == nil {
				s.Close()
				t.Fatal("no error")
			}
			wantsOutage(t, err, secret, c.want...)
			if took > soon {
				t.Errorf("took %v", took)
			}
		})
	}
}

// wantsOutage fails the test unless err is an outage whose text is one short line with
// all of want, and shows no secret.
func wantsOutage(t *testing.T, err error, secret string, want ...string) {
	t.Helper()
	t.Log(err)
	for _, text := range want {
		if !strings.Contains(err.Error(), text) {
			t.Errorf("%q does not say %q", err, text)
		}
	}
	for e := err; e != nil; e = errors.Unwrap(e) {
		if strings.Contains(fmt.Sprintf("%v %+v", e, e), secret) {
			t.Errorf("%q shows the password", e)
		}
	}
	if strings.Contains(err.Error(), "\n") || len(err.Error()) > 250 {
		t.Errorf("%q is not one short line", err)
	}
	if errors.Is(err, backend.ErrHeld) || errors.Is(err, backend.ErrInvalid) || errors.Is(err, backend.ErrLost) {
		t.Errorf("%q is not an outage", err)
	}
}

// A user who presses Ctrl-C does not wait for a server that hangs.
func TestOpenEndsWhenCancelled(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	addr := redistest.Serve(t, func(c net.Conn) {
		c.Read(make([]byte, 100))
		cancel()
		select {}
	})
	returns(t, "Open", func() {
		if _, err := Open(ctx, "redis://"+addr, nil); !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
	})
}

// A server that comes back is found at once, however often dials to it have failed.
func TestServerThatComesBackIsFoundAtOnce(t *testing.T) {
	for _, wires := range []bool{false, true} {
		srv := redistest.Start(t, &redistest.Options{Own: true})
		s := opened(t, srv.URL(), nil)
		_ = wires
		pings(t, s)
		srv.Kill()
		for range 100 {
			if _, err := s.Do(t.Context(), "ping"); err == nil {
				t.Fatal("a dead server answers")
			}
		}
		srv.Restart()
		pings(t, s)
	}
}

func TestOpenRefusesBadFiles(t *testing.T) {
	file := filepath.Join(t.TempDir(), "empty.pem")
	await.Must(t, os.WriteFile(file, bytes.Repeat([]byte{'x'}, 10), 0o600))
	for _, params := range []map[string]string{
		{"ca": file}, {"ca": file + ".not"}, {"cert": file, "key": file}, {"cert": file},
	} {
		if _, err := open(t, "rediss://localhost:1", params); !errors.Is(err, backend.ErrInvalid) {
			t.Errorf("%v: got %v, want ErrInvalid", params, err)
		}
	}
}

// A new connection uses the certificates that the files contain at that time. While a file is
// missing or half-written, there is an outage, and the error names the file.
func TestCertificatesAreReadForEachConnection(t *testing.T) {
	t.Parallel()
	srv := redistest.Start(t, &redistest.Options{Own: true, Real: true, Mutual: true})
	s := opened(t, srv.URL(), srv.Params())
	restart := func() {
		srv.Kill()
		srv.Restart()
	}

	_, _, err := testcert.Write(filepath.Dir(srv.CertFile), "localhost")
	await.Must(t, err)
	restart()
	pings(t, s)

	restart()
	cert := await.Value(os.ReadFile(srv.CertFile))
	await.Must(t, os.WriteFile(srv.CertFile, cert[:len(cert)/2], 0o600))
	_, err = s.Do(t.Context(), "ping")
	wantsOutage(t, err, "hunter2", "parameter ca: "+srv.CAFile)

	await.Must(t, os.WriteFile(srv.CertFile, cert, 0o600))
	await.Must(t, os.Rename(srv.KeyFile, srv.KeyFile+".old"))
	_, err = s.Do(t.Context(), "ping")
	wantsOutage(t, err, "hunter2", "key="+srv.KeyFile, "no such file")

	await.Must(t, os.Rename(srv.KeyFile+".old", srv.KeyFile))
	pings(t, s)
}

// hang reads everything and answers nothing.
func hang(c net.Conn) { io.Copy(io.Discard, c) }

// command reads the rest of a command, of which in has just read the first line.
func command(in *bufio.Scanner) string {
	var n int
	fmt.Sscanf(in.Text(), "*%d", &n)
	var args []string
	for range n {
		in.Scan() // the length
		in.Scan()
		args = append(args, in.Text())
	}
	return strings.Join(args, " ")
}

// parrot answers each command with an error that repeats all of it, as some proxies do.
func parrot(prefix string) func(net.Conn) {
	return func(c net.Conn) {
		in := bufio.NewScanner(c)
		for in.Scan() {
			fmt.Fprintf(c, "%s%s\r\n", prefix, command(in))
		}
	}
}

// A server that does not know AUTH repeats its arguments, and cuts them. No error has the
// part of the password that is left.
func TestErrorsHaveNoPartOfALongPassword(t *testing.T) {
	t.Parallel()
	srv := redistest.Start(t, &redistest.Options{Own: true, Real: true, Args: []string{"--rename-command", "AUTH", "", "--rename-command", "HELLO", ""}})
	secret := strings.Repeat("0123456789abcdef", 16)
	node := "redis://:" + secret + "@" + srv.Addr
	_, err := open(t, node, nil)
	wantsOutage(t, err, secret[:8], "unknown command")
	s, _ := prepared(t, node, nil, 0)
	_, err = s.Do(t.Context(), "get", "k")
	wantsOutage(t, err, secret[:8], "unknown command")
}

// deadPort is an address where no server listens. Port 1 belongs to tcpmux, and the
// kernel gives it to no socket by chance.
const deadPort = "127.0.0.1:1"

// A Store that uses a client of the caller refuses what Open refuses.
func TestNewRefuses(t *testing.T) {
	newDriver := func(*Store, *int) (backend.Driver, error) { return nil, nil }
	for name, rdb := range map[string]redis.UniversalClient{
		"nil": nil, "nil Client": (*redis.Client)(nil), "nil ClusterClient": (*redis.ClusterClient)(nil),
		"Ring": &redis.Ring{},
	} {
		if _, err := NewDriver("strategy", rdb, nil, newDriver); !errors.Is(err, backend.ErrInvalid) {
			t.Errorf("%s: got %v", name, err)
		}
	}

	evicts := redistest.Start(t, &redistest.Options{Args: []string{"--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"}})
	alone := redistest.Start(t, &redistest.Options{Args: []string{"--cluster-enabled", "yes"}})
	await.Must(t, alone.Client().ClusterAddSlotsRange(t.Context(), 0, 16383).Err())
	s := New(alone.Client())
	until(t, "the cluster is up", func() bool { _, err := s.Do(t.Context(), "set", "k", "v"); return err == nil }) // it has one master

	s = New(evicts.Client())
	for what, call := range map[string]func() error{
		"Do": func() error { _, err := s.Do(t.Context(), "set", "k", "v"); return err },
		"RunEach": func() (err error) {
			s.RunEach(t.Context(), counting, []Call{{[]string{"k"}, []string{"1"}}}, func(_ int, _ any, e error) { err = e })
			return err
		},
		"DoAll": func() error { return s.DoAll(t.Context(), []string{"set", "k", "v"})[0].Err },
	} {
		if err := call(); err == nil || !strings.Contains(err.Error(), "allkeys-lru") {
			t.Errorf("%s: got %v", what, err)
		}
	}
	if n := evicts.Client().Exists(t.Context(), "k").Val(); n != 0 {
		t.Error("a command was sent")
	}

	// A user may have no right to INFO and to CLUSTER.
	await.Must(t, evicts.Client().Do(t.Context(), "acl", "setuser", "ann", "on", ">secret", "~*", "+@all", "-info", "-cluster").Err())
	o := evicts.ClientOptions()
	o.Username, o.Password = "ann", "secret"
	rdb := redis.NewClient(o)
	defer rdb.Close()
	s = New(rdb)
	await.Value(s.Do(t.Context(), "set", "k", "v"))
}
