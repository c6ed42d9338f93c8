//go:build cgo && unix

package sqlkv_test

import (
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

func open(ctx context.Context, dialect sqlkv.Dialect, name, dsn string) (backend.Driver, error) {
	db := await.Value(sql.Open(name, dsn))
	db.SetMaxOpenConns(16)
	db.SetMaxIdleConns(16)
	return sqlkv.NewDriver(ctx, db, dialect, "hasp_locks")
}

func TestConformanceSQLite(t *testing.T) {
	t.Parallel()
	conformance.Run(t, conformance.Harness{
		Store: func(context.Context) (string, func(), error) {
			return filepath.Join(t.TempDir(), "locks.db"), nil, nil
		},
		Open: func(ctx context.Context, file string) (backend.Driver, error) {
			return open(ctx, sqlkv.SQLite, "sqlite3", "file:"+file+"?_busy_timeout=10000&_journal_mode=WAL&_synchronous=OFF&_txlock=immediate")
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
func (m *mariadb) kill() error {
	err := m.cmd.Process.Kill()
	<-m.ended
	return err
}

func TestConformanceMariaDB(t *testing.T) {
	t.Parallel()
	if !conformance.Child() {
		needMariaDB(t)
	}
	m := &mariadb{}
	h := adaptertest.Harness(func(addr string) string { return "mysql://root@" + addr + "/test" })
	h.Store = func(ctx context.Context) (string, func(), error) {
		m.dir = t.TempDir()
		m.addr = await.Value(crew.FreeAddr())
		return m.addr, func() { m.kill() }, m.start(ctx)
	}
	h.Stop = func(context.Context, string) error { return m.kill() }
	h.Start = func(ctx context.Context, _ string, data bool) error {
		if !data {
			m.dir = t.TempDir()
		}
		return m.start(ctx)
	}
	h.Kick = func(ctx context.Context, addr string) error {
		db := await.Value(sql.Open("mysql", dsn(addr)))
		defer db.Close()
		_, _ = db.ExecContext(ctx, "KILL USER root") // an error: it has ended its own connection, too
		return ctx.Err()
	}
	conformance.Run(t, h)
}

func TestNewIsChecked(t *testing.T) {
	memory := await.Value(sql.Open("sqlite3", ":memory:"))
	defer memory.Close()
	db := await.Value(sql.Open("sqlite3", "file:"+t.TempDir()+"/db"))
	defer db.Close()
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
	ctx, db := t.Context(), await.Value(sql.Open("sqlite3", "file:"+t.TempDir()+"/db"))
	defer db.Close()
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
