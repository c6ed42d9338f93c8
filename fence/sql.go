package fence

import (
	"cmp"
	"context"
	"database/sql"
	"fmt"
	"math"
)

// SQL guards the rows of a database. It keeps the fences in one table. On PostgreSQL 9.5, SQLite
// 3.35 with a busy timeout, and later:
//
//	CREATE TABLE fences (resource TEXT PRIMARY KEY, fence BIGINT NOT NULL)
//
// On MySQL and MariaDB, whose texts would not distinguish "a" from "A":
//
//	CREATE TABLE fences (resource VARBINARY(255) PRIMARY KEY, fence BIGINT NOT NULL)
type SQL struct {
	// Table is the name of the table; default "fences". The statements contain it without quotes.
	Table string

	// MySQL selects the statements of MySQL and MariaDB.
	MySQL bool
}

// Check raises the fence of the resource to the one of ctx, or returns a [*StaleError]. It must be
// the first statement of tx, so that tx reads what earlier holders have written. It locks the row
// of the resource until tx ends. So other holders of the resource wait, and the writes of tx are
// committed together with the fence, or not at all. After an error, roll back.
//
// In isolation levels above read committed, a transaction that had to wait may get the database's
// own error of serialization. Check returns an error that wraps it.
func (s SQL) Check(ctx context.Context, tx *sql.Tx, resource string) error {
	f, err := Of(ctx)
	if err != nil {
		return err
	}
	if f > math.MaxInt64 {
		return fmt.Errorf("fence: %d is too large for a BIGINT", f)
	}

	// Both variants raise the fence of the row to f, unless it is larger already, and then read it
	// into seen. They lock the row even if they do not raise its fence. They read the fence after
	// they have waited for the lock, so seen includes what other holders have written.
	table := cmp.Or(s.Table, "fences")
	var seen uint64
	if s.MySQL { // MySQL has no RETURNING, so a second statement reads the fence
		_, err = tx.ExecContext(ctx, "INSERT INTO "+table+" (resource, fence) VALUES (?, ?)"+
			" ON DUPLICATE KEY UPDATE fence = GREATEST(fence, ?)", resource, int64(f), int64(f))
		if err == nil {
			row := tx.QueryRowContext(ctx,
				"SELECT fence FROM "+table+" WHERE resource = ? FOR UPDATE", resource)
			err = row.Scan(&seen)
		}
	} else {
		row := tx.QueryRowContext(ctx, "INSERT INTO "+table+" AS held (resource, fence) VALUES ($1, $2)"+
			" ON CONFLICT (resource) DO UPDATE SET fence ="+
			" CASE WHEN held.fence < excluded.fence THEN excluded.fence ELSE held.fence END"+
			" RETURNING fence", resource, int64(f))
		err = row.Scan(&seen)
	}
	if err != nil {
		return fmt.Errorf("fence: %w", err)
	}
	return Compare(resource, f, seen)
}

// Do calls write in a transaction after [SQL.Check], and commits the transaction. If write returns
// an error, Do rolls back and returns that error.
func (s SQL) Do(ctx context.Context, db *sql.DB, resource string, write func(ctx context.Context, tx *sql.Tx) error) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback() // also if write panics; after a commit it does nothing

	if err := s.Check(ctx, tx, resource); err != nil {
		return err
	}
	if err := write(ctx, tx); err != nil {
		return err
	}
	return tx.Commit()
}
