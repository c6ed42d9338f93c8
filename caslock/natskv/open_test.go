package natskv_test

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nkeys"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/testcert"
)

// refused opens a URL, and checks that the error is one line with the words, and without the
// password hunter2. The flag invalid says whether it must be ErrInvalid.
func refused(t *testing.T, at string, invalid bool, words ...string) {
	t.Helper()
	c, err := hasp.Open(t.Context(), at, &hasp.Options{Timeout: 2 * time.Second})
	if err == nil {
		c.Close()
		t.Errorf("%s: opened", at)
		return
	}

	text := err.Error()
	t.Log(text)
	if got := errors.Is(err, hasp.ErrInvalid); got != invalid {
		t.Errorf("%s: %s: ErrInvalid %t, want %t", at, text, got, invalid)
	}
	for _, word := range words {
		if !strings.Contains(text, word) {
			t.Errorf("%s: %q, want %q in it", at, text, word)
		}
	}
	if strings.Contains(text, "hunter2") || strings.Contains(text, "\n") || len(text) > 400 {
		t.Errorf("%s: the error has a password, or is long: %q", at, text)
	}
}

// works opens a URL and takes a lock.
func works(t *testing.T, at string) {
	t.Helper()
	c, err := hasp.Open(t.Context(), at, nil)
	if err != nil {
		t.Errorf("%s: %v", at, err)
		return
	}
	defer c.Close()
	err = hasp.Do(t.Context(), c, "key", func(context.Context, *hasp.Lease) error { return nil })
	if err != nil {
		t.Errorf("%s: %v", at, err)
	}
}

func TestBadURL(t *testing.T) {
	t.Parallel()
	for at, words := range map[string][]string{
		"nats://":                               {"want one node"},
		"nats://joe:hunter2@h":                  {"no bucket", "/locks"},
		"nats://joe:hunter2@h/":                 {"no bucket"},
		"nats://joe:hunter2@h/my.locks":         {"my.locks", "letters"},
		"nats://joe:hunter2@h/a/b":              {"letters"},
		"nats://joe:hunter2%@h/locks":           {"%25"},
		"nats://joe:hunter2@h:port/locks":       {"port"},
		"nats://joe:hunter2@h:0/locks":          {"port"},
		"nats://h,,g/locks":                     {"a host"},
		"nats+redis://joe:hunter2@h/locks":      {"nats+tls://"},
		"nats://h/locks?create=perhaps":         {"create", "true or false"},
		"nats://h/locks?clock=1s":               {"clock", "true or false"},
		"nats://h/locks?replicas=9":             {"replicas", "1 to 5"},
		"nats://h/locks?creds=/nowhere":         {"creds", "no such file"},
		"nats://h/locks?ca=/nowhere":            {"ca", "no such file"},
		"nats://h/locks?cert=/etc/hostname":     {"cert and key"},
		"nats://joe:hunter2@h/locks?bucket=a":   {"unknown parameter", "replicas"},
		"nats://joe:hunter2@h/locks?ca=open.go": {"ca", "certificate"},
	} {
		refused(t, at, !strings.HasSuffix(at, "open.go"), words...)
	}
}

func TestNobodyThere(t *testing.T) {
	t.Parallel()
	// Port 1 belongs to tcpmux, and the kernel gives it to no socket by chance.
	refused(t, "nats://joe:hunter2@127.0.0.1:1/locks", false, "127.0.0.1:1", "nobody listens")
	refused(t, "nats://joe:hunter2@no-such-host.invalid/locks", false, "no-such-host.invalid")

	// This port accepts connections, and says nothing. Neither does the web page, until it is asked.
	silent := await.Value(net.Listen("tcp", "127.0.0.1:0"))
	defer silent.Close()
	refused(t, "nats://joe:hunter2@"+silent.Addr().String()+"/locks", false, "usually 4222")

	page := await.Value(net.Listen("tcp", "127.0.0.1:0"))
	web := &http.Server{ReadTimeout: 100 * time.Millisecond}
	go web.Serve(page)
	defer web.Close()
	refused(t, "nats://joe:hunter2@"+page.Addr().String()+"/locks", false, "usually 4222")
}

// The right that a server lacks is named at once, without waiting for the timeout.
func TestRights(t *testing.T) {
	t.Parallel()
	publish := func(subjects ...string) *server.Permissions {
		return &server.Permissions{
			Publish:   &server.SubjectPermission{Allow: subjects},
			Subscribe: &server.SubjectPermission{Allow: []string{"_INBOX.>"}},
		}
	}
	// These are the rights in README.md, once without the right to create a bucket.
	const create = "$JS.API.STREAM.CREATE.KV_locks"
	use := []string{
		"$JS.API.INFO",
		"$JS.API.STREAM.INFO.KV_locks",
		"$JS.API.STREAM.MSG.GET.KV_locks",
		"$JS.API.STREAM.PURGE.KV_locks",
		"$JS.API.CONSUMER.CREATE.KV_locks.>",
		"$JS.API.CONSUMER.DELETE.KV_locks.>",
		"$KV.locks.>",
	}
	n := startNode(t, func(o *server.Options) {
		o.Users = []*server.User{
			{Username: "admin", Permissions: publish(append(use, create)...)},
			{Username: "joe", Permissions: publish(use...)},
			{Username: "reader", Permissions: publish(use[:4]...)},
			{Username: "guest", Permissions: publish("a")},
		}
		for _, user := range o.Users {
			user.Password = "hunter2"
		}
	})
	at := func(user string) string { return "nats://" + user + ":hunter2@" + n.addr + "/locks" }

	page := string(await.Value(os.ReadFile("README.md")))
	for _, subject := range append(use, create, "_INBOX.>") {
		if !strings.Contains(page, `"`+subject+`"`) {
			t.Errorf("README.md lacks the subject %s", subject)
		}
	}

	refused(t, at("joe"), false, create, "grant")
	refused(t, at("joe")+"?create=false", false, "bucket", "nats kv add", "create=false")
	works(t, at("admin"))
	works(t, at("joe")+"?create=false")
	refused(t, at("reader"), false, "$KV.locks.lock", "grant")
	refused(t, at("guest"), false, "$JS.API.STREAM.INFO.KV_locks", "grant")
	refused(t, at("nobody"), false, "Authorization Violation", "check user and password")
	refused(t, "nats://"+n.addr+"/locks", false, "Authorization Violation", "check user and password")
	refused(t, "nats://hunter2@"+n.addr+"/locks", false, "Authorization Violation")
	refused(t, at("admin")+"?replicas=3", true, "fewer than 3 replicas", "nats stream edit")
	refused(t, strings.Replace(at("admin"), "nats:", "nats+tls:", 1), false, "no TLS", "nats://")

	// A waiter needs the right to watch.
	a := await.Value(hasp.Open(t.Context(), at("joe"), nil))
	defer a.Close()
	b := await.Value(hasp.Open(t.Context(), at("joe"), nil))
	defer b.Close()
	lease := await.Value(a.Lock(t.Context(), "key"))
	got := make(chan error)
	go func() {
		l, err := b.Lock(t.Context(), "key")
		if err == nil {
			err = l.Unlock(t.Context())
		}
		got <- err
	}()
	await.Success(t, "the waiter watches", func() error {
		if n.s.NumSubscriptions() == 0 || await.Value(n.s.Jsz(nil)).Consumers == 0 {
			return errors.New("no consumer")
		}
		return nil
	})
	await.Must(t, lease.Unlock(t.Context()))
	await.Must(t, <-got)
}

func TestTokenAndConfig(t *testing.T) {
	t.Parallel()
	n := startNode(t, func(o *server.Options) { o.Authorization = "hunter2/@" })
	works(t, "nats://hunter2%2F%40@"+n.addr+"/locks")
	refused(t, "nats://hunter2@"+n.addr+"/locks", false, "check user and password")

	c := hasp.Config{
		Strategy: "nats",
		Nodes:    []string{"nats://hunter2%2F%40@127.0.0.1:1," + n.addr + "/locks"},
		Params:   map[string]string{"ttl": "10s", "create": "false", "clock": "true"},
	}
	client := await.Value(c.Open(t.Context(), nil))
	conns := n.s.NumClients()
	await.Must(t, client.Close())
	await.Until(t, "Close ends the connection", func() bool { return n.s.NumClients() < conns })
}

// The user of a creds file is one of an account of an operator.
func TestCreds(t *testing.T) {
	t.Parallel()
	operator := await.Value(nkeys.CreateOperator())
	resolver := &server.MemAccResolver{}
	account := func(limits jwt.JetStreamLimits) (nkeys.KeyPair, string) {
		keys := await.Value(nkeys.CreateAccount())
		public := await.Value(keys.PublicKey())
		claims := jwt.NewAccountClaims(public)
		claims.Limits.JetStreamLimits = limits
		await.Must(t, resolver.Store(public, await.Value(claims.Encode(operator))))
		return keys, public
	}
	_, system := account(jwt.JetStreamLimits{})
	without, _ := account(jwt.JetStreamLimits{})
	one := jwt.JetStreamLimits{DiskStorage: -1, MemoryStorage: -1, Streams: 1, Consumer: -1}
	with, _ := account(one)

	creds := func(account nkeys.KeyPair) string {
		keys := await.Value(nkeys.CreateUser())
		claims := jwt.NewUserClaims(await.Value(keys.PublicKey()))
		token := await.Value(claims.Encode(account))
		file := filepath.Join(t.TempDir(), "creds")
		text := await.Value(jwt.FormatUserConfig(token, await.Value(keys.Seed())))
		await.Must(t, os.WriteFile(file, text, 0o600))
		return "?" + url.Values{"creds": {file}}.Encode()
	}
	n := startNode(t, func(o *server.Options) {
		o.TrustedKeys = []string{await.Value(operator.PublicKey())}
		o.AccountResolver = resolver
		o.SystemAccount = system
	})

	works(t, "nats://"+n.addr+"/locks"+creds(with))
	refused(t, "nats://"+n.addr+"/more"+creds(with), false, "limit of streams")
	refused(t, "nats://"+n.addr+"/locks"+creds(without), false, "jetstream: enabled")
	refused(t, "nats://"+n.addr+"/locks", false, "creds")
	stranger := await.Value(nkeys.CreateAccount())
	refused(t, "nats://"+n.addr+"/locks"+creds(stranger), false, "creds")
}

func TestJetStream(t *testing.T) {
	t.Parallel()
	off := startNode(t, func(o *server.Options) { o.JetStream = false })
	refused(t, "nats://"+off.addr+"/locks", false, "switch JetStream on")

	n := startNode(t, nil)
	_, js := n.connect(t)
	refused(t, "nats://"+n.addr+"/locks?replicas=3", false, "lower the parameter replicas")
	await.Value(js.CreateKeyValue(t.Context(), jetstream.KeyValueConfig{Bucket: "old", History: 5}))
	refused(t, "nats://"+n.addr+"/old", true, `bucket "old"`, "History of 1")
}

func TestTLS(t *testing.T) {
	t.Parallel()
	cert, key, err := testcert.Write(t.TempDir(), "nats.example")
	await.Must(t, err)
	start := func(mutual bool) *node {
		return startNode(t, func(o *server.Options) {
			o.TLSConfig = await.Value(server.GenTLSConfig(&server.TLSConfigOpts{
				CertFile: cert, KeyFile: key, CaFile: cert, Verify: mutual,
			}))
			o.TLSTimeout = 10
		})
	}
	query := url.Values{"ca": {cert}}.Encode()
	both := url.Values{"ca": {cert}, "cert": {cert}, "key": {key}}.Encode()

	n := start(false)
	works(t, "nats+tls://"+n.addr+"/locks?"+query)
	works(t, "nats://"+n.addr+"/locks?"+query)
	refused(t, "nats+tls://"+n.addr+"/locks", false, "certificate", "ca=")
	refused(t, "nats://"+n.addr+"/locks", false, "certificate", "ca=")
	other := strings.Replace(n.addr, "127.0.0.1", "localhost", 1)
	refused(t, "nats+tls://"+other+"/locks?"+query, false, "nats.example", "name the host")

	n = start(true)
	works(t, "nats+tls://"+n.addr+"/locks?"+both)
	refused(t, "nats+tls://"+n.addr+"/locks?"+query, false, "cert and key")
}
