package caslock

import (
	"context"
	"sync"
	"time"

	"github.com/hasplock/hasp/backend"
)

// renewals are the renewals that have no answer yet.
type renewals struct {
	mu     sync.Mutex // guards byHold, and all renewals
	byHold map[hold]*renewal
}

type hold struct{ key, token string }

// renewal is a renewal of one hold, with all its tries. The engine gives a try a tenth of the term.
// In a slow store, a try goes on after that, and its answer is also the answer to the next try.
type renewal struct {
	ttl   time.Duration            // what the last try has asked for
	tries int                      // in flight
	sent  map[uint64]backend.Grant // what each Put grants if it succeeds, by the number of its write

	answered bool          // grant and err are set
	done     chan struct{} // closed when answered is set
	grant    backend.Grant
	err      error // nil or ErrLost
}

// join returns the renewal that a new try for c belongs to.
func (rs *renewals) join(c *backend.Claim) *renewal {
	rs.mu.Lock()
	defer rs.mu.Unlock()

	id := hold{c.Key, c.Token}
	r := rs.byHold[id]
	if r == nil || c.TTL > r.ttl {
		r = &renewal{sent: map[uint64]backend.Grant{}, done: make(chan struct{})}
		rs.byHold[id] = r
	}
	r.ttl = c.TTL
	r.tries++
	return r
}

// leave ends a try. If its outcome is known, the renewal has its answer. A later try begins a new
// renewal, because it must ask the store again.
func (rs *renewals) leave(r *renewal, c *backend.Claim, g backend.Grant, err error) {
	rs.mu.Lock()
	defer rs.mu.Unlock()

	r.tries--
	answers := err == nil || backend.Definite(err)
	if answers && !r.answered {
		r.answered = true
		r.grant = g
		r.err = err
		close(r.done)
	}
	id := hold{c.Key, c.Token}
	if (answers || r.tries == 0) && rs.byHold[id] == r {
		delete(rs.byHold, id)
	}
}

// send records that a try is about to send the Put number, which grants g if it succeeds. But if
// the hold was made by another Put of r, with the number last, send returns what that Put grants,
// and true. It also returns true if r has its answer, because a Put would only make the next
// renewal conflict.
func (rs *renewals) send(r *renewal, last, number uint64, g backend.Grant) (backend.Grant, bool) {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	if earlier, ours := r.sent[last]; ours || r.answered {
		return earlier, true
	}
	r.sent[number] = g
	return g, false
}

// renew makes a try to renew the hold of c. It returns the first answer to any try of the renewal.
func (d *driver) renew(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	r := d.renewals.join(&c)
	failed := make(chan error, 1)
	err := d.tasks.run(ctx, func(ctx context.Context) {
		g, err := d.try(ctx, &c, r)
		d.renewals.leave(r, &c, g, err)
		if err != nil && !backend.Definite(err) {
			failed <- err
		}
	})
	if err != nil {
		return backend.Grant{}, err
	}

	select {
	case <-r.done:
		return r.grant, r.err
	case err := <-failed:
		return backend.Grant{}, err
	case <-ctx.Done():
		return backend.Grant{}, ctx.Err()
	}
}

// try writes the hold with a new number and at least its TTL. A term never gets shorter: the rest
// that this driver counts is at least the rest that the holder counts.
//
// If an earlier Put of the renewal has come first, try writes nothing. The term counts from that
// Put, because others may have seen its record since.
func (d *driver) try(
	ctx context.Context, c *backend.Claim, r *renewal,
) (g backend.Grant, err error) {
	err = d.change(ctx, c, func(it item, rec *record, now time.Time) (writes bool) {
		var over bool
		g, over = d.renewals.send(r, it.N, rec.Write, grant(c, 0, now))
		if !over {
			rec.add(it, max(c.TTL, it.rest(now)), now)
		}
		return !over
	})
	return g, err
}
