// Package sqlkv lets caslock keep locks in a table of a MariaDB, a MySQL or an SQLite database. For
// PostgreSQL use package pglock, whose fences can be checked in a transaction.
//
// The clock of the server, or with SQLite of the host, tells the age of a row. So a TryLock of a
// new process gets the key of a dead holder when the holder's term has ended. That clock must not
// step forward by more than backend.Drift; the clock for SQLite on Linux never steps.
//
// The packages sqlkv/mysql and sqlkv/sqlite register strategies with URLs, and import a driver of
// database/sql. This package imports none: New takes a database of any driver.
//
// # MariaDB and MySQL
//
// All clients must use the primary server. Keep innodb_flush_log_at_trx_commit=1, which is the
// default, because otherwise a crash may lose locks. The connections must commit by themselves.
// The user needs SELECT, INSERT, UPDATE and DELETE for the table, and CREATE only if the table does
// not exist.
//
// # SQLite
//
// Give locks a file of their own. SQLite has one writer at a time for a whole file. So while a
// transaction of the program has written to the file, each lock, renewal and unlock in this file
// waits for its end. If it lasts longer than a term, the locks are lost. A transaction that waits
// for a lock in its own file waits for itself.
//
// Locks in a file work only among the processes of one host. The file must be on a local disk, and
// needs a busy timeout in its DSN, such as _busy_timeout=3000 of go-sqlite3.
package sqlkv

import (
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/caslock"
	"github.com/hasplock/hasp/caslock/internal/adapter"
	"github.com/hasplock/hasp/internal/clock"
)

// Dialect says which database a Store uses.
type Dialect struct {
	table  string // creates the table
	insert string // inserts a row, unless the name has one
	now    string // an expression for the time in microseconds; its argument is the clock's up

	// check returns an error if the database cannot keep locks.
	check func(ctx context.Context, db *sql.DB) error

	// clock returns the host's clock if that tells the age of rows: an identifier of the boot, with
	// which each version begins, and the time since the boot. If the server's clock tells the age,
	// they are "" and 0.
	clock func() (boot string, up time.Duration)

	reach        backend.Reach
	cancellation backend.Cancellation
}

// MySQL is for MariaDB and MySQL, and SQLite for SQLite 3.24 or later.
var (
	MySQL = Dialect{
		table: `CREATE TABLE IF NOT EXISTS $t (name VARBINARY(240) PRIMARY KEY, value LONGBLOB NOT NULL,
			version VARCHAR(32) NOT NULL, at BIGINT NOT NULL) ENGINE=InnoDB`,
		insert:       `INSERT IGNORE INTO $t (value, version, at, name) VALUES (?, ?, $now, ?)`,
		now:          `(TIMESTAMPDIFF(MICROSECOND, '2000-01-01', UTC_TIMESTAMP(6)) + ?)`,
		check:        checkMySQL,
		clock:        func() (string, time.Duration) { return "", 0 },
		reach:        backend.Network,
		cancellation: backend.CancelPrompt,
	}
	SQLite = Dialect{
		table: `CREATE TABLE IF NOT EXISTS $t (name TEXT PRIMARY KEY, value BLOB NOT NULL,
			version TEXT NOT NULL, at INTEGER NOT NULL) WITHOUT ROWID`,
		insert: `INSERT INTO $t (value, version, at, name) VALUES (?, ?, $now, ?)
			ON CONFLICT DO NOTHING`,
		now:   `?`,
		check: checkSQLite,
		clock: clock.SinceBoot,
		reach: backend.Host,
	}
)

// Store is a table. It is safe for concurrent use.
type Store struct {
	db      *sql.DB
	dialect Dialect
	ownsDB  bool // Close closes db

	// The statements.
	create, get, insert, update, remove, list string
}

var tableName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]{0,62}$`)

// New returns a store in a table of db, and creates the table unless it exists. The database
// remains the caller's.
func New(ctx context.Context, db *sql.DB, d Dialect, table string) (*Store, error) {
	if db == nil || d.table == "" || !tableName.MatchString(table) {
		return nil, fmt.Errorf("sqlkv: %w: parameter table: want letters, digits and _ "+
			"(New also wants a database and a dialect)", backend.ErrInvalid)
	}

	fill := strings.NewReplacer("$t", table, "$now", d.now).Replace
	s := &Store{
		db:      db,
		dialect: d,
		create:  strings.Join(strings.Fields(fill(d.table)), " "),
		insert:  fill(d.insert),
		get:     fill(`SELECT value, version, $now - at, name FROM $t WHERE name = ?`),
		update:  fill(`UPDATE $t SET value = ?, version = ?, at = $now WHERE name = ? AND version = ?`),
		remove:  fill(`DELETE FROM $t WHERE name = ? AND version = ?`),
		list: fill(`SELECT value, version, $now - at, name FROM $t
			WHERE name > ? ORDER BY name LIMIT ?`),
	}

	err := d.check(ctx, db)
	if err == nil {
		err = s.findTable(ctx)
	}
	if err != nil {
		return nil, fmt.Errorf("sqlkv: %w", backend.Outage(ctx, err))
	}
	return s, nil
}

// NewDriver returns a driver over a store that New would return. The driver owns db: its Close
// closes db. If NewDriver returns an error, it has closed db.
func NewDriver(ctx context.Context, db *sql.DB, d Dialect, table string) (backend.Driver, error) {
	s, err := New(ctx, db, d, table)
	if err != nil {
		if db != nil {
			_ = db.Close()
		}
		return nil, err
	}

	s.ownsDB = true
	driver, err := caslock.NewDriver(ctx, s)
	if err != nil {
		_ = db.Close()
	}
	return driver, err
}

// Close closes the database of a store that NewDriver has made. The database of New remains open.
func (s *Store) Close() error {
	if !s.ownsDB {
		return nil
	}
	return s.db.Close()
}

// findTable creates the table unless it exists. It reads the table first, because a user who may
// not create tables may use one that exists.
func (s *Store) findTable(ctx context.Context) error {
	_, err := s.Get(ctx, "")
	mayLackTable := isNoTable(err) || isNoRight(err)
	if !mayLackTable {
		return err
	}

	// If the table was missing, Get may have created it (see mend), but has not said whether it
	// could. The statement does nothing if the table exists.
	_, err = s.db.ExecContext(ctx, s.create)
	if isNoRight(err) {
		return adapter.Explain("", err, "let an administrator run: "+s.create+
			"; and let this user SELECT, INSERT, UPDATE and DELETE")
	}
	return diagnose(err)
}

// Limits returns the limits of the database. An SQLite file excludes only processes of one host.
func (s *Store) Limits() (backend.Reach, backend.Cancellation) {
	return s.dialect.reach, s.dialect.cancellation
}

// now returns the argument of the dialect's expression now.
func (s *Store) now() int64 {
	_, up := s.dialect.clock()
	return up.Microseconds()
}

// entry reads an entry and its name from a row of the statements get and list. The argument scan is
// the method Scan of the row.
func (s *Store) entry(scan func(...any) error) (e caslock.Entry, name string, err error) {
	var age int64 // in microseconds
	if err := scan(&e.Value, &e.Version, &age, &name); err != nil {
		return caslock.Entry{}, "", err
	}

	// A version begins with the boot in which its row was written. If the host has booted since,
	// its clock has begun again, so the age is not known. By the server's clock, boot is always "".
	boot, _ := s.dialect.clock()
	if strings.HasPrefix(e.Version, boot) {
		e.Age = time.Duration(age) * time.Microsecond
	}
	return e, name, nil
}

// Get reads the row of name.
func (s *Store) Get(ctx context.Context, name string) (caslock.Entry, error) {
	e, _, err := s.entry(s.db.QueryRowContext(ctx, s.get, s.now(), name).Scan)
	if errors.Is(err, sql.ErrNoRows) {
		return caslock.Entry{}, nil
	}
	return e, s.mend(ctx, err)
}

// mend creates the table again if err says that there is no table, because the database has lost
// its data. It returns err with advice, because its caller's statement has failed. The next call
// finds the table.
func (s *Store) mend(ctx context.Context, err error) error {
	if isNoTable(err) {
		_, _ = s.db.ExecContext(ctx, s.create)
	}
	return diagnose(err)
}

// Put changes the row of name if it has this version, or inserts the row if version is "". The time
// of the row is read after the holder has begun to count its term, so the age is never too large.
func (s *Store) Put(ctx context.Context, name string, value []byte, version string) (string, error) {
	boot, up := s.dialect.clock()
	next := boot + rand.Text()

	if version == "" {
		return next, s.exec(ctx, s.insert, value, next, up.Microseconds(), name)
	}
	return next, s.exec(ctx, s.update, value, next, up.Microseconds(), name, version)
}

// Delete deletes the row of name if it has this version.
func (s *Store) Delete(ctx context.Context, name, version string) error {
	return s.exec(ctx, s.remove, name, version)
}

// exec runs a statement that changes one row, if the row has the expected version. If no row
// changes, it returns ErrConflict, because the row has another version, or is missing.
func (s *Store) exec(ctx context.Context, statement string, args ...any) error {
	result, err := s.db.ExecContext(ctx, statement, args...)
	if has(err, changedSinceRead) {
		return caslock.ErrConflict
	}
	if err != nil {
		return s.mend(ctx, err)
	}

	n, err := result.RowsAffected()
	if err == nil && n == 0 {
		return caslock.ErrConflict
	}
	return err
}

// Scan reads rows in the order of their names. A position is the name of the last row that the call
// before has read.
func (s *Store) Scan(ctx context.Context, position string, n int) (es []caslock.Entry, next string, err error) {
	rows, err := s.db.QueryContext(ctx, s.list, s.now(), position, n)
	if err != nil {
		return nil, "", diagnose(err)
	}
	defer rows.Close()

	for rows.Next() {
		e, name, err := s.entry(rows.Scan)
		if err != nil {
			return nil, "", err
		}
		es = append(es, e)
		if len(es) == n {
			next = name // the page is full, so there may be more rows
		}
	}

	return es, next, rows.Err()
}
