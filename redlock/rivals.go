package redlock

import (
	"context"
	"math/rand/v2"
	"time"
)

const (
	wantedFor = time.Second
	maxWanted = 256 // keys; what is forgotten may cost a split vote
	maxCrowd  = 1000
	shunFor   = 10 * time.Second

	minSlot = 200 * time.Microsecond // of one who looks among a crowd
	maxSlot = 5 * time.Millisecond
)

// rivalry is what this driver has seen of others who want a key.
type rivalry struct {
	at      time.Time // of the last refusal
	shunned int       // the node that is not to lead
	until   time.Time // for how long
	free    time.Time // when this driver released the key
	crowd   int       // how many heard of that
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

// released notes that this driver has released a key, and how many have heard
// of it.
func (d *Driver) released(key string, crowd int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	r := d.rivals(key)
	r.at = time.Now()
	r.free, r.crowd = r.at, crowd
}

// slot is the time that one who looks among a crowd should have for himself.
func (d *Driver) slot(key string) time.Duration {
	lead := d.leader(key)
	if lead == nobody {
		return minSlot
	}
	return min(max(2*time.Duration(d.nodes[lead].trip.Load()), minSlot), maxSlot)
}

// giveWay has a caller who comes back to a key that this driver has just
// released come no sooner than those who have heard of it: nobody else could
// ever be as quick as that.
func (d *Driver) giveWay(ctx context.Context, key string) {
	d.mu.Lock()
	var free time.Time
	crowd := 0
	if r := d.wants[key]; r != nil {
		free, crowd = r.free, r.crowd
	}
	d.mu.Unlock()
	if crowd == 0 {
		return
	}
	window := time.Duration(crowd) * d.slot(key)
	if left := rand.N(window) - time.Since(free); left > 0 {
		doze(ctx, left)
	}
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
