package redisstore

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redisstore/resp"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/internal/testcert"
)

func TestOpenUsesTheDatabase(t *testing.T) {
	for name, o := range map[string]*redistest.Options{"tcp": {Own: true}, "unix": {Unix: true}} {
		srv := redistest.Start(t, o)
		node, params := strings.Replace(srv.URL(), "/0", "/3", 1), map[string]string(nil)
		if o.Unix {
			params = map[string]string{"db": "3"}
		}
		await.Value(opened(t, node, params).Do(t.Context(), "set", "db", "three"))
		if n := srv.Client().Exists(t.Context(), "db").Val(); n != 0 {
			t.Errorf("%s: the key is in database 0", name)
		}
	}
}

// wrongURL is a URL that cannot be opened, and the texts of its error; see wantsText.
type wrongURL struct{ url, want string }

// openSays opens each URL. The error must be an outage with the wanted texts, and come within the
// time given. In both texts, $name stands for the value of name in the map of values.
func openSays(t *testing.T, values map[string]string, wrong []wrongURL) {
	value := func(name string) string { return values[name] }
	for _, c := range wrong {
		t.Run(c.url, func(t *testing.T) {
			t.Parallel()
			within := 10 * soon
			if strings.Contains(c.url, "$hangs") { // all other servers answer at once
				within = 5 * time.Second
			}
			ctx := await.Timeout(t, within)
			node, params := withParams(os.Expand(c.url, value))
			returns(t, "Open", func() {
				s, err := Open(ctx, node, params)
				if err == nil {
					s.Close()
				}
				wantsOutage(t, err, os.Expand(c.want, value))
			})
		})
	}
}

func TestOpenSaysWhatIsWrong(t *testing.T) {
	t.Parallel()
	plain := redistest.Start(t, redistest.Own)
	secure := redistest.Start(t, &redistest.Options{TLS: true})
	values := map[string]string{
		"plain":  plain.Addr,
		"locked": redistest.Start(t, &redistest.Options{Password: "other"}).Addr,
		"secure": secure.Addr,
		"ca":     secure.CAFile,
		"dead":   deadPort,
		"dir":    t.TempDir(),
		"hangs":  redistest.Serve(t, hang),
		"closes": redistest.Serve(t, func(c net.Conn) { c.Close() }),
		"page":   redistest.Serve(t, page),
		"cut":    redistest.Serve(t, parrot("-ERR unknown command 'x', with args: ")),
		"parrot": redistest.Serve(t, parrot("-ERR what do you mean by ")),
		"long":   strings.Repeat(secret, 40),
	}
	wrong := []wrongURL{
		{"redis://:hunter2@$locked", "$locked: WRONGPASS … check user and password"},
		{"redis://joe:hunter2@$locked", "$locked: WRONGPASS … check user and password"},
		{"redis://$locked", "$locked: NOAUTH … user and password"},
		{"redis://joe:hunter2@$plain", "$plain: … check user and password"},
		{"redis://:hunter2@$dead", "connection refused … is Redis running there"},
		{"unix://$dir/no.sock", "$dir/no.sock: no such socket … is Redis running"},

		{"redis://:hunter2@$secure", "$secure: … rediss://"},
		{"rediss://:hunter2@$page?ca=$ca",
			"$page: TLS handshake … does this port speak TLS … redis://"},
		{"rediss://:hunter2@$hangs", "TLS handshake … no answer within … does this port speak TLS"},
		{"rediss://:hunter2@$secure", "$secure: TLS handshake … certificate … ?ca="},
		{"rediss://$secure?server_name=x.org&ca=$ca",
			"$secure: TLS handshake … x.org … ?server_name="},

		{"redis://:hunter2@$hangs", "no answer within … check host and port"},
		{"redis://:hunter2@$closes", "closed the connection … rediss://"},
		{"redis://:hunter2@$page", "is that a Redis"},
		{"redis://:hunter2@$cut", "unknown command"},
		{"redis://:longpasshunter2@$parrot", "what do you mean … ***"},
		{"redis://:$long@$cut", "unknown command"},
	}
	if plain.Real() { // miniredis has every database
		wrong = append(wrong, wrongURL{"redis://$plain/999", "$plain: … number of the database"})
	}
	openSays(t, values, wrong)
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

// A server may be down when its URL is parsed, and up when it is used. It is then found at once,
// however often dials to it have failed.
func TestServerThatComesBackIsFoundAtOnce(t *testing.T) {
	t.Parallel()
	srv := redistest.Start(t, &redistest.Options{Password: secret})
	srv.Kill()
	s, probe := prepared(t, srv.URL())
	wantsOutage(t, probe(t.Context()), s.Name())
	for range 100 {
		if _, err := s.Do(t.Context(), "ping"); err == nil {
			t.Fatal("a dead server answers")
		}
	}
	srv.Restart()
	pings(t, s)
	await.Must(t, probe(t.Context()))
}

// A new connection uses the certificates that the files contain at that time. While a file is
// missing or half-written, there is an outage, and the error names the file.
func TestCertificatesAreReadForEachConnection(t *testing.T) {
	t.Parallel()
	srv := redistest.Start(t, &redistest.Options{Real: true, Mutual: true})
	s := opened(t, srv.URL(), srv.Params())
	restart := func() {
		srv.Kill()
		srv.Restart()
	}
	fails := func(want string) {
		t.Helper()
		_, err := s.Do(t.Context(), "ping")
		wantsOutage(t, err, want)
		if !resp.IsUnsent(err) {
			t.Errorf("%v: may have been sent", err)
		}
	}

	_, _, err := testcert.Write(filepath.Dir(srv.CertFile), "localhost")
	await.Must(t, err)
	restart()
	pings(t, s)

	restart()
	cert := await.Value(os.ReadFile(srv.CertFile))
	await.Must(t, os.WriteFile(srv.CertFile, cert[:len(cert)/2], 0o600))
	fails("parameter ca: " + srv.CAFile)

	await.Must(t, os.WriteFile(srv.CertFile, cert, 0o600))
	await.Must(t, os.Rename(srv.KeyFile, srv.KeyFile+".old"))
	fails("key=" + srv.KeyFile + " … no such file")

	await.Must(t, os.Rename(srv.KeyFile+".old", srv.KeyFile))
	pings(t, s)
}

func TestAFailedHandshakeLeavesNoConnection(t *testing.T) {
	var left atomic.Int64
	addr := redistest.Serve(t, func(c net.Conn) {
		left.Add(1)
		page(c)
		hang(c) // until the client closes the connection
		left.Add(-1)
	})
	_, err := open(t, "rediss://"+addr, nil)
	wantsOutage(t, err, "TLS handshake")
	until(t, "the end of all connections", func() bool { return left.Load() == 0 })
}

// hang reads everything and answers nothing.
func hang(c net.Conn) { io.Copy(io.Discard, c) }

// page answers as a server of web pages does.
func page(c net.Conn) { io.WriteString(c, "HTTP/1.1 400 Bad Request\r\n\r\n") }

// parrot answers each command with an error that repeats it, as some proxies do. Redis does so for
// an unknown command, such as AUTH if it was renamed. Redis cuts the arguments, so only a part of a
// password may be left.
func parrot(prefix string) func(net.Conn) {
	return func(c net.Conn) {
		buf := make([]byte, 4096)
		for {
			n, err := c.Read(buf)
			if err != nil {
				return
			}
			words := strings.Join(strings.Fields(string(buf[:n])), " ")
			fmt.Fprintf(c, "%s%.128s\r\n", prefix, words)
		}
	}
}

func TestNewRefusesClients(t *testing.T) {
	newDriver := func(*Store, *int) (backend.Driver, error) { return nil, nil }
	for name, rdb := range map[string]redis.UniversalClient{
		"nil": nil, "nil Client": (*redis.Client)(nil),
		"nil ClusterClient": (*redis.ClusterClient)(nil),
		"Ring":              &redis.Ring{},
	} {
		_, err := NewDriver("strategy", rdb, nil, newDriver)
		if !errors.Is(err, backend.ErrInvalid) {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

// A Store that uses a client of the caller refuses the servers that Open refuses.
func TestNewRefusesServers(t *testing.T) {
	// A client of one server can use a cluster of one master.
	alone := redistest.Start(t, &redistest.Options{Args: []string{"--cluster-enabled", "yes"}})
	await.Must(t, alone.Client().ClusterAddSlotsRange(t.Context(), 0, 16383).Err())
	expect(t, New(alone.Client()), "the cluster is up", "OK", "set", "k", "v")

	evicts := redistest.Start(t, &redistest.Options{Args: []string{
		"--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru",
	}})
	rdb := evicts.Client()
	for _, way := range ways {
		err := way.add(t.Context(), New(rdb), "k").Err
		wantsText(t, err, evicts.Addr+": it may evict … allkeys-lru")
	}
	if n := rdb.Exists(t.Context(), "k").Val(); n != 0 {
		t.Error("a command was sent")
	}

	// A user may have no right to INFO and to CLUSTER.
	rules := strings.Fields("acl setuser default -info -cluster")
	await.Must(t, rdb.Do(t.Context(), rules[0], rules[1], rules[2], rules[3], rules[4]).Err())
	late := New(rdb)
	await.Value(late.Do(t.Context(), "set", "k", "v"))

	// What a server refuses later has a hint as well.
	await.Must(t, rdb.Do(t.Context(), "acl", "setuser", "default", "resetkeys").Err())
	_, err := late.Do(t.Context(), "set", "k", "v")
	wantsOutage(t, err, "NOPERM … (grant the user ~PREFIX")
	rdb.Close()
	_, err = late.Do(t.Context(), "set", "k", "v")
	wantsOutage(t, err, "your program closed its Redis client")
}

// A replica is refused at the first call. A server that becomes a replica later refuses writes.
func TestReplicasAreRefusedWithAHint(t *testing.T) {
	srv := redistest.Start(t, redistest.Real)
	rdb := srv.Client()
	late := New(rdb)
	pings(t, late)
	await.Must(t, rdb.ReplicaOf(t.Context(), "127.0.0.1", "1").Err())
	for want, s := range map[string]*Store{
		": it is a replica of " + deadPort + " … name the master": New(rdb),
		": READONLY … name the master":                            late,
	} {
		_, err := s.Do(t.Context(), "set", "k", "v")
		wantsOutage(t, err, srv.Addr+want)
	}
}
