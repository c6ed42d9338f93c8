package redlock

import (
	"errors"
	"time"

	"github.com/hasplock/hasp/backend"
)

// patience is how long Close waits for calls in flight, and for the releases of
// the records that they leave on a node.
const patience = 3 * time.Second

// spawn runs f on a goroutine that Close waits for, unless Close has begun.
func (d *Driver) spawn(f func()) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.spawnLocked(f)
}

func (d *Driver) spawnLocked(f func()) bool {
	if d.ended {
		return false
	}
	d.work.Go(f)
	return true
}

// chased is a token on a node.
type chased struct {
	token string
	node  int
}

// chase runs f, which releases c on the node, in the background. If such a release
// of c is already in flight on the node, as after a repeated Release, chase does
// nothing. The caller itself counts as work, so Close waits for f even if Close
// has already begun.
func (d *Driver) chase(n *node, c backend.Claim, f func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	x := chased{c.Token, n.i}
	if d.chased[x] {
		return
	}
	d.chased[x] = true
	d.work.Go(func() {
		f()
		d.mu.Lock()
		defer d.mu.Unlock()
		delete(d.chased, x)
	})
}

// sleep returns after pause, or sooner when Close begins. It returns false if Close
// has begun.
func (d *Driver) sleep(pause time.Duration) bool {
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-d.life.Done():
	}
	return d.life.Err() == nil
}

// Close waits for at most 3 s for the commands in flight, and for the release of
// the records that they leave on a node. Every record that stays blocks its key
// for a term. Then Close closes the connections that waiters listen on, and all
// connections of a Driver that was opened by URL.
func (d *Driver) Close() error {
	d.mu.Lock()
	d.ended = true
	d.mu.Unlock()
	d.end()
	done := make(chan struct{})
	go func() {
		d.work.Wait()
		close(done)
	}()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-done:
	case <-timer.C:
	}
	errs := make([]error, len(d.nodes))
	for i, n := range d.nodes {
		errs[i] = n.store.Close()
	}
	return errors.Join(errs...)
}

// note registers an attempt with the driver, for as long as its commands are in
// flight or its hold lasts. It counts the attempt as work. It returns false if
// Close has begun.
func (d *Driver) note(a *attempt) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.ended {
		return false
	}
	d.work.Add(1)
	d.attempts[a.c.Token] = a
	if len(d.attempts) >= d.sweepAt {
		now := time.Now()
		for token, old := range d.attempts {
			if now.After(old.until) {
				delete(d.attempts, token) // nobody has released it
			}
		}
		d.sweepAt = 2*len(d.attempts) + 64
	}
	return true
}

// releasing prevents further commands for the hold of c. It returns the attempt
// that took the hold, or nil if the driver does not know of it. It counts the
// Release as work.
func (d *Driver) releasing(c backend.Claim) (*attempt, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.ended {
		return nil, errClosed
	}
	a, lost := d.holdingLocked(c)
	if lost {
		return nil, backend.ErrLost
	}
	d.work.Add(1)
	if a != nil {
		a.released = true
		delete(d.attempts, c.Token)
	}
	return a, nil
}

// holding returns the attempt by which c is held, or nothing if the driver
// does not know of it; and whether it knows that c is not held, though nodes
// may still have a record that is about to be given back.
func (d *Driver) holding(c backend.Claim) (a *attempt, lost bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.holdingLocked(c)
}

func (d *Driver) holdingLocked(c backend.Claim) (a *attempt, lost bool) {
	if a = d.attempts[c.Token]; a != nil && a.over {
		return nil, true
	}
	return a, false
}

// lasts notes that the records of a hold may last longer. A refused renewal also
// prolongs the records on the nodes that still have one.
func (d *Driver) lasts(r *renewal) {
	if r.a == nil {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if until := r.began.Add(r.c.TTL + r.c.Timeout); until.After(r.a.until) {
		r.a.until = until
	}
}

// busy is closed when nothing is under way any more that may give node i the
// record of a.
func (d *Driver) busy(a *attempt, i int) <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return a.busy[i]
}

// leaving is called before the record of a is released on node i. It reports
// whether the node may have the record, whether a command in flight may still
// write it there, and until when it may last.
func (d *Driver) leaving(a *attempt, i int) (there, doubt bool, until time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	there, doubt = a.there[i], a.doubt[i]
	a.there[i], a.doubt[i] = false, false
	return there, doubt, a.until
}
