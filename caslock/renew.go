package caslock

import (
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
