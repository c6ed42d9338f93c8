package main

import (
	"context"
	"strings"
	"syscall"

	"github.com/hasplock/hasp/internal/pgtest"
	"github.com/hasplock/hasp/internal/redistest"
)

type database struct {
	*redistest.Lab
	server *pgtest.Server
}

func (s *store) openPostgres() {
	d := &database{s.Lab, pgtest.Start(s.Lab, "max_connections=150")}
	d.sql("CREATE ROLE app LOGIN; GRANT ALL ON SCHEMA public TO app")(nil, 0)
	s.what = "one PostgreSQL"
	s.addrs = []string{d.server.Addr}
	s.left = d.left
	d.faults(&s.faults)
	s.openWays(func(addrs []string) string {
		return "pglock+postgres://app@" + addrs[0] + "/postgres"
	})
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

func (d *database) faults(all *catalog) {
	all.processes()
	all.links()
	add := func(name string, least, most float64, takes loss, fail, heal step) {
		all.add("the server: "+name, least, most, takes, onServers(1, fail, heal))
	}
	add("every row deleted", 0.5, 1, locks, d.sql("DELETE FROM hasp_locks"), nil)
	add("killed, and started again", 0.2, 2, nothing,
		func(*run, int) { d.server.Kill() }, func(*run, int) { d.Check(d.server.Start()) })
	// The processes keep their connections.
	add("stopped", 0.6, 3, nothing, d.signal(syscall.SIGSTOP), d.signal(syscall.SIGCONT))
	add("two connections for all clients together", 0.6, 2, nothing,
		d.sql("ALTER ROLE app CONNECTION LIMIT 2; "+kick),
		d.sql("ALTER ROLE app CONNECTION LIMIT -1"))
}

// sql returns a step that runs statements one after another. Every statement has its own
// transaction.
func (d *database) sql(statements string) step {
	return func(*run, int) {
		for sql := range strings.SplitSeq(statements, "; ") {
			d.Check(d.server.Exec(context.Background(), sql))
		}
	}
}

// signal returns a step that sends a signal to all processes of the server.
func (d *database) signal(sig syscall.Signal) step {
	return func(*run, int) { d.Check(d.server.SignalAll(sig)) }
}
