package fence_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"io"
	"strings"
	"sync"
)

// database is a fake of an SQL database, for [fence.SQL]. It has one fence and a log of words. A
// transaction that uses the fence locks it until its end, as the row of a real database.
type database struct {
	row   sync.Mutex // held by a transaction that uses the fence
	fence int64

	mu  sync.Mutex // guards log
	log []*string  // in the order of the inserts; a rollback makes a word empty
}

// open returns a pool of connections to the database.
func (d *database) open() *sql.DB { return sql.OpenDB(d) }

func (d *database) words() (words []string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, w := range d.log {
		if *w != "" {
			words = append(words, *w)
		}
	}
	return words
}

// Connect and Driver make a database a [driver.Connector].
func (d *database) Connect(context.Context) (driver.Conn, error) { return &connection{db: d}, nil }
func (d *database) Driver() driver.Driver                        { return nil }

// connection is a connection with its transaction.
type connection struct {
	db     *database
	locked bool      // the transaction has the row
	before int64     // the fence when the row was locked
	words  []*string // what a rollback removes
}

func (c *connection) Begin() (driver.Tx, error)           { return c, nil }
func (c *connection) Close() error                        { return nil }
func (c *connection) Prepare(string) (driver.Stmt, error) { return nil, errors.ErrUnsupported }

func (c *connection) Commit() error {
	c.words = nil
	if c.locked {
		c.locked = false
		c.db.row.Unlock()
	}
	return nil
}

func (c *connection) Rollback() error {
	c.db.mu.Lock()
	for _, w := range c.words {
		*w = ""
	}
	c.db.mu.Unlock()
	if c.locked {
		c.db.fence = c.before
	}
	return c.Commit()
}

// raise raises the fence to that of an INSERT, and returns the fence.
func (c *connection) raise(args []driver.NamedValue) int64 {
	if !c.locked {
		c.db.row.Lock()
		c.locked = true
		c.before = c.db.fence
	}
	if len(args) > 1 {
		c.db.fence = max(c.db.fence, args[1].Value.(int64))
	}
	return c.db.fence
}

// ExecContext adds a word to the log, or raises the fence.
func (c *connection) ExecContext(
	_ context.Context, query string, args []driver.NamedValue,
) (driver.Result, error) {
	if strings.HasPrefix(query, "INSERT INTO fences") {
		c.raise(args)
		return driver.RowsAffected(1), nil
	}
	word := args[0].Value.(string)
	c.db.mu.Lock()
	defer c.db.mu.Unlock()
	c.words = append(c.words, &word)
	c.db.log = append(c.db.log, &word)
	return driver.RowsAffected(1), nil
}

// QueryContext returns the fence.
func (c *connection) QueryContext(
	_ context.Context, _ string, args []driver.NamedValue,
) (driver.Rows, error) {
	return &row{c.raise(args)}, nil
}

// row is the answer to a query for the fence, which it returns once.
type row struct{ fence int64 }

func (r *row) Columns() []string { return []string{"fence"} }
func (r *row) Close() error      { return nil }
func (r *row) Next(dest []driver.Value) error {
	if r.fence < 0 {
		return io.EOF
	}
	dest[0] = r.fence
	r.fence = -1
	return nil
}
