package sqlkv

import (
	"context"
	"database/sql"
	"errors"
	"strings"

	"github.com/hasplock/hasp/caslock/internal/adapter"
)

// Parts of the texts of errors. The texts are the same in all drivers for a database, so this
// package needs to import none of them.
const (
	// MariaDB refuses a statement if another transaction has changed the row since the statement
	// has read it. It has rolled the statement back.
	changedSinceRead = "Error 1020 "

	noRight       = "Error 1142 " // the user may not run this statement
	noTable       = "Error 1146 "
	noTableSQLite = "no such table"
)

// has reports whether the text of err has this part.
func has(err error, part string) bool { return err != nil && strings.Contains(err.Error(), part) }

// isNoTable reports whether err says that the table does not exist.
func isNoTable(err error) bool { return has(err, noTable) || has(err, noTableSQLite) }

// isNoRight reports whether err says that the user may not run the statement. A MariaDB also says
// so if there is no such table, and the user has no right for it.
func isNoRight(err error) bool { return has(err, noRight) }

const readOnly = "this server is a read-only replica: use the address of the primary"

// hints maps a part of an error to what to do about it.
var hints = []struct{ part, hint string }{
	{"Error 1045 ", "check user and password: mysql://user:password@host:3306/database"},
	{"Error 1698 ", "check user and password: mysql://user:password@host:3306/database"},
	{"Error 1044 ", "check the name of the database, or GRANT the user rights for it"},
	{"Error 1049 ", "check the name of the database, or create it: CREATE DATABASE"},
	{"Error 1040 ", "the server has no connection left: lower pool_size, or raise max_connections"},
	{"Error 1054 ", "this table has other columns: name another one, as in table=locks"},
	{"Error 1115 ", "check the parameter charset; leave it out for utf8mb4"},
	{"Error 1231 ", "check the parameter charset; leave it out for utf8mb4"},
	{noRight, "let this user SELECT, INSERT, UPDATE and DELETE in the table"},
	{"Error 1290 ", readOnly},
	{"Error 1792 ", "transactions of this session are read-only: switch transaction_read_only off"},
	{"Error 1836 ", readOnly},
	{"Error 3159 ", "the server wants TLS: add tls=true"},
	{"server does not support TLS", "remove tls and ca, or configure the server for TLS"},

	{"readonly database", "give this user the right to write the file and its directory"},
	{"disk is full", "free space on the disk of the file"},
	{"unable to open", "check that the directory exists and that this user may write to it"},
	{"not a database", "this file is no SQLite file: name another one, which hasp creates"},
	{"no such column", "this table has other columns: name another one, as in table=locks"},
	{"database is locked", "another program or transaction has locked it: give locks a file of their own"},
}

// diagnose adds to err what to do about it, in one line. If it does not know what to do, or if err
// is nil or sql.ErrNoRows, it returns err unchanged.
func diagnose(err error) error {
	if err == nil || errors.Is(err, sql.ErrNoRows) {
		return err
	}

	for _, h := range hints {
		if has(err, h.part) {
			return adapter.Explain("", err, h.hint)
		}
	}
	if hint := adapter.Hint(err, "ca=/path/to/ca.pem", "tls=false"); hint != "" {
		return adapter.Explain("", err, hint)
	}
	return err
}

// checkMySQL refuses connections that do not commit by themselves: other connections would not see
// a hold. It also refuses a replica, to which a user with special rights may write.
func checkMySQL(ctx context.Context, db *sql.DB) error {
	var autocommit bool
	var mode string // newer MariaDBs have more modes than 0 and 1
	row := db.QueryRowContext(ctx, `SELECT @@autocommit, @@global.read_only`)
	if err := row.Scan(&autocommit, &mode); err != nil {
		return diagnose(err)
	}

	if !autocommit {
		return adapter.Invalid("autocommit is off, so no other connection would see a lock: " +
			"remove autocommit from the DSN, or set it to 1")
	}
	if mode != "0" && mode != "OFF" {
		return errors.New(readOnly)
	}
	return nil
}

// checkSQLite refuses a database in memory.
func checkSQLite(ctx context.Context, db *sql.DB) error {
	var file string
	row := db.QueryRowContext(ctx, `SELECT file FROM pragma_database_list WHERE name = 'main'`)
	if err := row.Scan(&file); err != nil {
		return diagnose(err)
	}
	if file == "" {
		return adapter.Invalid(
			"want a file, because each connection has a database in memory of its own")
	}
	return nil
}
