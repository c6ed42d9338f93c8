package redlock

import (
	"errors"
	"time"

	"github.com/hasplock/hasp/backend"
)

// patience is how long Close waits for calls under way.
const patience = time.Second

// spawn runs f on a goroutine that Close waits for, unless it has begun.
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

// chase has f release c on the node in the background, unless that is under
// way already, as it may be where a release is repeated.
func (d *Driver) chase(n *node, c backend.Claim, f func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	x := chased{c.Token, n.i}
	if d.chased[x] {
		return
	}
	d.chased[x] = d.spawnLocked(func() {
		f()
		d.mu.Lock()
		defer d.mu.Unlock()
		delete(d.chased, x)
	})
}

// sleep reports whether it was not the end of the driver that woke it.
func (d *Driver) sleep(pause time.Duration) bool {
	if pause <= 0 {
		return true
	}
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-d.closing:
		return false
	}
}

// Close ends what callers that have left may still have to undo, and closes
// the connections of a Driver that was opened by URL, and of any those that
// waiters listen on.
func (d *Driver) Close() error {
	d.mu.Lock()
	if !d.ended {
		d.ended = true
		close(d.closing)
	}
	d.mu.Unlock()
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

// note has the driver know an attempt, and the calls that it consists of, as
// long as anything of it is under way or held.
func (d *Driver) note(a *attempt) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.ended {
		return false
	}
	d.work.Add(len(d.nodes) + 1)
	d.attempts[a.c.Token] = a
	if len(d.attempts) >= d.sweepAt {
		now := time.Now()
		for token, old := range d.attempts {
			if old.underWay == 0 && now.After(old.until) {
				delete(d.attempts, token) // nobody has released it
			}
		}
		d.sweepAt = 2*len(d.attempts) + 64
	}
	return true
}

// releasing has nothing more begun for the hold of c, and returns it, or
// nothing if the driver does not know of it. It counts the calls of a Release.
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
	d.work.Add(len(d.nodes) + 1)
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
	if a = d.attempts[c.Token]; a != nil && !a.over {
		return a, false
	}
	return nil, d.unsettled[c.Token] > 0
}

// renewed notes that a hold lasts longer.
func (d *Driver) renewed(r *renewal) {
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

// leaving reports whether node i may have the record of a, which is about to
// be released, and whether a command on its way may still put it there.
func (d *Driver) leaving(a *attempt, i int) (there, doubt bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	there, doubt = a.there[i], a.doubt[i]
	a.there[i], a.doubt[i] = false, false
	return there, doubt
}
