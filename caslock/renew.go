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

	done  chan struct{} // closed when grant and err are set
	grant backend.Grant
	err   error // nil or ErrLost
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
	select {
	case <-r.done:
	default:
		if answers {
			r.grant = g
			r.err = err
			close(r.done)
		}
	}
	id := hold{c.Key, c.Token}
	if (answers || r.tries == 0) && rs.byHold[id] == r {
		delete(rs.byHold, id)
	}
}

// note records that a Put is sent.
func (rs *renewals) note(r *renewal, number uint64, g backend.Grant) {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	r.sent[number] = g
}

// granted returns the grant of the Put with this number, and true if a try of r has no more to do:
// the Put is one of r, or r has its answer. Without that, the tries of a slow store would outrun
// the next renewal, and cause conflicts.
func (rs *renewals) granted(r *renewal, number uint64) (g backend.Grant, over bool) {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	select {
	case <-r.done:
		return r.grant, true
	default:
		g, over = r.sent[number]
		return g, over
	}
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
		d.renewals.leave(r, &c, backend.Grant{}, err)
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
func (d *driver) try(ctx context.Context, c *backend.Claim, r *renewal) (g backend.Grant, err error) {
	err = d.change(ctx, c, func(it item, rec *record, now time.Time) (writes bool) {
		var over bool
		if g, over = d.renewals.granted(r, it.N); over {
			return false
		}

		rec.add(it, max(c.TTL, it.rest(now)), now)
		g = grant(c, 0, now)
		d.renewals.note(r, rec.Write, g)
		return true
	})
	return g, err
}
