package hasp_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/memlock"
)

// The row keeps the largest fence that it has seen. A writer whose fence is
// smaller changes no row.
//
//	CREATE TABLE accounts (id BIGINT PRIMARY KEY, balance BIGINT NOT NULL, fence BIGINT NOT NULL DEFAULT 0)
const setBalance = `UPDATE accounts SET balance = $1, fence = $2 WHERE id = $3 AND fence <= $2`

var errStale = errors.New("a later holder has written")

// execer is a *sql.DB or a *sql.Tx.
type execer interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
}

func save(ctx context.Context, db execer, lease *hasp.Lease, id, balance int64) error {
	res, err := db.ExecContext(ctx, setBalance, balance, int64(lease.Fence()), id)
	if err != nil {
		return err
	}
	n, err := res.RowsAffected()
	if err == nil && n == 0 {
		err = errStale
	}
	return err
}

// accounts stands for the database, so that the example runs without one. It
// does what setBalance does.
type accounts map[int64]struct{ balance, fence int64 }

func (a accounts) ExecContext(_ context.Context, _ string, args ...any) (sql.Result, error) {
	balance, fence, id := args[0].(int64), args[1].(int64), args[2].(int64)
	row, ok := a[id]
	if !ok || fence < row.fence {
		return driver.RowsAffected(0), nil
	}
	row.balance, row.fence = balance, fence
	a[id] = row
	return driver.RowsAffected(1), nil
}

// A table that refuses the write of a holder that has lost the lock.
func ExampleWithFence_sql() {
	ctx := context.Background()
	c := hasp.New(memlock.New(), nil)
	defer c.Close()
	db := accounts{7: {balance: 100}}

	// The first holder is stopped for longer than its term, and another caller
	// gets the key. Break has the same effect at once.
	first, err := c.Lock(ctx, "account/7", hasp.WithFence())
	if err != nil {
		fmt.Println(err)
		return
	}
	defer first.Unlock(ctx)
	if err := c.Break(ctx, "account/7"); err != nil {
		fmt.Println(err)
		return
	}
	second, err := c.Lock(ctx, "account/7", hasp.WithFence())
	if err != nil {
		fmt.Println(err)
		return
	}
	defer second.Unlock(ctx)

	fmt.Println(save(ctx, db, second, 7, 80))
	fmt.Println(save(ctx, db, first, 7, 95)) // the late write
	fmt.Println("balance", db[7].balance)
	// Output:
	// <nil>
	// a later holder has written
	// balance 80
}
