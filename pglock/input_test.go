//go:build unix

package pglock_test

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/pgtest"
	"github.com/hasplock/hasp/internal/testcert"
	"github.com/hasplock/hasp/pglock"
)

const password = "s3cr3t-W0rd"

// at is the beginning of a URL.
const at = "pglock+postgres://u:" + password + "@"

// clear fails the test unless err is one clear line: it contains all texts and no password.
func clear(t *testing.T, err error, texts ...string) {
	t.Helper()
	if err == nil {
		t.Error("no error")
		return
	}
	t.Log(err)
	for _, text := range texts {
		if !strings.Contains(err.Error(), text) {
			t.Errorf("the error does not contain %q: %v", text, err)
		}
	}
	if strings.ContainsAny(err.Error(), "\n\r\t") || strings.Contains(err.Error(), password) || strings.Contains(err.Error(), "s3cr3t") {
		t.Errorf("the error has several lines, or the password: %q", err)
	}
}

func TestBadURLs(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ url, text string }{
		{"pglock://host/db", "postgres://user"},
		{"pglock+mysql://u:" + password + "@host/db", "postgres://user"},
		{at + "host/db?sslmod=disable", `unknown parameter "sslmod"`},
		{at + "host/db?statement_timeout=5", `unknown parameter "statement_timeout"`},
		{at + "host/db?pool_max_conns=5", `unknown parameter "pool_max_conns"`},
		{at + "host/db?pool_size=0", "from 1 to 1000"},
		{at + "host/db?pool_size=many", "from 1 to 1000"},
		{at + "host/db?sslmode=maybe", "sslmode"},
		{at + "host/db?sslrootcert=/no/such/file&sslmode=verify-full", "sslrootcert, sslcert"},
		{at + "host/db?target_session_attrs=some", "target_session_attrs"},
		{at + "host/db?table=" + strings.Repeat("x", 64), "63 bytes"},
		{at + "host:port/db", "%2F"},
		{at + "@host/db", "%40"},
		{strings.TrimSuffix(at, "@") + "%zz@host/db", "percent-encoded"},
	} {
		_, err := hasp.Open(t.Context(), tt.url, nil)
		clear(t, err, tt.text)
		if !errors.Is(err, hasp.ErrInvalid) {
			t.Errorf("%s: %v, want ErrInvalid", tt.url, err)
		}
	}
}

func TestUnreachable(t *testing.T) {
	t.Parallel()
	const dead = "127.0.0.1:1" // port 1 belongs to tcpmux, and the kernel gives it to no socket by chance
	for _, hosts := range []string{dead, dead + "," + dead} {
		_, err := hasp.Open(t.Context(), at+hosts+"/db", nil)
		clear(t, err, "is PostgreSQL running there?")
		if n := strings.Count(fmt.Sprint(err), "dial tcp"); n != 1 {
			t.Errorf("the error says %d times what happened: %v", n, err)
		}
	}
	_, err := pglock.New(t.Context(), newPool(t, strings.TrimPrefix(at, "pglock+")+dead+"/db"), nil)
	if clear(t, err, "is PostgreSQL running there?"); !errors.Is(err, hasp.ErrUnavailable) {
		t.Errorf("New: %v, want ErrUnavailable", err)
	}

	silent := await.Value(net.Listen("tcp", "127.0.0.1:0"))
	defer silent.Close()
	_, err = hasp.Open(t.Context(), at+silent.Addr().String()+"/db", &hasp.Options{Timeout: 500 * time.Millisecond})
	clear(t, err, "no answer", "is that a PostgreSQL?")
}

func TestBadInput(t *testing.T) {
	t.Parallel()
	s := pgtest.Start(t)
	s.Must(t, "CREATE ROLE app LOGIN PASSWORD '"+password+"'")
	s.Must(t, "CREATE ROLE guest LOGIN PASSWORD '"+password+"'")
	s.Must(t, "CREATE SCHEMA locks")
	s.Must(t, "CREATE TABLE customers (id int)")
	s.Must(t, "CREATE TABLE older (key bytea PRIMARY KEY, writer_until timestamptz)")
	hba := "host all postgres all trust\nhost all app,guest all scram-sha-256\nhostssl all other all scram-sha-256\n"
	must(t, os.WriteFile(s.File("pg_hba.conf"), []byte(hba), 0o600))
	s.Must(t, "SELECT pg_reload_conf()")
	ctx := t.Context()
	open := func(user, password, rest string) (*hasp.Client, error) {
		return hasp.Open(ctx, "pglock+postgres://"+user+":"+password+"@"+s.Addr+"/"+rest, patient)
	}
	fails := func(user, password, rest string, texts ...string) {
		t.Helper()
		c, err := open(user, password, rest)
		if err == nil {
			c.Close()
		}
		clear(t, err, texts...)
	}

	until(t, "the server asks for passwords", func() bool {
		c, err := open("app", password+"x", "postgres")
		if err == nil {
			c.Close()
		}
		return err != nil && strings.Contains(err.Error(), "password")
	})
	fails("app", password+"x", "postgres", "password authentication failed", "check user and password")
	fails("app", password, "nowhere", `database "nowhere" does not exist`, "createdb")
	fails("other", password, "postgres?sslmode=disable", "pg_hba.conf")
	fails("app", password, "postgres?sslmode=require", "sslmode=disable")
	fails("postgres", "", "postgres?table=customers", "is not a table of hasp's locks", "parameter table")
	fails("postgres", "", "postgres?table=older", "older hasp", "DROP TABLE")
	fails("postgres", "", "postgres?schema=elsewhere", `no schema "elsewhere"`)

	// The DDL of the error is what someone else can run. Then the user can use the table.
	_, err := open("app", password, "postgres?schema=locks")
	clear(t, err, "may not create the table", "have someone run: CREATE TABLE", "GRANT SELECT")
	_, ddl, _ := strings.Cut(err.Error(), "have someone run: ")
	ddl, _, _ = strings.Cut(ddl, " (ERROR")
	s.Must(t, ddl)
	s.Must(t, "GRANT USAGE ON SCHEMA locks TO guest")
	c := await.Value(open("app", password, "postgres?schema=locks"))
	defer c.Close()
	lockOnce(t, c, "key")
	fails("guest", password, "postgres?schema=locks", "may not use the table", "GRANT SELECT, INSERT, UPDATE, DELETE")
	until(t, "no connection is left of an Open that has failed", func() bool {
		return !finds(s, "SELECT FROM pg_stat_activity WHERE usename = 'guest'")
	})

	// Keys have a limit.
	_, err = c.Lock(ctx, strings.Repeat("k", 3<<19))
	clear(t, err, "2000", "hash")
	if !errors.Is(err, hasp.ErrInvalid) {
		t.Errorf("a key of 1.5 MB: %v, want ErrInvalid", err)
	}
	lockOnce(t, c, strings.Repeat("k", 2000))

	// Tables apart have locks apart. Names are taken literally.
	other := await.Value(hasp.Open(ctx, "pglock+postgres://postgres@"+s.Addr+`/postgres?schema=locks&table=My%20"Locks"`, patient))
	defer other.Close()
	for _, c := range []*hasp.Client{c, other} {
		lease := await.Value(c.TryLock(ctx, "key"))
		defer lease.Unlock(ctx)
	}
}

// A row that someone has changed by hand ends no List.
func TestOddRows(t *testing.T) {
	t.Parallel()
	s, c := withClient(t)
	ctx := t.Context()
	fine := await.Value(c.Lock(ctx, "a"))
	defer fine.Unlock(ctx)

	for _, tt := range []struct {
		set    string
		shared string
		ttl    time.Duration // at least
	}{
		{"expires = 'infinity', owner = 'me'", "[]", -1},
		{"expires = '294276-12-31'", "[]", 290 * 365 * 24 * time.Hour},
		{"since = 'infinity', expires = now() + interval '1 h'", "[]", 0},
		{`expires = 'infinity', readers = '[]'`, "[]", -1},
		{`expires = 'infinity', readers = '{"t": 1, "u": {"owner": "6d65", "end": "2100-01-01T00:00:00+00:00"}}'`, "[me]", -1},
		{`expires = 'infinity', readers = '{"t": {"owner": "zz", "end": "2100-01-01T00:00:00+00:00"}, "u": {"owner": "6d65", "end": "soon"}}'`, "[zz]", -1},
		{`expires = 'infinity', readers = (SELECT jsonb_object_agg(i, '{"owner": "6d65", "end": "2100-01-01T00:00:00+00:00"}'::jsonb) FROM generate_series(1, 1001) i)`,
			"[" + strings.Repeat("me ", 999) + "me]", -1}, // no more than 1,000
	} {
		s.Must(t, "DELETE FROM hasp_locks WHERE key = 'b'")
		s.Must(t, "INSERT INTO hasp_locks (key, since, fence, fenced) VALUES ('b', now(), 1, false)")
		s.Must(t, "UPDATE hasp_locks SET "+tt.set+" WHERE key = 'b'")
		var keys []string
		for e, err := range c.List(ctx, "") {
			must(t, err)
			keys = append(keys, e.Key)
		}
		st, err := c.Inspect(ctx, "b")
		if fmt.Sprint(keys) != "[a b]" || !st.Held || fmt.Sprint(st.Shared) != tt.shared || (st.TTL < 0) != (tt.ttl < 0) || st.TTL < tt.ttl || err != nil {
			t.Errorf("%s: List has %v, Inspect says %+v, %v", tt.set, keys, st, err)
		}
		must(t, c.Break(ctx, "b"))
	}

	// A key that is held without an end is held for those who want it.
	s.Must(t, "UPDATE hasp_locks SET expires = 'infinity', owner = 'me' WHERE key = 'b'")
	for _, shared := range [][]hasp.Option{nil, {hasp.WithShared()}} {
		_, err := c.TryLock(ctx, "b", shared...)
		if !errors.Is(err, hasp.ErrHeld) || !strings.Contains(err.Error(), `"me"`) {
			t.Errorf("TryLock of a key that is held without an end: %v", err)
		}
	}
}

// A Client checks the certificate of the server, and its name. It sees over TLS as well that
// the server has ended a connection.
func TestTLS(t *testing.T) {
	t.Parallel()
	s := pgtest.Start(t)
	ctx := t.Context()
	info := await.Value(os.Stat(s.File("PG_VERSION")))
	cert, key, err := testcert.Write(t.TempDir(), "postgres.example")
	must(t, err)
	for name, file := range map[string]string{"server.crt": cert, "server.key": key} {
		must(t, os.Rename(file, s.File(name)))
		own(t, s.File(name), info)
	}
	s.Must(t, "ALTER SYSTEM SET ssl = on")
	must(t, s.Stop())
	must(t, s.Start())
	url := "pglock+postgres://postgres@" + s.Addr + "/postgres?sslmode=verify-full"

	_, err = hasp.Open(ctx, url, patient)
	clear(t, err, "certificate", "sslrootcert=")
	url += "&sslrootcert=" + s.File("server.crt")
	_, err = hasp.Open(ctx, strings.Replace(url, "127.0.0.1", "localhost", 1), patient)
	clear(t, err, "name the host that the certificate is for")

	c := await.Value(hasp.Open(ctx, url, patient))
	defer c.Close()
	for range 2 {
		lease := await.Value(c.Lock(ctx, "key"))
		if !finds(s, "SELECT FROM pg_stat_ssl WHERE ssl") {
			t.Error("no connection has TLS")
		}
		must(t, lease.Unlock(ctx))
		must(t, s.Kick(ctx))
	}
}
