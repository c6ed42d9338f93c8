//go:build unix

package integrations

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"net"
	"os/exec"
	"os/user"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	_ "github.com/go-sql-driver/mysql"
	_ "github.com/mattn/go-sqlite3"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/fence"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/crew"
	"github.com/hasplock/hasp/internal/pgtest"
)

// databases open the databases that fence.SQL works with.
var databases = map[string]func(t *testing.T) *sql.DB{
	"PostgreSQL": func(t *testing.T) *sql.DB { return connect(t, "pgx", pgtest.Start(t).URL()) },
	"SQLite": func(t *testing.T) *sql.DB {
		return connect(t, "sqlite3", filepath.Join(t.TempDir(), "db")+"?_busy_timeout=60000")
	},
	"MySQL": mariadb,
}

// mariadb starts a server. If none is installed, the test is skipped.
func mariadb(t *testing.T) *sql.DB {
	path, err := exec.LookPath("mariadbd")
	if err != nil {
		t.Skip("not installed: ", err)
	}
	addr := await.Value(crew.FreeAddr())
	host, port, err := net.SplitHostPort(addr)
	must(t, err)
	var log strings.Builder
	cmd := exec.CommandContext(context.Background(), path, "--no-defaults",
		"--datadir="+t.TempDir(), "--socket=s", "--skip-grant-tables",
		"--bind-address="+host, "--port="+port, "--user="+await.Value(user.Current()).Username)
	cmd.Stderr = &log
	ended := await.Value(crew.StartServer(cmd))
	t.Cleanup(func() { cmd.Process.Kill(); <-ended })
	db := connect(t, "mysql", "tcp("+addr+")/")
	await.Success(t, "the server answers", func() error {
		select {
		case <-ended:
			t.Fatal(log.String())
		default:
		}
		return db.PingContext(t.Context())
	})
	await.Value(db.ExecContext(t.Context(), "CREATE DATABASE test"))
	return connect(t, "mysql", "tcp("+addr+")/test")
}

func TestFence(t *testing.T) {
	for name, open := range databases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := open(t)
			guard := fence.SQL{MySQL: name == "MySQL"}
			key := "TEXT"
			if guard.MySQL {
				key = "VARBINARY(255)"
			}
			for _, statement := range []string{
				"CREATE TABLE fences (resource " + key + " PRIMARY KEY, fence BIGINT NOT NULL)",
				"CREATE TABLE accounts (id BIGINT PRIMARY KEY, balance BIGINT NOT NULL)",
				"INSERT INTO accounts VALUES (7, 100)",
				"CREATE TABLE log (n BIGINT PRIMARY KEY, fence BIGINT NOT NULL)",
			} {
				await.Value(db.ExecContext(t.Context(), statement))
			}
			testOrder(t, db, guard)
			testRollback(t, db, guard)
			if !guard.MySQL {
				testBalance(t, db)
			}
		})
	}
}

// Transactions of many holders run at the same time. Each sees all that earlier ones have written:
// otherwise two rows of the log would have the same number. No transaction follows one with a
// larger fence.
func testOrder(t *testing.T, db *sql.DB, guard fence.SQL) {
	write := func(f int) error {
		return guard.Do(fence.With(t.Context(), uint64(f)), db, "log",
			func(ctx context.Context, tx *sql.Tx) error {
				_, err := tx.ExecContext(ctx,
					fmt.Sprint("INSERT INTO log (n, fence) SELECT COUNT(*) + 1, ", f, " FROM log"))
				return err
			})
	}
	must(t, write(1))
	var all sync.WaitGroup
	for f := 1; f <= 8; f++ {
		all.Go(func() {
			for range 10 {
				if err := write(f); err != nil && !errors.Is(err, fence.ErrStale) {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()

	var late, last int
	must(t, db.QueryRowContext(t.Context(), "SELECT COUNT(*) FROM log a, log b "+
		"WHERE a.n < b.n AND a.fence > b.fence").Scan(&late))
	must(t, db.QueryRowContext(t.Context(), "SELECT COUNT(*) FROM log WHERE fence = 8").Scan(&last))
	if late > 0 || last != 10 {
		t.Errorf("%d writes are late, and the last holder made %d of 10", late, last)
	}
}

// A transaction that is rolled back leaves no fence. Resources are told apart by every byte.
func testRollback(t *testing.T, db *sql.DB, guard fence.SQL) {
	failed := errors.New("failed")
	do := func(f uint64, resource string, err error) error {
		return guard.Do(fence.With(t.Context(), f), db, resource,
			func(context.Context, *sql.Tx) error {
				return err
			})
	}
	if err := do(9, "R", failed); err != failed {
		t.Errorf("got %v, want the error of the write", err)
	}
	must(t, do(5, "R", nil))
	must(t, do(5, "R", nil)) // the same fence may write again
	must(t, do(4, "r", nil))
	must(t, do(3, "R ", nil))
	var stale *fence.StaleError
	want := fence.StaleError{Resource: "R", Fence: 4, Seen: 5}
	if err := do(4, "R", nil); !errors.As(err, &stale) || *stale != want {
		t.Errorf("a smaller fence: %v", err)
	}
	if err := do(math.MaxInt64+1, "R", nil); err == nil || errors.Is(err, fence.ErrStale) {
		t.Errorf("a fence above every BIGINT: %v", err)
	}
}

// The example of the page runs.
func testBalance(t *testing.T, db *sql.DB) {
	must(t, setBalance(fence.With(t.Context(), 9), db, 7, 80))
	if err := setBalance(fence.With(t.Context(), 8), db, 7, 95); !errors.Is(err, hasp.ErrLost) {
		t.Errorf("the late write returned %v", err)
	}
	var balance int64
	must(t, db.QueryRowContext(t.Context(),
		"SELECT balance FROM accounts WHERE id = 7").Scan(&balance))
	if balance != 80 {
		t.Errorf("the balance is %d, want 80", balance)
	}
}
