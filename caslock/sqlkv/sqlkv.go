// Package sqlkv lets caslock keep locks in a table of a MariaDB, a MySQL or an SQLite database. For
// PostgreSQL use package pglock, whose fences can be checked in a transaction.
//
// The clock of the server, or with SQLite of the host, tells the age of a row. So a TryLock of a
// new process gets the key of a dead holder when the holder's term has ended. That clock must not
// step forward by more than backend.Drift; the clock for SQLite on Linux never steps.
//
// All clients must use the primary server. Keep innodb_flush_log_at_trx_commit=1, which is the
// default, because otherwise a crash may lose locks. Locks in an SQLite file work only among the
// processes of one host. The file must be on a local disk, and needs a busy timeout in its DSN,
// such as _busy_timeout=3000 of go-sqlite3.
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
	"github.com/hasplock/hasp/internal/clock"
)

// Dialect says which database a Store uses.
type Dialect struct {
	table  string // creates the table
	insert string // inserts a row, unless the name has one
	file   string // returns the file, which is empty for a database in memory
	now    string // an expression for the time in microseconds; its argument is the clock's up

	// clock returns what each version begins with, and the argument of now.
	clock func() (boot string, up time.Duration)

	reach        backend.Reach
	cancellation backend.Cancellation
}

// MySQL is for MariaDB and MySQL, and SQLite for SQLite 3.24 or later.
var (
	MySQL = Dialect{
		table: `CREATE TABLE IF NOT EXISTS $t (name VARBINARY(318) PRIMARY KEY, value LONGBLOB NOT NULL,
			version VARCHAR(32) NOT NULL, at BIGINT NOT NULL) ENGINE=InnoDB`,
		insert:       `INSERT IGNORE INTO $t (value, version, at, name) VALUES (?, ?, $now, ?)`,
		file:         `SELECT 'on the server'`,
		now:          `(TIMESTAMPDIFF(MICROSECOND, '2000-01-01', UTC_TIMESTAMP(6)) + ?)`,
		clock:        func() (string, time.Duration) { return "", 0 },
		reach:        backend.Network,
		cancellation: backend.CancelPrompt,
	}
	SQLite = Dialect{
		table: `CREATE TABLE IF NOT EXISTS $t (name TEXT PRIMARY KEY, value BLOB NOT NULL,
			version TEXT NOT NULL, at INTEGER NOT NULL) WITHOUT ROWID`,
		insert: `INSERT INTO $t (value, version, at, name) VALUES (?, ?, $now, ?)
			ON CONFLICT DO NOTHING`,
		file:  `SELECT file FROM pragma_database_list WHERE name = 'main'`,
		now:   `?`,
		clock: clock.SinceBoot,
		reach: backend.Host,
	}
)

// Store is a table. It is safe for concurrent use.
type Store struct {
	db      *sql.DB
	dialect Dialect

	// The statements.
	create, get, insert, update, remove, list string
}

var tableName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]{0,62}$`)

// New returns a store in a table of db, and creates the table unless it exists. The database
// remains the caller's.
func New(ctx context.Context, db *sql.DB, d Dialect, table string) (*Store, error) {
	if db == nil || d.table == "" || !tableName.MatchString(table) {
		return nil, fmt.Errorf(
			"sqlkv: %w: want a database, a dialect, and a table name of letters, digits and _",
			backend.ErrInvalid)
	}

	var file string // an error is one of the database, and so comes again at the statement below
	if err := db.QueryRowContext(ctx, d.file).Scan(&file); err == nil && file == "" {
		return nil, fmt.Errorf(
			"sqlkv: %w: want a file, because each connection has a database in memory of its own",
			backend.ErrInvalid)
	}

	fill := strings.NewReplacer("$t", table, "$now", d.now).Replace
	s := &Store{
		db:      db,
		dialect: d,
		create:  fill(d.table),
		insert:  fill(d.insert),
		get:     fill(`SELECT value, version, $now - at, name FROM $t WHERE name = ?`),
		update:  fill(`UPDATE $t SET value = ?, version = ?, at = $now WHERE name = ? AND version = ?`),
		remove:  fill(`DELETE FROM $t WHERE name = ? AND version = ?`),
		list: fill(`SELECT value, version, $now - at, name FROM $t
			WHERE name > ? ORDER BY name LIMIT ?`),
	}
	if _, err := db.ExecContext(ctx, s.create); err != nil {
		return nil, fmt.Errorf("sqlkv: %w", err)
	}
	return s, nil
}

// Limits returns the limits of the database. An SQLite file excludes only processes of one host.
func (s *Store) Limits() (backend.Reach, backend.Cancellation) {
	return s.dialect.reach, s.dialect.cancellation
}

// now returns the argument of the dialect's now.
func (s *Store) now() int64 {
	_, up := s.dialect.clock()
	return up.Microseconds()
}

// entry reads an entry from a row. If the host has booted since the write, the age is not known.
func (s *Store) entry(scan func(...any) error) (e caslock.Entry, name string, err error) {
	var age int64
	err = scan(&e.Value, &e.Version, &age, &name)
	if boot, _ := s.dialect.clock(); strings.HasPrefix(e.Version, boot) {
		e.Age = time.Duration(age) * time.Microsecond
	}
	return e, name, err
}

// Get reads the row of name.
func (s *Store) Get(ctx context.Context, name string) (caslock.Entry, error) {
	e, _, err := s.entry(s.db.QueryRowContext(ctx, s.get, s.now(), name).Scan)
	if errors.Is(err, sql.ErrNoRows) {
		return caslock.Entry{}, nil
	}
	return e, s.mend(ctx, err)
}

// mend creates the table again if err says that the table is missing, because the database has lost
// its data. It returns err, but the next call finds the table.
func (s *Store) mend(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}

	inMySQL := strings.Contains(err.Error(), "Error 1146")
	inSQLite := strings.Contains(err.Error(), "no such table")
	if inMySQL || inSQLite {
		_, _ = s.db.ExecContext(ctx, s.create)
	}
	return err
}

// Put changes the row of name if it has this version. The clock is read after the holder has begun
// to count its term, so the age is never too large.
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

// exec runs a statement that changes one row. If no row changes, the key has another version.
func (s *Store) exec(ctx context.Context, statement string, args ...any) error {
	result, err := s.db.ExecContext(ctx, statement, args...)
	if err != nil {
		return s.mend(ctx, err)
	}

	n, err := result.RowsAffected()
	if err == nil && n == 0 {
		return caslock.ErrConflict
	}
	return err
}

// Scan reads rows in the order of their names.
func (s *Store) Scan(ctx context.Context, position string, n int) (es []caslock.Entry, next string, err error) {
	rows, err := s.db.QueryContext(ctx, s.list, s.now(), position, n)
	if err != nil {
		return nil, "", err
	}
	defer rows.Close()

	for rows.Next() {
		e, name, err := s.entry(rows.Scan)
		if err != nil {
			return nil, "", err
		}
		es = append(es, e)
		if len(es) == n {
			next = name
		}
	}
	return es, next, rows.Err()
}
