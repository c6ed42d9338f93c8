package main

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

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
	d.sql("CREATE ROLE app LOGIN; GRANT ALL ON SCHEMA public TO app")(nil, 0)
	s.what = "one PostgreSQL"
	s.addrs = []string{server.Addr}
	s.left = d.left
	s.faults = d.faults
	s.openWays(func(addrs []string) string { return "pglock+postgres://app@" + addrs[0] + "/postgres" })
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
	add := func(least, most float64, name string, fail, heal step) {
		all.add(least, most, "the server: "+name, onServers(1, fail, heal))
	}
	if losing {
		add(0.5, 1, "every row deleted", d.sql("DELETE FROM hasp_locks"), nil)
		add(0.5, 1, "killed, and started with data of some seconds ago", d.rewind, d.start)
		return
	}

	all.processes()
	all.links()
	add(0.2, 2, "killed, and started again", d.kill, d.start)
	// The processes keep their connections.
	add(0.6, 3, "stopped", d.signal(syscall.SIGSTOP), d.signal(syscall.SIGCONT))
	add(0.5, 0.5, "connections of all clients ended", d.sql(kick), nil)
	add(0.6, 2, "read-only",
		d.sql("ALTER SYSTEM SET default_transaction_read_only = on; SELECT pg_reload_conf()"),
		d.sql("ALTER SYSTEM RESET default_transaction_read_only; SELECT pg_reload_conf()"))
	add(0.6, 2, "two connections for all clients together",
		d.sql("ALTER ROLE app CONNECTION LIMIT 2; "+kick),
		d.sql("ALTER ROLE app CONNECTION LIMIT -1"))
}

// sql returns a step that runs statements one after another. Every statement has its own
// transaction.
func (d *database) sql(statements string) step {
	return func(*run, int) {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		for sql := range strings.SplitSeq(statements, "; ") {
			if err := d.server.Exec(ctx, sql); err != nil {
				d.Fatalf("%s: %v", sql, err)
			}
		}
	}
}

// signal returns a step that sends a signal to all processes of the server.
func (d *database) signal(sig syscall.Signal) step {
	return func(*run, int) { d.Check(d.server.SignalAll(sig)) }
}

func (d *database) kill(*run, int) { d.server.Kill() }

func (d *database) start(*run, int) { d.Check(d.server.Start()) }

// rewind kills the server after a while, and gives it the data that it had before. So locks are
// lost that were taken meanwhile.
func (d *database) rewind(r *run, _ int) {
	d.server.Kill()
	if out, err := exec.Command("cp", "-a", d.data, d.data+".copy").CombinedOutput(); err != nil {
		d.Fatalf("cp: %v: %s", err, out)
	}
	d.start(r, 0)
	time.Sleep(r.lasts)
	d.server.Kill()
	d.Check(os.RemoveAll(d.data))
	d.Check(os.Rename(d.data+".copy", d.data))
}
