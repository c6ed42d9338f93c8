package backend_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"sync"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

// table is a whole driver. It keeps its rows in a map, by key, as a table of a database would.
// Because it is neither a Waiter nor a Waker, the engine polls.
type table struct {
	mu   sync.Mutex // instead of a transaction
	rows map[string]row
}

type row struct {
	token, owner string
	until        time.Time
}

func (t *table) Traits() backend.Traits { return backend.Traits{Reach: backend.Process} }

func (t *table) Acquire(_ context.Context, c backend.Claim) (backend.Grant, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if c.Fenced {
		return backend.Grant{}, errors.ErrUnsupported
	}
	now := time.Now()
	if r, ok := t.rows[c.Key]; ok && now.Before(r.until) {
		return backend.Grant{}, &backend.HeldError{RetryAfter: r.until.Sub(now), Owner: r.owner}
	}
	t.rows[c.Key] = row{c.Token, c.Owner, now.Add(c.TTL)}
	return backend.Grant{}, nil
}

func (t *table) Renew(ctx context.Context, cs []backend.Claim, done func(int, backend.Grant, error)) {
	backend.RenewEach(ctx, cs, done, func(_ context.Context, c backend.Claim) (backend.Grant, error) {
		t.mu.Lock()
		defer t.mu.Unlock()
		r, now := t.rows[c.Key], time.Now()
		if r.token != c.Token || !now.Before(r.until) {
			return backend.Grant{}, backend.ErrLost
		}
		if until := now.Add(c.TTL); until.After(r.until) { // a renewal never shortens the term
			r.until = until
		}
		t.rows[c.Key] = r
		return backend.Grant{}, nil
	})
}

func (t *table) Release(_ context.Context, c backend.Claim) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if r := t.rows[c.Key]; r.token != c.Token || !time.Now().Before(r.until) {
		return backend.ErrLost
	}
	delete(t.rows, c.Key)
	return nil
}

func (t *table) Close() error { return nil }

// A Client over a new driver. The test of the driver is one call of conformance.Run.
func Example() {
	ctx := context.Background()
	c, err := hasp.New(&table{rows: map[string]row{}}, &hasp.Options{Owner: "example"})
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()

	lease, err := c.Lock(ctx, "k")
	fmt.Println(lease.Key(), err)
	_, err = c.TryLock(ctx, "k")
	fmt.Println(errors.Is(err, hasp.ErrHeld))
	fmt.Println(lease.Unlock(ctx))
	// Output:
	// k <nil>
	// true
	// <nil>
}
