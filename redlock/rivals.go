package redlock

import (
	"context"
	"math/rand/v2"
	"time"
)

const (
	wantedFor = time.Second
	maxWanted = 256 // keys; what is forgotten may cost a split vote
	shunFor   = 10 * time.Second

	minSlot    = 200 * time.Microsecond // for one of many waiters
	maxSlot    = 5 * time.Millisecond
	maxScatter = 50 * time.Millisecond // however many waiters a message names
	maxCrowd   = 1000
)

// rivalry is what this driver has seen of others who want a key.
type rivalry struct {
	at      time.Time // of the last refusal
	shunned int       // the node that is not to lead
	until   time.Time // for how long
	yields  time.Time // until when this driver leaves the key that it has released to others
}

// rivals returns the rivalry for a key. The caller holds mu.
func (d *Driver) rivals(key string) *rivalry {
	r := d.wants[key]
	if r == nil {
		if len(d.wants) >= maxWanted {
			clear(d.wants)
		}
		r = &rivalry{}
		d.wants[key] = r
	}
	return r
}

// refused notes that others had the key.
func (d *Driver) refused(key string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.rivals(key).at = time.Now()
}

// shun has node i not lead for a while: it has a record that is in the way of
// nobody but those who ask it first.
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

// rivalled reports whether others have had the key a moment ago, and may want
// it again.
func (d *Driver) rivalled(key string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	r := d.wants[key]
	if r != nil && time.Since(r.at) >= wantedFor && time.Now().After(r.until) {
		delete(d.wants, key)
		r = nil
	}
	return r != nil
}

// released notes that this driver has released a key for which crowd others wait.
// The releaser learns of the release no later than they do. If it asked again at
// once, it would get the key each time.
func (d *Driver) released(key string, crowd int) {
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

// slot is the time that one who looks among a crowd should have for himself.
func (d *Driver) slot(key string) time.Duration {
	lead := d.leader(key)
	if lead == nobody {
		return minSlot
	}
	return min(max(2*time.Duration(d.nodes[lead].trip.Load()), minSlot), maxSlot)
}

// doze sleeps, but not past the end of ctx.
func doze(ctx context.Context, pause time.Duration) {
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}
