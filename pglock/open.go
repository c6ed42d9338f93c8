package pglock

import (
	"context"
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

func init() { hasp.Register("pglock", open, slices.Concat(ownParams, libpqParams)...) }

const (
	defaultPoolSize   = 10
	maxPoolSize       = 1000
	minConnectTimeout = 500 * time.Millisecond // for each host
	checkIdle         = 100 * time.Millisecond // a connection that was idle for longer is checked first

	// form is how a URL looks.
	form = "pglock+postgres://user:password@host:port/database"
)

// invalid returns an ErrInvalid with a formatted text.
func invalid(text string, args ...any) error {
	return fmt.Errorf("%w: "+text, append([]any{backend.ErrInvalid}, args...)...)
}

// ownParams are hasp's parameters, and libpqParams are those that PostgreSQL documents.
var (
	ownParams   = []string{"schema", "table", "pool_size"}
	libpqParams = []string{
		"host", "port", "dbname", "user", "password", "passfile", "service", "servicefile",
		"connect_timeout", "application_name", "target_session_attrs",
		"sslmode", "sslrootcert", "sslcert", "sslkey", "sslpassword", "sslsni", "sslnegotiation",
		"channel_binding",
	}
)

// tracer counts statements in tests.
var tracer pgx.QueryTracer

// The function open returns a driver for c, which comes from a URL of this strategy.
func open(ctx context.Context, c hasp.Config) (backend.Driver, error) {
	o := Options{Schema: c.Params["schema"], Table: c.Params["table"]}
	if err := o.check(); err != nil {
		return nil, err
	}
	cfg, err := parse(ctx, c)
	if err != nil {
		return nil, err
	}

	cfg.ConnConfig.Tracer = tracer
	var d *driver // is set below, before the pool makes its first connection
	// The pool calls ShouldPing for each idle connection before its use. If the result is true, the
	// pool sends a ping, and drops the connection if the ping fails.
	cfg.ShouldPing = func(_ context.Context, p pgxpool.ShouldPingParams) bool {
		// A ping takes a round trip. So call CheckConn, which takes a millisecond, and ping only if
		// it has found that the server has ended the connection. CheckConn is deprecated because it
		// does not notice that a server has stopped answering; the type health does. If the
		// connection was just in use, not even the millisecond is spent, because it would be lost
		// at each hand-over of a busy key.
		isFresh := p.IdleDuration <= checkIdle || d.listener.vouches(p.IdleDuration)
		return !isFresh && p.Conn.PgConn().CheckConn() != nil //lint:ignore SA1019 see above
	}

	cfg.BeforeConnect = func(_ context.Context, cc *pgx.ConnConfig) error {
		withoutCancels(cc, func() bool { return d.bouncer.Load() })
		return nil
	}
	cfg.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		// Set a deadline, because ctx has no deadline and the connection already takes up a place
		// in the pool.
		within, cancel := context.WithTimeout(ctx, cfg.ConnConfig.ConnectTimeout)
		defer cancel()
		return d.notice(within, conn, true)
	}

	pool, err := pgxpool.NewWithConfig(context.WithoutCancel(ctx), cfg)
	if err != nil {
		return nil, diagnose(err)
	}
	d, err = newDriver(pool, true, o)
	if err != nil {
		pool.Close()
		return nil, err
	}
	if err := d.setUp(ctx); err != nil {
		return nil, err
	}
	return d, nil
}

// parse returns the settings of the pool, from the node and the parameters of c. It passes on only
// the parameters in libpqParams, because pgx would send any other parameter to the server as a
// setting. The deadline of ctx comes from the Client's Timeout.
func parse(ctx context.Context, c hasp.Config) (*pgxpool.Config, error) {
	if len(c.Nodes) != 1 {
		return nil, invalid("pglock takes one node, got %d: want %s", len(c.Nodes), form)
	}
	scheme, place, ok := strings.Cut(c.Nodes[0], "://")
	if !ok || scheme != "postgres" && scheme != "postgresql" {
		return nil, invalid("the node is no address of a PostgreSQL: want %s, "+
			"or in a Config the same without pglock+", form)
	}

	// The errors below do not repeat the URL, which may contain a password.
	if strings.ContainsAny(place, "?#") {
		return nil, invalid("the node has a question mark or a number sign: " +
			"put parameters into params, and in a password write %%3F or %%23")
	}
	if strings.Count(place, "@") > 1 {
		return nil, invalid("the node has several @: in a password write %%40")
	}

	size, err := poolSize(c.Params["pool_size"])
	if err != nil {
		return nil, err
	}
	query := url.Values{}
	for name, value := range c.Params {
		if slices.Contains(libpqParams, name) {
			query.Set(name, value)
		}
	}

	// As the package comment says, several hosts have another default of target_session_attrs.
	hosts := c.Params["host"]
	if hosts == "" {
		// The hosts stand between the @, if any, and the slash.
		hosts, _, _ = strings.Cut(place[strings.LastIndex(place, "@")+1:], "/")
	}
	if strings.Contains(hosts, ",") && !query.Has("target_session_attrs") {
		query.Set("target_session_attrs", "read-write")
	}

	cfg, err := pgxpool.ParseConfig("postgres://" + place + "?" + query.Encode())
	if err != nil {
		userinfo, _, _ := strings.Cut(place, "@")
		_, password, _ := strings.Cut(userinfo, ":")
		return nil, badConfig(err, password, c.Params["password"], c.Params["sslpassword"])
	}

	cfg.MaxConns = int32(size)
	if cfg.ConnConfig.ConnectTimeout == 0 {
		cfg.ConnConfig.ConnectTimeout = timeoutPerHost(ctx, cfg.ConnConfig)
	}
	return cfg, nil
}

// timeoutPerHost returns the default of connect_timeout. Hosts are tried one after another. So the
// time until the deadline of ctx is divided by the number of hosts, and a host that does not answer
// leaves time for the next host. A short default also helps in an outage, because each connection
// attempt takes up a place in the pool for this time.
func timeoutPerHost(ctx context.Context, cfg *pgx.ConnConfig) time.Duration {
	hosts := map[string]bool{fmt.Sprint(cfg.Host, ":", cfg.Port): true}
	for _, f := range cfg.Fallbacks {
		hosts[fmt.Sprint(f.Host, ":", f.Port)] = true // with sslmode=prefer, each host is listed twice
	}
	timeout := hasp.DefaultTimeout
	if end, ok := ctx.Deadline(); ok {
		timeout = time.Until(end)
	}
	return max(timeout/time.Duration(len(hosts)), minConnectTimeout)
}

// poolSize returns the value of the parameter pool_size, or its default if s is empty.
func poolSize(s string) (int, error) {
	if s == "" {
		return defaultPoolSize, nil
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < 1 || n > maxPoolSize {
		return 0, invalid("parameter pool_size=%q: want a number from 1 to %d", s, maxPoolSize)
	}
	return n, nil
}
