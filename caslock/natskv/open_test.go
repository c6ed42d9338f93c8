package natskv_test

import (
	"errors"
	"fmt"
	"io"
	"net"
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
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/caslock/internal/adaptertest"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/testcert"
)

func TestBadURL(t *testing.T) {
	t.Parallel()
	adaptertest.Rows{
		{"nats://", "want one node"},
		{"nats://joe:hunter2@h", "no bucket", "/locks"},
		{"nats://joe:hunter2@h/", "no bucket"},
		{"nats://joe:hunter2@h/my.locks", "my.locks", "letters"},
		{"nats://joe:hunter2@h/a/b", "letters"},
		{"nats://joe:hunter2%@h/locks", "%25"},
		{"nats://joe:hunter2@h:port/locks", "port"},
		{"nats://joe:hunter2@h:0/locks", "port"},
		{"nats://h,,g/locks", "a host"},
		{"nats+redis://joe:hunter2@h/locks", "nats+tls://"},
		{"nats://h/locks?create=perhaps", "create", "true or false"},
		{"nats://h/locks?clock=1s", "clock", "true or false"},
		{"nats://h/locks?replicas=9", "replicas", "1 to 5"},
		{"nats://h/locks?creds=/nowhere", "creds", "no such file"},
		{"nats://h/locks?ca=/nowhere", "ca", "no such file"},
		{"nats://h/locks?cert=/etc/hostname", "cert and key"},
		{"nats://joe:hunter2@h/locks?bucket=a", "unknown parameter", "replicas"},
	}.Invalid(t)
	adaptertest.Fails(t, "nats://joe:hunter2@h/locks?ca=open.go", "ca", "certificate")
}

func TestNobodyThere(t *testing.T) {
	t.Parallel()
	// This port accepts connections, and says nothing. Neither does a web page, until it is asked.
	silent := await.Value(net.Listen("tcp", "127.0.0.1:0"))
	defer silent.Close()

	const user = "nats://joe:hunter2@"
	adaptertest.Rows{
		// Port 1 belongs to tcpmux, and the kernel gives it to no socket by chance.
		{user + "127.0.0.1:1/locks", "127.0.0.1:1", "nobody listens"},
		{user + "no-such-host.invalid/locks", "no-such-host.invalid"},
		{user + silent.Addr().String() + "/locks?timeout=300ms", "usually 4222"},
	}.Fail(t)
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

	adaptertest.Rows{
		{at("joe"), create, "grant"},
		{at("joe") + "?create=false", "bucket", "nats kv add", "create=false"},
	}.Fail(t)
	adaptertest.Works(t, at("admin"))
	adaptertest.Works(t, at("joe")+"?create=false")
	adaptertest.Rows{
		{at("reader"), "$KV.locks.lock", "grant"},
		{at("guest"), "$JS.API.STREAM.INFO.KV_locks", "grant"},
		{at("nobody"), "Authorization Violation", "check user and password"},
		{"nats://" + n.addr + "/locks", "check user and password"},
		{strings.Replace(at("admin"), "nats:", "nats+tls:", 1), "no TLS", "nats://"},
	}.Fail(t)
	adaptertest.Invalid(t, at("admin")+"?replicas=3", "fewer than 3 replicas", "nats stream edit")

	// A waiter needs the right to watch.
	d := await.Value(adaptertest.Driver(t.Context(), at("joe")))
	_, stop, err := d.(backend.Waker).Listen(t.Context(), backend.Claim{Key: "key"})
	await.Must(t, err)
	stop()
	await.Must(t, d.(io.Closer).Close())
}

func TestTokenAndConfig(t *testing.T) {
	t.Parallel()
	n := startNode(t, func(o *server.Options) { o.Authorization = "hunter2/@" })
	adaptertest.Works(t, "nats://hunter2%2F%40@"+n.addr+"/locks")
	adaptertest.Fails(t, "nats://hunter2@"+n.addr+"/locks", "check user and password")
	adaptertest.Invalid(t, "nats://hunter2%2F%40@127.0.0.1:1,"+n.addr+"/locks", "no cluster", "name one server")

	c := hasp.Config{
		Strategy: "nats",
		Nodes:    []string{"nats://hunter2%2F%40@" + n.addr + "/locks"},
		Params:   map[string]string{"ttl": "10s", "create": "false", "clock": "true"},
	}
	client := await.Value(c.Open(t.Context(), nil))
	conns := n.s.NumClients()
	await.Must(t, client.Close())
	await.Until(t, "Close ends the connection", func() bool { return n.s.NumClients() < conns })
}

// With the clock of the servers, a new process gets the key of a dead holder at once.
func TestClock(t *testing.T) {
	t.Parallel()
	ctx, at := t.Context(), "nats://"+startNode(t, nil).addr+"/locks?clock="
	c := backend.Claim{Key: "key", Token: "dead", TTL: 100 * time.Millisecond, Timeout: time.Minute}
	await.Value(await.Value(adaptertest.Driver(ctx, at+"false")).Acquire(ctx, c))
	time.Sleep(2 * c.TTL)

	c.Token = "next"
	for clock, want := range []error{0: backend.ErrHeld, 1: nil} {
		d := await.Value(adaptertest.Driver(ctx, at+fmt.Sprint(clock)))
		if _, err := d.Acquire(ctx, c); !errors.Is(err, want) {
			t.Errorf("clock=%d: %v, want %v", clock, err, want)
		}
	}
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

	at := "nats://" + n.addr + "/locks"
	adaptertest.Works(t, at+creds(with))
	stranger := await.Value(nkeys.CreateAccount())
	adaptertest.Rows{
		{at + "-2" + creds(with), "limit of streams"},
		{at + creds(without), "jetstream: enabled"},
		{at, "creds"},
		{at + creds(stranger), "creds"},
	}.Fail(t)
}

func TestJetStream(t *testing.T) {
	t.Parallel()
	off := startNode(t, func(o *server.Options) { o.JetStream = false })
	adaptertest.Fails(t, "nats://"+off.addr+"/locks", "switch JetStream on")

	n := startNode(t, nil)
	_, js := n.connect(t)
	adaptertest.Fails(t, "nats://"+n.addr+"/locks?replicas=3", "lower the parameter replicas")
	await.Value(js.CreateKeyValue(t.Context(), jetstream.KeyValueConfig{Bucket: "old", History: 5}))
	adaptertest.Invalid(t, "nats://"+n.addr+"/old", `bucket "old"`, "History of 1")
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
	ca := "?" + url.Values{"ca": {cert}}.Encode()
	both := ca + "&" + url.Values{"cert": {cert}, "key": {key}}.Encode()

	addr := start(false).addr
	mutual := "nats+tls://" + start(true).addr + "/locks"
	for _, scheme := range []string{"nats://", "nats+tls://"} {
		at := scheme + addr + "/locks"
		adaptertest.Works(t, at+ca)
		adaptertest.Fails(t, at, "certificate", "ca=")
	}
	adaptertest.Works(t, mutual+both)
	other := strings.Replace(addr, "127.0.0.1", "localhost", 1)
	adaptertest.Rows{
		{"nats+tls://" + other + "/locks" + ca, "nats.example", "name the host"},
		{mutual + ca, "cert and key"},
	}.Fail(t)
}
