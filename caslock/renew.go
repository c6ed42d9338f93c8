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
// In a slow store, a try goes on after that time, and its answer is also the answer to the next
// try.
type renewal struct {
	ttl   time.Duration            // the TTL that the last try has asked for
	tries int                      // in flight
	sent  map[uint64]backend.Grant // what each Put grants if it succeeds, by the number of its write

	answered bool          // grant and err are set
	done     chan struct{} // closed when answered is set
	grant    backend.Grant
	err      error // nil or ErrLost
}

// join returns the renewal that a new try for c belongs to, and counts the try. A try with a longer
// TTL begins a new renewal, because the answer to an earlier try would grant a shorter term.
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

// leave ends a try of r, whose outcome is g and err. If the outcome is known, it is the answer to
// r, unless an earlier try had one. If r has an answer, or no try that could get one, leave forgets
// r, so that the next try begins a new renewal and asks the store again.
func (rs *renewals) leave(r *renewal, c *backend.Claim, g backend.Grant, err error) {
	rs.mu.Lock()
	defer rs.mu.Unlock()

	r.tries--
	isKnown := err == nil || backend.Definite(err)
	if isKnown && !r.answered {
		r.answered = true
		r.grant = g
		r.err = err
		close(r.done)
	}

	id := hold{c.Key, c.Token}
	isPresent := rs.byHold[id] == r // join may have replaced r
	if isPresent && (isKnown || r.tries == 0) {
		delete(rs.byHold, id)
	}
}

// send decides whether a try of r must write. The argument last is the number that the hold has in
// the store, and number the one of the Put that the try would send, which would grant g. Usually
// send notes this Put, and returns g and true. In two cases writes is false:
//
//   - The hold is already renewed by another Put of r, with the number last. Then send returns what
//     that Put grants. The term counts from it, because other clients may have seen its record.
//   - r has its answer. Then the try's own result is not used, and its Put would only make the
//     next renewal conflict.
func (rs *renewals) send(
	r *renewal, last, number uint64, g backend.Grant,
) (_ backend.Grant, writes bool) {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	if earlier, ours := r.sent[last]; ours || r.answered {
		return earlier, false
	}
	r.sent[number] = g
	return g, true
}
