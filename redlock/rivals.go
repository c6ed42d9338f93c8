package redlock

import (
	"context"
	"time"
)

const (
	wantedFor = time.Second      // how long a key counts as contended after a refusal
	maxWanted = 256              // the most keys; for a key that was forgotten, votes may split, or the order is lost
	shunFor   = 10 * time.Second // how long a node must not lead
)

// rivalry is the contention that this driver has seen for a key.
type rivalry struct {
	at      time.Time         // of the last refusal
	shunned map[int]time.Time // nodes that must not lead, and when they may again
	until   time.Time         // when all nodes may lead again
}

// rivalsLocked returns the rivalry for a key, or a new one.
func (d *driver) rivalsLocked(key string) *rivalry {
	r := d.wants[key]
	if r == nil {
		if len(d.wants) >= maxWanted {
			// Forget all, because a search for the oldest key would take time.
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

// shun excludes node i from leading for a while. There are three reasons: the node's record blocks
// only callers that ask this node first; the node lacks the holder's record, so the release wakes no
// waiter there; or the node cannot keep a queue.
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

// rivalled reports whether another caller had the key, or waited for it, within the
// last second. It is also true while a node must not lead.
func (d *driver) rivalled(key string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	r := d.wants[key]

	// Keep the entry until both times are over, because it also names the shunned node.
	if r != nil && time.Since(r.at) >= wantedFor && time.Now().After(r.until) {
		delete(d.wants, key)
		r = nil
	}
	return r != nil
}

// doze returns after pause, or sooner when ctx is done.
func doze(ctx context.Context, pause time.Duration) {
	select {
	case <-time.After(pause):
	case <-ctx.Done():
	}
}
