// Package mysql registers the strategy mysql, which keeps locks in a table of a MariaDB or a MySQL:
//
//	mysql://user:password@host:3306/database?table=locks&ttl=10s
//
// Package [sqlkv] says what the locks guarantee, and what rights the user needs.
//
// # Parameters
//
//   - table (default hasp_locks) is created unless it exists.
//   - pool_size (default 10) is the largest number of connections.
//   - tls is true, skip-verify, preferred, or false, which is the default.
//   - ca is a file with the certificates that the server's certificate is checked against. It
//     implies tls=true.
//   - charset, allowCleartextPasswords, allowNativePasswords and connectionAttributes are those of
//     github.com/go-sql-driver/mysql.
//
// In user, password and database, percent-encode special characters, such as %40 for "@".
package mysql

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"database/sql"
	"net"
	"net/url"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/caslock/internal/adapter"
	"github.com/hasplock/hasp/caslock/sqlkv"
)

const (
	form            = "mysql://user:password@host:3306/database"
	defaultTable    = "hasp_locks"
	defaultPoolSize = 10
	maxPoolSize     = 1000
)

// driverParams are those that go-sql-driver documents.
var driverParams = []string{
	"tls", "charset", "allowCleartextPasswords", "allowNativePasswords", "connectionAttributes",
}

var tlsValues = []string{"true", "skip-verify", "preferred", "false"}

func init() { hasp.Register("mysql", open, append(driverParams, "table", "pool_size", "ca")...) }

// The function open returns a driver for c, which comes from a URL of this strategy.
func open(ctx context.Context, c hasp.Config) (backend.Driver, error) {
	cfg, err := parse(ctx, c)
	if err != nil {
		return nil, err
	}

	params := adapter.Params{Values: c.Params}
	size := params.Int("pool_size", defaultPoolSize, maxPoolSize)
	if params.Err != nil {
		return nil, params.Err
	}

	connector, err := mysql.NewConnector(cfg)
	if err != nil {
		return nil, adapter.Invalid("%v", err)
	}
	db := sql.OpenDB(connector)
	db.SetMaxOpenConns(size)
	db.SetMaxIdleConns(size)
	return sqlkv.NewDriver(ctx, db, sqlkv.MySQL, cmp.Or(c.Params["table"], defaultTable))
}

// parse returns the settings of connections. Its errors do not repeat the node, which may contain a
// password.
func parse(ctx context.Context, c hasp.Config) (*mysql.Config, error) {
	u, err := parseNode(c)
	if err != nil {
		return nil, err
	}
	if t := c.Params["tls"]; t != "" && !slices.Contains(tlsValues, t) {
		return nil, adapter.Invalid("parameter tls=%q: want one of %s",
			t, strings.Join(tlsValues, ", "))
	}

	// Only ParseDSN reads the driver's parameters from text. So format a DSN, and parse it.
	dsn := mysql.NewConfig()
	dsn.User = u.User.Username()
	dsn.Passwd, _ = u.User.Password()
	dsn.Net = "tcp"
	dsn.Addr = net.JoinHostPort(u.Hostname(), cmp.Or(u.Port(), "3306"))
	dsn.DBName = databaseOf(u)
	dsn.Params = map[string]string{}
	for name, value := range c.Params {
		if slices.Contains(driverParams, name) {
			dsn.Params[name] = value
		}
	}
	cfg, err := mysql.ParseDSN(dsn.FormatDSN())
	if err != nil {
		return nil, adapter.Invalid("parameters: %v", err)
	}

	cfg.Params = map[string]string{"autocommit": "1"} // whatever the server's default is
	cfg.Logger = &mysql.NopLogger{}                   // otherwise each lost connection is logged
	if end, ok := ctx.Deadline(); ok {
		// Bound each dial, which may outlive the call that it began for.
		cfg.Timeout = time.Until(end)
	}
	return cfg, trust(cfg, c.Params["ca"], u.Hostname())
}

// parseNode returns the only node of c as a URL with a user, a host and a database.
func parseNode(c hasp.Config) (*url.URL, error) {
	node, err := adapter.Node(c, form)
	if err != nil {
		return nil, err
	}

	// A password may contain these characters without the encoding of URLs. Then url.Parse would
	// find the end of the password, or of the node, at a wrong place.
	place := strings.TrimPrefix(node, "mysql://")
	if strings.ContainsAny(place, "?#") || strings.Count(place, "@") > 1 {
		return nil, adapter.Invalid("the node has several @, or a ? or #: in a password write %%40, %%3F "+
			"or %%23, and put parameters into params: want %s", form)
	}

	u, err := url.Parse("mysql://" + place)
	if err != nil {
		return nil, adapter.Invalid("the node is malformed: want %s; percent-encode the password "+
			"(%%40 for @, %%2F for /, %%25 for %%, …)", form)
	}
	database := databaseOf(u)
	switch {
	case u.Hostname() == "":
		return nil, adapter.Invalid("the node has no host: want %s", form)
	case database == "" || strings.Contains(database, "/"):
		return nil, adapter.Invalid("the node names no database after the host: want %s", form)
	case u.User.Username() == "":
		return nil, adapter.Invalid("the node has no user: want %s", form)
	}
	return u, nil
}

// databaseOf returns the name of the database in a URL.
func databaseOf(u *url.URL) string { return strings.TrimPrefix(u.Path, "/") }

// trust replaces the settings of the parameter tls, if the parameter ca names a file: only the
// certificates in the file are trusted, and the server's certificate must be for the host. So the
// parameter ca also overrides tls=skip-verify, which would accept any certificate, and
// tls=preferred, which would accept a server without TLS.
func trust(cfg *mysql.Config, file, host string) error {
	if file == "" {
		return nil
	}

	pem, err := os.ReadFile(file)
	if err != nil {
		return adapter.Invalid("parameter ca: %v", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return adapter.Invalid("parameter ca: %s has no certificate in PEM", file)
	}
	cfg.TLS = &tls.Config{RootCAs: pool, ServerName: host}
	cfg.AllowFallbackToPlaintext = false
	return nil
}
