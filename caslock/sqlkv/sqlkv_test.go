//go:build cgo && unix

package sqlkv_test

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	_ "github.com/mattn/go-sqlite3"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/caslock"
	"github.com/hasplock/hasp/caslock/internal/adaptertest"
	"github.com/hasplock/hasp/caslock/sqlkv"
	_ "github.com/hasplock/hasp/caslock/sqlkv/mysql"
	"github.com/hasplock/hasp/conformance"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/crew"
)

func init() { mysql.SetLogger(log.New(io.Discard, "", 0)) } // it logs each connection that ends

// connect returns a database that is closed with the test.
func connect(t *testing.T, driver, dsn string) *sql.DB {
	t.Helper()
	db := await.Value(sql.Open(driver, dsn))
	t.Cleanup(func() { db.Close() })
	return db
}

// file returns the DSN of a new SQLite file.
func file(t *testing.T) string { return "file:" + t.TempDir() + "/db" }

func TestConformanceSQLite(t *testing.T) {
	t.Parallel()
	conformance.Run(t, conformance.Harness{
		Store: func(context.Context) (string, func(), error) {
			return file(t) + "?_busy_timeout=10000&_journal_mode=WAL&_synchronous=OFF&_txlock=immediate", nil, nil
		},
		Open: func(ctx context.Context, dsn string) (backend.Driver, error) {
			db := await.Value(sql.Open("sqlite3", dsn))
			db.SetMaxIdleConns(16)
			return sqlkv.NewDriver(ctx, db, sqlkv.SQLite, "hasp_locks")
		},
	})
}

// mariadb is a server process with a directory of its own.
type mariadb struct {
	dir, addr string
	cmd       *exec.Cmd
	ended     <-chan struct{}
}

func dsn(addr string) string { return "root@tcp(" + addr + ")/test?timeout=3s" }

// start starts the server, in a new data directory if there is none.
func (m *mariadb) start(ctx context.Context) (err error) {
	m.addr = cmp.Or(m.addr, await.Value(crew.FreeAddr()))
	data := filepath.Join(m.dir, "data")
	if _, err := os.Stat(data); err != nil {
		// Servers that share a directory for temporary tables remove each other's.
		out, err := exec.CommandContext(ctx, "mariadb-install-db", "--no-defaults", "--user=root",
			"--datadir="+data, "--tmpdir="+m.dir, "--auth-root-authentication-method=normal",
			"--innodb-log-file-size=8M").CombinedOutput()
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
	}
	port := strings.TrimPrefix(m.addr, "127.0.0.1:")
	m.cmd = exec.Command("mariadbd", "--no-defaults", "--user=root", "--datadir="+data,
		"--tmpdir="+m.dir, "--bind-address=127.0.0.1", "--port="+port,
		"--socket="+filepath.Join(m.dir, "sock"), "--innodb-log-file-size=8M",
		"--max-connections=1000", "--skip-name-resolve")
	if m.ended, err = crew.StartServer(m.cmd); err != nil {
		return err
	}
	db := await.Value(sql.Open("mysql", dsn(m.addr)))
	defer db.Close()
	for ctx.Err() == nil {
		if _, err = db.ExecContext(ctx, "SELECT 1"); err == nil {
			return nil
		}
		select {
		case <-m.ended:
			return fmt.Errorf("mariadbd has ended: %w", err)
		case <-time.After(20 * time.Millisecond):
		}
	}
	return err
}

// kill kills the server, as a crash does.
func (m *mariadb) kill() {
	_ = m.cmd.Process.Kill()
	<-m.ended
}

func TestConformanceMariaDB(t *testing.T) {
	t.Parallel()
	needMariaDB(t)
	m := &mariadb{}
	start := func(ctx context.Context, data bool) (string, error) {
		if !data {
			m.dir = t.TempDir()
		}
		err := m.start(ctx)
		return m.addr, err
	}
	h := adaptertest.Harness(start, m.kill, func(addr string) string {
		return "mysql://root@" + addr + "/test"
	})
	h.Kick = func(ctx context.Context, addr string) error {
		// The error says that it has ended its own connection, too.
		_, _ = connect(t, "mysql", dsn(addr)).ExecContext(ctx, "KILL USER root")
		return ctx.Err()
	}
	conformance.Run(t, h)
}

func TestNewIsChecked(t *testing.T) {
	memory := connect(t, "sqlite3", ":memory:")
	db := connect(t, "sqlite3", file(t))
	for what, c := range map[string]struct {
		db      *sql.DB
		dialect sqlkv.Dialect
		table   string
	}{
		"no database":   {nil, sqlkv.SQLite, "locks"},
		"in memory":     {memory, sqlkv.SQLite, "locks"},
		"no dialect":    {db, sqlkv.Dialect{}, "locks"},
		"a wrong table": {db, sqlkv.SQLite, "a; DROP TABLE b"},
	} {
		if _, err := sqlkv.New(t.Context(), c.db, c.dialect, c.table); !errors.Is(err, backend.ErrInvalid) {
			t.Errorf("%s: %v, want ErrInvalid", what, err)
		}
	}
}

// A reboot sets the clock back, so the time of an earlier row tells no age.
func TestAgeOfARowFromBeforeTheBoot(t *testing.T) {
	ctx, db := t.Context(), connect(t, "sqlite3", file(t))
	s := await.Value(sqlkv.New(ctx, db, sqlkv.SQLite, "locks"))
	for boot, known := range map[string]bool{"": true, "another boot": false} {
		await.Value(s.Put(ctx, "name"+boot, []byte("value"), ""))
		await.Value(db.ExecContext(ctx, "UPDATE locks SET at = 0, version = ? || version WHERE name = ?", boot, "name"+boot))
		if e, err := s.Get(ctx, "name"+boot); err != nil || (e.Age > 0) != known {
			t.Errorf("boot %q: age %v, %v", boot, e.Age, err)
		}
	}
}

func ExampleNew() {
	ctx := context.Background()
	var db *sql.DB // of a MariaDB or a MySQL
	store, err := sqlkv.New(ctx, db, sqlkv.MySQL, "hasp_locks")
	if err != nil {
		panic(err)
	}
	locks, err := caslock.New(ctx, store, nil)
	if err != nil {
		panic(err)
	}
	defer locks.Close()
}
