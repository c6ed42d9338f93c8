package redlock

import (
	"context"
	"math/rand/v2"
	"time"
)

const (
	wantedFor = time.Second
	maxWanted = 256 // keys; a forgotten key may cost a split vote
	shunFor   = 10 * time.Second

	minSlot    = 200 * time.Microsecond // for one of many waiters
	maxSlot    = 5 * time.Millisecond
	maxScatter = 50 * time.Millisecond // whatever number of waiters a message reports
	maxCrowd   = 1000
)

// rivalry is the contention that this driver has seen for a key.
type rivalry struct {
	at      time.Time // of the last refusal
	shunned int       // the node that must not lead
	until   time.Time // when that node may lead again
	yields  time.Time // until when this driver leaves the key to others, after its release
}

// rivals returns the rivalry for a key. The caller holds d.mu.
func (d *Driver) rivals(key string) *rivalry {
	r := d.wants[key]
	if r == nil {
		if len(d.wants) >= maxWanted {
			// To forget all keys costs a split vote at most. To find the oldest
			// costs time.
			clear(d.wants)
		}
		r = &rivalry{}
		d.wants[key] = r
	}
	return r
}

// refused records that another caller had the key.
func (d *Driver) refused(key string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.rivals(key).at = time.Now()
}

// shun excludes node i from leading for a while. The node has a record that blocks
// only callers that ask this node first.
func (d *Driver) shun(key string, i int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	r := d.rivals(key)
	r.shunned, r.until = i, time.Now().Add(shunFor)
}

// leads reports whether node i may lead.
func (d *Driver) leads(key string, i int) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	r := d.wants[key]
	return r == nil || r.shunned != i || time.Now().After(r.until)
}

// rivalled reports whether another caller had the key within the last second.
func (d *Driver) rivalled(key string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	r := d.wants[key]

	// The entry also names the shunned node, so it stays until both times are over.
	if r != nil && time.Since(r.at) >= wantedFor && time.Now().After(r.until) {
		delete(d.wants, key)
		r = nil
	}
	return r != nil
}

// released records that this driver has released a key for which crowd clients wait.
// The releaser learns of the release no later than they do. If it asked again at
// once, it would get the key each time.
func (d *Driver) released(key string, crowd int) {
	// Before mu is locked, because slot locks it.
	window := min(time.Duration(crowd)*d.slot(key), maxScatter)
	d.mu.Lock()
	defer d.mu.Unlock()

	r := d.rivals(key)
	r.at = time.Now()
	r.yields = r.at.Add(rand.N(window))
}

// yields returns how long this driver still leaves the key to others.
func (d *Driver) yields(key string) time.Duration {
	d.mu.Lock()
	defer d.mu.Unlock()
	if r := d.wants[key]; r != nil {
		return time.Until(r.yields)
	}
	return 0
}

// slot returns the time that each of many waiters should have for its attempt.
func (d *Driver) slot(key string) time.Duration {
	lead := d.leader(key)
	if lead == noLead {
		return minSlot
	}
	return min(max(2*time.Duration(d.nodes[lead].latency.Load()), minSlot), maxSlot)
}

// doze returns after pause, or sooner when ctx is done.
func doze(ctx context.Context, pause time.Duration) {
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}
