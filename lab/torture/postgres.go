package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/hasplock/hasp/internal/pgtest"
	"github.com/hasplock/hasp/internal/redistest"
)

type database struct {
	*redistest.Lab
	server *pgtest.Server
	data   string // the server's data directory
}

func (s *store) openPostgres() {
	server := pgtest.Start(s.Lab, "max_connections=150")
	d := &database{s.Lab, server, filepath.Dir(server.File("PG_VERSION"))}
	s.Check(d.sql("CREATE ROLE app LOGIN; GRANT ALL ON SCHEMA public TO app")())
	s.what, s.addrs, s.left, s.faults = "one PostgreSQL", []string{server.Addr}, d.left, d.faults
	s.openWays(func(addrs []string) string { return "pglock+" + "postgres://app@" + addrs[0] + "/postgres" })
}

// left lists the rows of held keys, and the sessions that listen. The row of a free key stays,
// because it stores the fence. The sweeper's row of the empty key is omitted, because its term ends
// within a minute.
func (d *database) left(ctx context.Context) []string {
	all, err := d.server.Rows(ctx, `SELECT 'row of ' || encode(key, 'escape') FROM hasp_locks WHERE expires > clock_timestamp() AND key <> ''
		UNION ALL SELECT 'listener ' || pid FROM pg_stat_activity WHERE query ~* '^listen' AND pid <> pg_backend_pid()`)
	d.Check(err)
	return all
}

// kick is the statement that ends the connections of all clients.
const kick = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'app'"

func (d *database) faults(all *catalog, losing bool) {
	add := func(least, most float64, name string, inject inject) {
		all.add(server, least, most, "the server: "+name, inject)
	}
	if losing {
		add(0.5, 1, "every row deleted", onAll(d.sql("DELETE FROM hasp_locks"), nil))
		add(0.5, 1, "the table truncated", onAll(d.sql("TRUNCATE hasp_locks"), nil))
		add(0.5, 1, "killed, and started with data of some seconds ago", d.restarted(true))
		return
	}
	all.processes()
	all.links()
	add(0.2, 2, "killed, and started again", d.restarted(false))
	// The processes keep their connections.
	add(0.6, 3, "stopped", onAll(d.signal(syscall.SIGSTOP), d.signal(syscall.SIGCONT)))
	add(0.5, 0.5, "connections of all clients ended", onAll(d.sql(kick), nil))
	add(0.6, 2, "read-only", onAll(
		d.sql("ALTER SYSTEM SET default_transaction_read_only = on; SELECT pg_reload_conf()"),
		d.sql("ALTER SYSTEM RESET default_transaction_read_only; SELECT pg_reload_conf()")))
	add(0.6, 2, "the table locked by another session", d.holds("LOCK TABLE hasp_locks IN ACCESS EXCLUSIVE MODE"))
	add(0.6, 2, "every key guarded by another session's transaction", d.holds("SELECT FROM hasp_locks FOR KEY SHARE"))
	add(0.6, 2, "two connections for all clients together", onAll(
		d.sql("ALTER ROLE app CONNECTION LIMIT 2; "+kick), d.sql("ALTER ROLE app CONNECTION LIMIT -1")))
	add(0.3, 0.3, "VACUUM FULL of the table", onAll(d.sql("VACUUM FULL hasp_locks"), nil))
}

// sql returns a function that runs the given statements one after another. Every statement has its
// own transaction.
func (d *database) sql(statements string) func() error {
	return func() error {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		for sql := range strings.SplitSeq(statements, "; ") {
			if err := d.server.Exec(ctx, sql); err != nil {
				return fmt.Errorf("%s: %w", sql, err)
			}
		}
		return nil
	}
}

// signal returns a function that sends a signal to all processes of the server.
func (d *database) signal(sig syscall.Signal) func() error {
	return func() error { return d.server.SignalAll(sig) }
}

// holds returns a fault that runs a statement in a transaction, and leaves the transaction open.
func (d *database) holds(sql string) inject {
	return func(n *nemesis) *injection {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		c, err := pgx.Connect(ctx, d.server.URL())
		if err == nil {
			_, err = c.Exec(ctx, "BEGIN; "+sql)
		}
		n.Check(err)
		return ofAll(func() {
			defer cancel()
			n.Check(c.Close(ctx)) // rolls back; another fault may have ended the session
		})
	}
}

// restarted returns a fault that kills the server, and later starts the server. If old is true, the
// server starts with a copy of its data that was made earlier.
func (d *database) restarted(old bool) inject {
	return func(n *nemesis) *injection {
		if old {
			n.Check(d.copied())
			time.Sleep(n.lasts) // clients go on, so the copy becomes out of date
		}
		d.server.Kill()
		return ofAll(func() {
			if old {
				n.Check(os.RemoveAll(d.data))
				n.Check(os.Rename(d.data+".copy", d.data))
			}
			n.Check(d.server.Start())
		})
	}
}

// copied kills the server, copies its data, and starts the server again.
func (d *database) copied() error {
	d.server.Kill()
	if out, err := exec.Command("cp", "-a", d.data, d.data+".copy").CombinedOutput(); err != nil {
		return fmt.Errorf("cp: %w: %s", err, out)
	}
	return d.server.Start()
}
