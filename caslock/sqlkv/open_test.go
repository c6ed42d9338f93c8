//go:build cgo && unix

package sqlkv_test

import (
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/caslock"
	"github.com/hasplock/hasp/caslock/sqlkv"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/crew"
)

// startMariaDB starts a server that ends with the test.
func startMariaDB(t *testing.T) *mariadb {
	t.Helper()
	if _, err := exec.LookPath("mariadbd"); err != nil {
		if os.Getenv("HASP_TEST_MARIADB") == "required" {
			t.Fatal(err)
		}
		t.Skip("no mariadbd on the PATH")
	}
	m := &mariadb{dir: t.TempDir(), addr: await.Value(crew.FreeAddr())}
	await.Must(t, m.start(t.Context()))
	t.Cleanup(func() { m.kill() })
	return m
}

func do(t *testing.T, db *sql.DB, statements ...string) {
	t.Helper()
	for _, s := range statements {
		if _, err := db.ExecContext(t.Context(), s); err != nil {
			t.Fatalf("%s: %v", s, err)
		}
	}
}

// wantError opens a URL that must fail with one line that contains each of the words.
func wantError(t *testing.T, what, url string, words ...string) {
	t.Helper()
	c, err := hasp.Open(t.Context(), url, nil)
	if err == nil {
		c.Close()
		t.Errorf("%s: no error", what)
		return
	}
	text := err.Error()
	if strings.Contains(text, "\n") || strings.Contains(text, "secret") {
		t.Errorf("%s: the error has several lines or a password: %s", what, text)
	}
	for _, word := range words {
		if !strings.Contains(text, word) {
			t.Errorf("%s: %s; want %q in it", what, text, word)
		}
	}
}

func TestMariaDBErrorsOfOpenSayWhatToDo(t *testing.T) {
	t.Parallel()
	m := startMariaDB(t)
	root := await.Value(sql.Open("mysql", "root@tcp("+m.addr+")/mysql"))
	defer root.Close()
	do(t, root,
		"CREATE DATABASE app",
		"CREATE TABLE app.other (id INT)",
		"CREATE TABLE app.hasp_locks LIKE "+theTable(t, m),
		"CREATE USER app@'%' IDENTIFIED BY 'right'",
		"GRANT SELECT, INSERT, UPDATE, DELETE ON app.hasp_locks TO app@'%'",
		"GRANT SELECT ON app.other TO app@'%'",
	)

	at := "mysql://app:right@" + m.addr + "/app"
	nobody := "mysql://app:secret@" + await.Value(crew.FreeAddr()) + "/app"
	for what, c := range map[string]struct {
		url   string
		words []string
	}{
		"no host":       {"mysql://", []string{"mysql://user:password@host:3306/database"}},
		"no database":   {"mysql://app:secret@" + m.addr, []string{"names no database"}},
		"no user":       {"mysql://" + m.addr + "/app", []string{"no user"}},
		"an at":         {"mysql://app:secret@secret@h/app", []string{"%40"}},
		"a percent":     {"mysql://app:secret%@h/app", []string{"%25"}},
		"nobody":        {nobody, []string{"refused", "is the server running there?"}},
		"password":      {"mysql://app:secret@" + m.addr + "/app", []string{"check user and password"}},
		"database":      {"mysql://root@" + m.addr + "/nope", []string{"nope", "CREATE DATABASE"}},
		"not granted":   {at[:len(at)-3] + "mysql", []string{"GRANT"}},
		"no CREATE":     {at + "?table=new", []string{"administrator run: CREATE TABLE IF NOT EXISTS new"}},
		"other columns": {at + "?table=other", []string{"name another one"}},
		"a table":       {at + "?table=a-b", []string{"table name"}},
		"charset":       {at + "?charset=utf9", []string{"check the parameter charset"}},
		"TLS":           {at + "?tls=maybe", []string{"tls", "skip-verify"}},
		"no CA":         {at + "?ca=/no/file", []string{"parameter ca", "no such file"}},
		"pool":          {at + "?pool_size=0", []string{"from 1 to 1000"}},
		"parameter":     {at + "?parseTime=1", []string{"unknown parameter"}},
	} {
		wantError(t, what, c.url, c.words...)
	}

	c, err := hasp.Open(t.Context(), at, nil)
	if err != nil {
		t.Errorf("a user without CREATE, and the table exists: %v", err)
	} else if err := c.Close(); err != nil {
		t.Error(err)
	}

	do(t, root, "SET GLOBAL read_only = 1")
	wantError(t, "a replica", at, "read-only replica", "primary")
	wantError(t, "a replica for root", "mysql://root@"+m.addr+"/test", "read-only replica")
	do(t, root, "SET GLOBAL read_only = 0")

	// Connections that a URL opens commit by themselves, whatever the server's default is.
	do(t, root, "SET GLOBAL autocommit = 0")
	c = await.Value(hasp.Open(t.Context(), at, nil))
	l := await.Value(c.Lock(t.Context(), "key"))
	other := await.Value(hasp.Open(t.Context(), at, nil))
	if _, err := other.TryLock(t.Context(), "key"); !errors.Is(err, hasp.ErrHeld) {
		t.Errorf("autocommit is off in the server: %v, want ErrHeld", err)
	}
	await.Must(t, errors.Join(l.Unlock(t.Context()), c.Close(), other.Close()))
}

// theTable creates a table of locks, and returns its name.
func theTable(t *testing.T, m *mariadb) string {
	db := await.Value(sql.Open("mysql", dsn(m.addr)))
	defer db.Close()
	await.Value(sqlkv.New(t.Context(), db, sqlkv.MySQL, "hasp_locks"))
	return "test.hasp_locks"
}

// The holds of such connections would not be seen by others.
func TestAutocommitOffIsRefused(t *testing.T) {
	t.Parallel()
	m := startMariaDB(t)
	db := await.Value(sql.Open("mysql", dsn(m.addr)+"&autocommit=false"))
	defer db.Close()
	_, err := sqlkv.New(t.Context(), db, sqlkv.MySQL, "hasp_locks")
	if !errors.Is(err, hasp.ErrInvalid) || !strings.Contains(err.Error(), "autocommit") {
		t.Errorf("New: %v, want ErrInvalid and autocommit in it", err)
	}
}

// With innodb_snapshot_isolation, the losers of a race get the error 1020.
func TestOneOfEightWritersWinsInSnapshotIsolation(t *testing.T) {
	t.Parallel()
	m, ctx := startMariaDB(t), t.Context()
	for _, isolation := range []string{"READ-COMMITTED", "REPEATABLE-READ", "SERIALIZABLE"} {
		db := await.Value(sql.Open("mysql", dsn(m.addr)+"&innodb_snapshot_isolation=ON&tx_isolation="+
			url.QueryEscape("'"+isolation+"'")))
		defer db.Close()
		s := await.Value(sqlkv.New(ctx, db, sqlkv.MySQL, "hasp_locks"))
		for range 100 {
			name := rand.Text()
			at := await.Value(s.Put(ctx, name, []byte("0"), ""))
			errs := make([]error, 8)
			var writers sync.WaitGroup
			for i := range errs {
				writers.Go(func() { _, errs[i] = s.Put(ctx, name, []byte("1"), at) })
			}
			writers.Wait()

			won := 0
			for _, err := range errs {
				if err == nil {
					won++
				} else if !errors.Is(err, caslock.ErrConflict) {
					t.Fatalf("%s: %v, want ErrConflict", isolation, err)
				}
			}
			if won != 1 {
				t.Fatalf("%s: %d writers won, want one", isolation, won)
			}
		}
	}
}

// SQLite reports a full disk in the same way as a file that may not grow, and a file that it may
// not write in the same way as a connection that may not.
func TestSQLiteThatCannotWrite(t *testing.T) {
	for setting, word := range map[string]string{
		"PRAGMA max_page_count = 1": "free space on the disk",
		"PRAGMA query_only = 1":     "right to write the file",
	} {
		ctx, db := t.Context(), await.Value(sql.Open("sqlite3", "file:"+t.TempDir()+"/db"))
		defer db.Close()
		db.SetMaxOpenConns(1)
		s := await.Value(sqlkv.New(ctx, db, sqlkv.SQLite, "locks"))
		do(t, db, setting)
		_, err := s.Put(ctx, "name", make([]byte, 1<<20), "")
		if err == nil || errors.Is(err, caslock.ErrConflict) || !strings.Contains(err.Error(), word) {
			t.Errorf("%s: %v, want %q", setting, err, word)
		}
	}
}

// The Client of a URL owns the database.
func TestCloseEndsTheConnections(t *testing.T) {
	t.Parallel()
	m := startMariaDB(t)
	root := await.Value(sql.Open("mysql", dsn(m.addr)))
	defer root.Close()
	root.SetMaxOpenConns(1)

	c := await.Value(hasp.Open(t.Context(), "mysql://root@"+m.addr+"/test", nil))
	l := await.Value(c.Lock(t.Context(), "key"))
	await.Must(t, errors.Join(l.Unlock(t.Context()), c.Close()))
	await.Until(t, "only one connection", func() bool {
		n := 0
		row := root.QueryRowContext(context.Background(),
			"SELECT COUNT(*) FROM information_schema.processlist WHERE user = 'root'")
		return row.Scan(&n) == nil && n == 1
	})
}
