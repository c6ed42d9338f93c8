// Package sqlite registers the strategy sqlite, which keeps locks in an SQLite file:
//
//	sqlite:///var/lib/app/locks.db?ttl=10s
//
// Give locks a file of their own: package [sqlkv] says why, and what the locks guarantee. The file
// is created unless it exists. It must be on a local disk, and two more files appear beside it. The
// table's name is the parameter table (default hasp_locks).
//
// The package uses modernc.org/sqlite, which needs no C compiler. With another driver, call
// sqlkv.New.
package sqlite

import (
	"cmp"
	"context"
	"database/sql"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"

	_ "modernc.org/sqlite" // the driver

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/caslock/internal/adapter"
	"github.com/hasplock/hasp/caslock/sqlkv"
)

const (
	form         = "sqlite:///directory/locks.db"
	defaultTable = "hasp_locks"
)

// settings are the pragmas of each connection. A write that waits for another process polls for up
// to busy_timeout, in milliseconds. It comes before journal_mode, whose change needs a lock as
// well. With synchronous NORMAL, the last writes may be missing after the host has crashed. That is
// safe, because the crash also ends all holders.
const settings = "?_pragma=busy_timeout(10000)&_pragma=journal_mode(WAL)" +
	"&_pragma=synchronous(NORMAL)&_txlock=immediate"

func init() { hasp.Register("sqlite", open, "table") }

// The function open returns a driver for c, which comes from a URL of this strategy.
func open(ctx context.Context, c hasp.Config) (backend.Driver, error) {
	file, err := parse(c)
	if err != nil {
		return nil, err
	}

	// A file is named by a URI, in which SQLite decodes special characters.
	name := url.URL{Path: filepath.ToSlash(file)}
	db, err := sql.Open("sqlite", "file:"+name.EscapedPath()+settings)
	if err != nil {
		return nil, err
	}

	// SQLite has one writer at a time, and one that waits polls. So the calls of this process take
	// turns at one connection, which keeps their order.
	db.SetMaxOpenConns(1)
	d, err := sqlkv.NewDriver(ctx, db, sqlkv.SQLite, cmp.Or(c.Params["table"], defaultTable))
	if adapter.IsTimeout(err) {
		return nil, fmt.Errorf("another program has locked the file, or its disk hangs: %w",
			os.ErrDeadlineExceeded)
	}
	return d, err
}

// parse returns the path of the file, which must be absolute: processes with different working
// directories would not exclude each other.
func parse(c hasp.Config) (string, error) {
	node, err := adapter.Node(c, form)
	if err != nil {
		return "", err
	}

	file := strings.TrimPrefix(node, "sqlite://")
	if file == "" || file == ":memory:" || strings.HasSuffix(file, "/") {
		return "", adapter.Invalid("want a file that processes share: %s", form)
	}

	if !filepath.IsAbs(file) {
		return "", adapter.Invalid("file %q is relative, so each working directory would have its own: "+
			"use sqlite:///%[2]s, or the full path of another directory", file)
	}

	directory := filepath.Dir(file)
	if info, err := os.Stat(directory); err != nil || !info.IsDir() {
		return "", adapter.Invalid("%s is not a directory that this user can read: create it first",
			directory)
	}
	if info, err := os.Stat(file); err == nil && info.IsDir() {
		return "", adapter.Invalid("%s is a directory: want the name of a file in it", file)
	}
	return file, nil
}
