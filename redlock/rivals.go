package redlock

import (
	"context"
	"time"
)

const (
	wantedFor = time.Second      // how long a key counts as contended after a refusal
	maxWanted = 256              // the largest number of keys that are remembered; callers of other keys may split votes or lose their order
	shunFor   = 10 * time.Second // how long a shunned node must not lead
)

// rivalry is the contention that this driver has seen for a key.
type rivalry struct {
	at      time.Time         // the time of the last refusal
	shunned map[int]time.Time // when each node that must not lead may lead again
	until   time.Time         // when all nodes may lead again
}

// rivalsLocked returns the rivalry for a key. If the key has no rivalry, it adds a new one.
func (d *driver) rivalsLocked(key string) *rivalry {
	r := d.wants[key]
	if r == nil {
		if len(d.wants) >= maxWanted {
			// Forget all keys, because a search for the oldest key would take time.
			clear(d.wants)
		}
		r = &rivalry{shunned: map[int]time.Time{}}
		d.wants[key] = r
	}
	return r
}

// refused records that another caller had the key, or waits for it.
func (d *driver) refused(key string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.rivalsLocked(key).at = time.Now()
}

// shun prevents node i from leading for the time shunFor. A node is shunned if its record blocks
// only callers that ask this node first; if it lacks the holder's record, so that the release wakes
// no waiter there; or if it cannot keep a queue.
func (d *driver) shun(key string, i int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	r := d.rivalsLocked(key)
	r.until = time.Now().Add(shunFor)
	r.shunned[i] = r.until
}

// leads reports whether node i may lead.
func (d *driver) leads(key string, i int) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	r := d.wants[key]
	return r == nil || time.Now().After(r.shunned[i])
}

// rivalled reports whether another caller had the key, or waited for it, within the last second. It
// also returns true while a node is shunned.
func (d *driver) rivalled(key string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	r := d.wants[key]

	// Keep the entry until both times have passed, because it also names the shunned nodes.
	if r != nil && time.Since(r.at) >= wantedFor && time.Now().After(r.until) {
		delete(d.wants, key)
		r = nil
	}
	return r != nil
}

// doze returns after the duration pause, or as soon as ctx is done.
func doze(ctx context.Context, pause time.Duration) {
	select {
	case <-time.After(pause):
	case <-ctx.Done():
	}
}
