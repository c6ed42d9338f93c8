package etcdlock_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/etcdlock"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/etcdtest"
	"github.com/hasplock/hasp/internal/testcert"
)

// refused opens a URL, and an etcd:// URL by New as well. It checks that the error is one line with
// the words, and without the password. invalid says whether it must be ErrInvalid.
func refused(t *testing.T, at string, invalid bool, words ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c, err := hasp.Open(ctx, "etcdlock+"+at, &hasp.Options{Timeout: 20 * time.Second})
	isRefusal(t, at, c, err, invalid, words...)
	if u, e := url.Parse(at); e == nil && u.Scheme == "etcd" {
		conf := clientv3.Config{Endpoints: strings.Split(u.Host, ","), Username: u.User.Username()}
		conf.Password, _ = u.User.Password()
		c, err := etcdlock.New(conf, nil)
		isRefusal(t, "New of "+at, c, err, invalid, words...)
	}
}

// isRefusal checks the results of Open or New.
func isRefusal(t *testing.T, url string, c *hasp.Client, err error, invalid bool, words ...string) {
	t.Helper()
	if err == nil {
		c.Close()
		t.Errorf("%s: opened", url)
		return
	}
	t.Log(err)
	if got := errors.Is(err, hasp.ErrInvalid); got != invalid {
		t.Errorf("%s: %v: ErrInvalid %t, want %t", url, err, got, invalid)
	}
	for _, word := range words {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("%s: %q, want %q in it", url, err, word)
		}
	}
	if strings.Contains(err.Error(), "hunter2") || strings.Contains(err.Error(), "\n") || len(err.Error()) > 300 {
		t.Errorf("%s: the error has a password, or is long: %q", url, err)
	}
}

// listen returns a listener that ends with the test.
func listen(t *testing.T) net.Listener {
	t.Helper()
	l := await.Value(net.Listen("tcp", "127.0.0.1:0"))
	t.Cleanup(func() { l.Close() })
	return l
}

// serve calls f for each connection to the address that it returns, and closes the connection.
func serve(t *testing.T, f func(conn net.Conn)) (addr string) {
	l := listen(t)
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			f(conn)
			conn.Close()
		}
	}()
	return l.Addr().String()
}

func TestBadURL(t *testing.T) {
	for url, words := range map[string][]string{
		"redis://joe:hunter2@h":             {"etcd://"},
		"etcd://":                           {"host"},
		"etcd://joe:hunter2@":               {"host"},
		"etcd://joe@h":                      {"password"},
		"etcd://joe:hunter2%@h":             {"%25"},
		"etcd://joe:hunter2@h:port":         {"port"},
		"etcd://joe:hunter2@h:0":            {"port"},
		"etcd://h,,g":                       {"empty host"},
		"etcd://h/x":                        {"after the hosts"},
		"etcd://joe:hunter2@h?window=soon":  {"window", "5s"},
		"etcd://joe:hunter2@h?window=1s":    {"window", "2s"},
		"etcd://joe:hunter2@h?lease=3s":     {"lease", "window"},
		"etcd://h?ca=/nowhere":              {"ca", "etcds://"},
		"etcds://h?ca=/nowhere":             {"ca", "no such file"},
		"etcds://h?cert=/nowhere":           {"cert"},
		"etcd://joe:hunter2@h?ttl=90000h&x": {"unknown"},
	} {
		c, err := hasp.Open(t.Context(), "etcdlock+"+url, nil)
		isRefusal(t, url, c, err, true, words...)
	}
}

func TestNobodyThere(t *testing.T) {
	t.Parallel()
	addr := "127.0.0.1:1" // port 1 belongs to tcpmux, and the kernel gives it to no socket by chance
	refused(t, "etcd://joe:hunter2@"+addr, false, addr, "connection refused")
	refused(t, "etcd://no-such-host.invalid:2379", false, "no-such-host.invalid:2379", "lookup")

	// This port accepts connections, and says nothing.
	l := listen(t)
	refused(t, "etcd://joe:hunter2@"+l.Addr().String(), false, l.Addr().String())

	// A server without TLS whose answer is lost: the rest of the client's hello reaches a closed
	// connection.
	addr = serve(t, func(conn net.Conn) {
		conn.Read(make([]byte, 1))
		conn.(*net.TCPConn).SetLinger(0) // Close sends a reset
	})
	refused(t, "etcds://"+addr, false, "reset by peer", "etcd://")
}

// A grpc-proxy of etcd is refused: it delays keep-alives, so leases would be lost.
func TestProxy(t *testing.T) {
	t.Parallel()
	at := startOne(t)
	l := listen(t)
	l.Close()
	proxy := exec.Command(etcdtest.Binary(), "grpc-proxy", "start", "--endpoints", at, "--listen-addr", l.Addr().String())
	await.Must(t, proxy.Start())
	t.Cleanup(func() { proxy.Process.Kill(); proxy.Wait() })
	eventually(t, "the proxy", func() error {
		c, err := net.Dial("tcp", l.Addr().String())
		if err == nil {
			c.Close()
		}
		return err
	})
	refused(t, "etcd://"+l.Addr().String(), true, "grpc-proxy", "name the members")
}

// TestUsers opens an etcd without users and one with.
// A token of either kind lasts for 3 s. A simple one lasts longer if it is used; a JWT does not.
func TestUsers(t *testing.T) {
	t.Parallel()
	t.Run("simple", func(t *testing.T) { testUsers(t, "--auth-token-ttl", "3") })
	t.Run("jwt", func(t *testing.T) { testUsers(t, "--auth-token", jwt(t, "3s")) })
}

// jwt returns the value of etcd's flag --auth-token for tokens that etcd signs.
func jwt(t *testing.T, ttl string) string {
	key := await.Value(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	private := await.Value(x509.MarshalECPrivateKey(key))
	public := await.Value(x509.MarshalPKIXPublicKey(&key.PublicKey))
	file := func(kind string, der []byte) string {
		name := filepath.Join(t.TempDir(), "key.pem")
		text := pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
		await.Must(t, os.WriteFile(name, text, 0o600))
		return name
	}
	return fmt.Sprintf("jwt,pub-key=%s,priv-key=%s,sign-method=ES256,ttl=%s",
		file("PUBLIC KEY", public), file("EC PRIVATE KEY", private), ttl)
}

func testUsers(t *testing.T, args ...string) {
	t.Parallel()
	s := startServers(t, 1, args...)[0]
	needUsers(t, s)
	refused(t, "etcd://joe:hunter2@"+s.Client, true, "auth enable", "remove user and password")
	refused(t, "etcds://"+s.Client, false, "etcd://")

	enableUsers(t, s)

	refused(t, "etcd://joe:hunter2x@"+s.Client, false, "check user and password")
	refused(t, "etcd://nobody:hunter2@"+s.Client, false, "check user and password")
	refused(t, "etcd://"+s.Client, false, "user:password@")
	refused(t, "etcd://guest:hunter2@"+s.Client, false, "permission denied", "grant-permission")

	// The role has a right on hasp/ only, and a token lasts for 3 s.
	// The stream of b's watches is open all the time, with the first token.
	a, b := openDriver(t, "joe:hunter2@"+s.Client), openDriver(t, "joe:hunter2@"+s.Client)
	other, waits := lineUp(t, a, b, claimFor("other", time.Minute))
	for round := range 3 {
		handOver(t, a, b, func(held backend.Claim) {
			if round > 0 {
				time.Sleep(6500 * time.Millisecond) // a token ends 3 to 4 s after its last use, which a keep-alive may delay by 2 s
			}
			if err := renew(a, held); err != nil {
				t.Errorf("renew with a token that has expired: %v", err)
			}
		})
	}
	free(t, a, other)
	free(t, b, waits.granted(t))
}

// needUsers skips the test if etcd is too old for users.
func needUsers(t *testing.T, s *server) {
	t.Helper()
	status := await.Value(plainClient(t, s.Client).Status(context.Background(), s.Client))
	if strings.HasPrefix(status.Version, "3.4.") {
		t.Skipf("this etcd is %s, and users take 3.5: build one by internal/etcdtest/build.sh, and name it by HASP_TEST_ETCD", status.Version)
	}
}

// enableUsers switches authentication on, with the users root and joe, and returns root's client.
func enableUsers(t *testing.T, s *server) *clientv3.Client {
	t.Helper()
	needUsers(t, s)
	client := plainClient(t, s.Client)
	ctx := context.Background()
	await.Value(client.UserAdd(ctx, "root", "hunter2-root"))
	await.Value(client.UserGrantRole(ctx, "root", "root"))
	await.Value(client.RoleAdd(ctx, "locks"))
	await.Value(client.RoleGrantPermission(ctx, "locks", "hasp/", clientv3.GetPrefixRangeEnd("hasp/"), clientv3.PermissionType(clientv3.PermReadWrite)))
	await.Value(client.UserAdd(ctx, "joe", "hunter2"))
	await.Value(client.UserGrantRole(ctx, "joe", "locks"))
	await.Value(client.UserAdd(ctx, "guest", "hunter2"))
	await.Value(client.AuthEnable(ctx))
	root := await.Value(clientv3.New(clientv3.Config{Endpoints: []string{s.Client}, Username: "root", Password: "hunter2-root", Logger: zap.NewNop()}))
	t.Cleanup(func() { root.Close() })
	return root
}

func TestLongKey(t *testing.T) {
	t.Parallel()
	d := openDriver(t, startOne(t))
	for _, key := range []string{strings.Repeat("k", 10_000), strings.Repeat("k", 3<<20)} {
		for what, take := range map[string]func(context.Context, backend.Claim) (backend.Grant, error){"Acquire": d.Acquire, "Wait": d.Wait} {
			_, err := take(context.Background(), claimFor(key, time.Minute))
			if !errors.Is(err, hasp.ErrInvalid) || !strings.Contains(err.Error(), "too long") || len(err.Error()) > 300 {
				t.Errorf("%s of a key of %d bytes: %.300v", what, len(key), err)
			}
		}
		if st, err := d.Inspect(context.Background(), key); !errors.Is(err, hasp.ErrInvalid) {
			t.Errorf("inspect a key of %d bytes: %+v, %.300v", len(key), st, err)
		}
	}
	for _, key := range []string{strings.Repeat("k", 8_000), strings.Repeat("/", 2_500)} {
		w := wants(t, d, key)
		free(t, d, w.granted(t))
	}
	var cs []backend.Claim
	for i := range 100 { // that many are read at once
		cs = append(cs, take(t, d, fmt.Sprint(strings.Repeat("k", 8_000), i), long))
	}
	for i, err := range renewAll(t.Context(), d, cs) {
		if err != nil {
			t.Errorf("renewal %d of many with long keys: %.300v", i, err)
		}
	}

	// The entries of this key are more than gRPC takes by default, 4 MiB.
	for i := range 5 {
		c := claimFor("long", long)
		c.Shared, c.Owner = true, fmt.Sprint(i, strings.Repeat("o", 1_000_000))
		await.Value(acquire(d, c))
	}
	if st, err := inspect(d, "long"); err != nil || len(st.Shared) != 5 {
		t.Errorf("inspect of a long answer: %d owners, want 5: %.300v", len(st.Shared), err)
	}
	long := claimFor("owner", time.Minute)
	long.Owner = strings.Repeat("o", 1536<<10)
	if _, err := d.Acquire(context.Background(), long); !errors.Is(err, hasp.ErrInvalid) || !strings.Contains(err.Error(), "too long") {
		t.Errorf("acquire with a long owner: %.300v", err)
	}
}

func TestVersions(t *testing.T) {
	for version, want := range map[string]bool{"3.4.0": true, "3.4.23": true, "3.10.1": true, "4.0.0": true, "3.6.0-rc.3": true, "3.3.0": false, "2.3.8": false, "": false, "x": false} {
		for _, user := range []bool{false, true} {
			want := want && !(user && strings.HasPrefix(version, "3.4."))
			if err := etcdlock.CheckVersion(version, user); (err == nil) != want || err != nil && !errors.Is(err, backend.ErrInvalid) {
				t.Errorf("version %q, user %t: %v, want accepted %t", version, user, err, want)
			}
		}
	}
}

// TestTLS opens an etcd that wants certificates of its clients. They are renewed while the Client
// lives: the server begins anew with others, and the files that the URL names are written anew.
func TestTLS(t *testing.T) {
	t.Parallel()
	etcdtest.Need(t)
	dir := t.TempDir()
	cert, key, err := testcert.Write(dir, "etcd.example")
	await.Must(t, err)
	s := await.Value(newServers(t.TempDir(), 1))[0]
	s.Args = append(s.Args, "--listen-client-urls", "https://"+s.Client, "--advertise-client-urls", "https://"+s.Client,
		"--cert-file", cert, "--key-file", key, "--trusted-ca-file", cert, "--client-cert-auth")
	t.Cleanup(s.Kill)
	await.Must(t, s.Start())

	at := "etcds://" + s.Client
	q := url.Values{"ca": {cert}, "cert": {cert}, "key": {key}}
	var c *hasp.Client
	eventually(t, "a Client", func() error {
		c, err = hasp.Open(t.Context(), "etcdlock+"+at+"?"+q.Encode(), nil)
		return err
	})
	defer c.Close()
	q.Set("server_name", "etcd.example")
	await.Value(hasp.Open(t.Context(), "etcdlock+"+at+"?"+q.Encode(), nil)).Close()
	q.Set("server_name", "other.example")
	refused(t, at+"?"+q.Encode(), false, "server_name")
	refused(t, at, false, "certificate", "ca")
	// The client may write before it reads the server's alert, and then the error is only a broken pipe.
	refused(t, at+"?"+url.Values{"ca": {cert}}.Encode(), false, "cert and key")
	refused(t, "etcd://"+s.Client, false, "etcds://")

	locks := func() error {
		return hasp.Do(t.Context(), c, "tls", func(context.Context, *hasp.Lease) error { return nil })
	}
	eventually(t, "a lock over TLS", locks)
	s.Kill()
	_, _, err = testcert.Write(dir, "etcd.example") // the same files
	await.Must(t, err)
	await.Must(t, s.Start())
	eventually(t, "a lock with the new certificates", locks)
}
