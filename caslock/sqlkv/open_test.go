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
	"github.com/hasplock/hasp/caslock/internal/adaptertest"
	"github.com/hasplock/hasp/caslock/sqlkv"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/crew"
	"github.com/hasplock/hasp/internal/testcert"
)

func needMariaDB(t *testing.T) {
	t.Helper()
	_, err := exec.LookPath("mariadbd")
	if err != nil && os.Getenv("HASP_TEST_MARIADB") == "required" {
		t.Fatal(err)
	}
	if err != nil {
		t.Skip("no mariadbd on the PATH")
	}
}

// startMariaDB starts a server that ends with the test.
func startMariaDB(t *testing.T) *mariadb {
	t.Helper()
	needMariaDB(t)
	m := &mariadb{dir: t.TempDir()}
	await.Must(t, m.start(t.Context()))
	t.Cleanup(m.kill)
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

func TestMariaDBErrorsOfOpenSayWhatToDo(t *testing.T) {
	t.Parallel()
	m := startMariaDB(t)
	root := connect(t, "mysql", dsn(m.addr))
	await.Value(sqlkv.New(t.Context(), root, sqlkv.MySQL, "hasp_locks")) // creates the table
	do(t, root,
		"CREATE DATABASE app",
		"CREATE TABLE app.other (id INT)",
		"CREATE TABLE app.hasp_locks LIKE hasp_locks",
		"CREATE USER app@'%' IDENTIFIED BY 'right'",
		"GRANT SELECT, INSERT, UPDATE, DELETE ON app.hasp_locks TO app@'%'",
		"GRANT SELECT ON app.other TO app@'%'",
	)

	at := "mysql://app:right@" + m.addr + "/app"
	ca, _, err := testcert.Write(t.TempDir(), "ca.example")
	await.Must(t, err)
	nobody := "mysql://app:hunter2@" + await.Value(crew.FreeAddr()) + "/app"
	for url, words := range map[string][]string{
		"mysql://":                          {"mysql://user:password@host:3306/database"},
		"mysql://app:hunter2@" + m.addr:     {"names no database"},
		"mysql://" + m.addr + "/app":        {"no user"},
		"mysql://app:hunter2@hunter2@h/app": {"%40"},
		"mysql://app:hunter2%@h/app":        {"%25"},
		"mysql://app:hunter2^@h/app":        {"percent-encode the password"},
		at + "?table=a-b":                   {"parameter table: want letters"},
		at + "?tls=maybe":                   {"tls", "skip-verify"},
		at + "?ca=/no/file":                 {"parameter ca", "no such file"},
		at + "?pool_size=0":                 {"from 1 to 1000"},
		at + "?parseTime=1":                 {"unknown parameter"},
	} {
		adaptertest.Invalid(t, url, words...)
	}
	for url, words := range map[string][]string{
		at + "?tls=preferred&ca=" + ca:           {"does not support TLS"},
		nobody:                                   {"refused", "is the server running there?"},
		"mysql://app:hunter2@" + m.addr + "/app": {"check user and password"},
		"mysql://root@" + m.addr + "/nope":       {"nope", "CREATE DATABASE"},
		at[:len(at)-3] + "mysql":                 {"GRANT"},
		at + "?table=new":                        {"administrator run: CREATE TABLE IF NOT EXISTS new"},
		at + "?table=other":                      {"name another one"},
		at + "?charset=utf9":                     {"check the parameter charset"},
	} {
		adaptertest.Fails(t, url, words...)
	}

	adaptertest.Works(t, at) // a user without CREATE, and the table exists

	do(t, root, "SET GLOBAL read_only = 1")
	adaptertest.Fails(t, at, "read-only replica", "primary")
	adaptertest.Fails(t, "mysql://root@"+m.addr+"/test", "read-only replica")
	do(t, root, "SET GLOBAL read_only = 0")

	// Connections that a URL opens commit by themselves, whatever the server's default is.
	do(t, root, "SET GLOBAL autocommit = 0")
	c := await.Value(hasp.Open(t.Context(), at, nil))
	l := await.Value(c.Lock(t.Context(), "key"))
	other := await.Value(hasp.Open(t.Context(), at, nil))
	await.ErrorIs(t, "autocommit is off in the server",
		await.ErrorOf(other.TryLock(t.Context(), "key")), hasp.ErrHeld)
	await.Must(t, errors.Join(l.Unlock(t.Context()), c.Close(), other.Close()))
}

// The holds of such connections would not be seen by others.
func TestAutocommitOffIsRefused(t *testing.T) {
	t.Parallel()
	m := startMariaDB(t)
	db := connect(t, "mysql", dsn(m.addr)+"&autocommit=false")
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
		db := connect(t, "mysql", dsn(m.addr)+"&innodb_snapshot_isolation=ON&tx_isolation="+
			url.QueryEscape("'"+isolation+"'"))
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
		ctx, db := t.Context(), connect(t, "sqlite3", file(t))
		db.SetMaxOpenConns(1)
		s := await.Value(sqlkv.New(ctx, db, sqlkv.SQLite, "locks"))
		do(t, db, setting)
		_, err := s.Put(ctx, "name", make([]byte, 1<<20), "")
		if err == nil || errors.Is(err, caslock.ErrConflict) || !strings.Contains(err.Error(), word) {
			t.Errorf("%s: %v, want %q", setting, err, word)
		}
	}
}

// The Client of a URL owns the database. It has no more connections than pool_size.
func TestCloseEndsTheConnections(t *testing.T) {
	t.Parallel()
	m := startMariaDB(t)
	root := connect(t, "mysql", dsn(m.addr))
	root.SetMaxOpenConns(1)

	c := await.Value(hasp.Open(t.Context(), "mysql://root@"+m.addr+"/test?pool_size=2", nil))
	l := await.Value(c.Lock(t.Context(), "key"))
	await.Must(t, errors.Join(l.Unlock(t.Context()), c.Close()))

	most := 0 // with root's, and the one that waited for the server
	await.Must(t, root.QueryRowContext(t.Context(), "SELECT VARIABLE_VALUE FROM "+
		"information_schema.global_status WHERE VARIABLE_NAME = 'MAX_USED_CONNECTIONS'").Scan(&most))
	if most > 4 {
		t.Errorf("%d connections at a time, want 2 and those of this test", most)
	}
	await.Until(t, "only one connection", func() bool {
		n := 0
		row := root.QueryRowContext(context.Background(),
			"SELECT COUNT(*) FROM information_schema.processlist WHERE user = 'root'")
		return row.Scan(&n) == nil && n == 1
	})
}
