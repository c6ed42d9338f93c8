package etcdlock

import (
	"context"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
)

// lease is a lease of this driver. One hold or waiter at a time uses it.
type lease struct {
	id    int64
	asked int64 // the term that was asked for, in seconds
	ttl   int64 // the term that etcd has granted, in seconds

	// began is when the last request that began its term anew was sent, by the driver's
	// clock. The lease does not end before began + ttl.
	began atomic.Int64

	// doubtful is set if a call about the lease has an unknown outcome. Such a lease is
	// never used again: a command that arrives late would change another hold.
	doubtful atomic.Bool
}

// foreign returns a lease that this driver only ends. Its term is not known, and counts from
// now.
func (d *Driver) foreign(id int64) *lease {
	l := &lease{id: id, asked: 1, ttl: 1}
	l.began.Store(int64(d.clock.now()))
	return l
}

const (
	idleTime   = 5 * time.Second // an unused lease is revoked after this time
	maxIdle    = 1024            // unused leases of one term
	revokeTime = 3 * time.Second // for one attempt to revoke a lease
)

// pool keeps leases that nobody uses, so that a hold need not wait for a new one.
type pool struct {
	d *Driver

	mu     sync.Mutex            // guards all below
	idle   map[int64][]idleLease // by the term that was asked for, in the order of their return
	timer  *time.Timer           // removes leases; nil if there are none
	closed bool
}

type idleLease struct {
	*lease
	since time.Time
}

// seconds returns the term that a lease for ttl has.
func seconds(ttl time.Duration) int64 {
	return max(int64(minTTL/time.Second), int64((ttl-1)/time.Second)+1)
}

// left returns how long a lease lasts at least.
func (d *Driver) left(l *lease) time.Duration {
	return time.Duration(l.ttl)*time.Second - d.age(l)
}

// age returns how long ago the term of l began, at most.
func (d *Driver) age(l *lease) time.Duration { return d.clock.now() - time.Duration(l.began.Load()) }

// beganAt notes that the term of l began anew at a time of the clock, or later.
func (d *Driver) beganAt(l *lease, at time.Duration) {
	for {
		old := l.began.Load()
		if old >= int64(at) || l.began.CompareAndSwap(old, int64(at)) {
			return
		}
	}
}

// take returns a lease with a term of secs. If it comes from the pool, its present term is
// shorter.
func (p *pool) take(ctx context.Context, secs int64) (*lease, error) {
	p.mu.Lock()
	if ls := p.idle[secs]; len(ls) > 0 {
		// The last one has the longest term. If that is too short, all are.
		l := ls[len(ls)-1]
		if p.idle[secs] = ls[:len(ls)-1]; p.d.left(l.lease) >= time.Duration(secs)*time.Second/3 {
			p.mu.Unlock()
			return l.lease, nil
		}
		// They would end by themselves, but a new leader begins their terms anew.
		for _, l := range ls {
			p.d.bury(l.lease, "")
		}
		delete(p.idle, secs)
	}
	p.mu.Unlock()
	return p.grant(ctx, secs)
}

// grant makes a lease. The driver chooses the number, so that it can revoke the lease also
// if the answer is lost.
func (p *pool) grant(ctx context.Context, secs int64) (*lease, error) {
	l := &lease{id: rand.Int64N(1<<62) + 1, asked: secs}
	at := p.d.clock.now()
	l.began.Store(int64(at))
	r, err := call(ctx, p.d.cluster, func(m *member) (*pb.LeaseGrantResponse, error) {
		at = p.d.clock.now()
		return m.leases.LeaseGrant(ctx, &pb.LeaseGrantRequest{ID: l.id, TTL: secs})
	})
	if err != nil {
		if !unchanged(err) {
			l.ttl = secs
			p.d.bury(l, "")
		}
		return nil, err
	}
	l.ttl = r.TTL
	p.d.beganAt(l, at)
	return l, nil
}

// give returns a lease whose entry is gone for certain.
func (p *pool) give(l *lease) {
	if l.doubtful.Load() || p.d.left(l) < time.Duration(l.ttl)*time.Second/3 {
		p.d.bury(l, "")
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || len(p.idle[l.asked]) >= maxIdle {
		p.d.bury(l, "")
		return
	}
	p.idle[l.asked] = append(p.idle[l.asked], idleLease{l, time.Now()})
	if p.timer == nil {
		p.timer = time.AfterFunc(idleTime, p.prune)
	}
}

// prune revokes the leases that were not used for a while.
func (p *pool) prune() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.timer = nil
	for secs, ls := range p.idle {
		n := 0
		for n < len(ls) && time.Since(ls[n].since) >= idleTime-idleTime/10 {
			p.d.bury(ls[n].lease, "")
			n++
		}
		p.idle[secs] = append([]idleLease(nil), ls[n:]...)
		if n == len(ls) {
			delete(p.idle, secs)
		}
	}
	if len(p.idle) > 0 && !p.closed {
		p.timer = time.AfterFunc(idleTime/2, p.prune)
	}
}

// flush revokes all leases: etcd does not know one of them, so it has lost its data, or
// somebody has revoked leases. etcd may still have the others.
func (p *pool) flush() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, ls := range p.idle {
		for _, l := range ls {
			p.d.bury(l.lease, "")
		}
	}
	clear(p.idle)
}

// close revokes the leases of the pool.
func (p *pool) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	if p.timer != nil {
		p.timer.Stop()
	}
	for _, ls := range p.idle {
		for _, l := range ls {
			p.d.bury(l.lease, "")
		}
	}
	clear(p.idle)
}

// maxBurying bounds the clean-ups under way. After an outage there may be thousands of leases to
// end, and etcd must also serve its other clients.
const maxBurying = 64

// burial is the end of a lease that may not be used again.
type burial struct {
	lease *lease
	name  string        // of an entry that is certain, or ""
	pause time.Duration // before the next try
}

// bury ends a lease in the background. If name is not empty, the entry of that name is certain,
// so it is removed, and the lease goes back to the pool.
func (d *Driver) bury(l *lease, name string) {
	b := &burial{lease: l, name: name, pause: 50 * time.Millisecond}
	if name == "" {
		l.doubtful.Store(true)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.active++
	if d.burying < maxBurying {
		if !d.cluster.spawn(d.buryAll) {
			d.finishLocked() // the driver is closed
			return
		}
		d.burying++
	}
	d.toBury = append(d.toBury, b)
}

// buryAll ends leases until there is none to end.
func (d *Driver) buryAll() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for len(d.toBury) > 0 {
		b := d.toBury[0]
		d.toBury = d.toBury[1:]
		d.mu.Unlock()
		over := d.end(b)
		if !over {
			pause(d.cluster.ctx, b.pause)
			b.pause = min(2*b.pause, time.Second)
		}
		d.mu.Lock()

		if over {
			d.finishLocked()
		} else {
			d.toBury = append(d.toBury, b) // the next one may fare better
		}
	}
	d.burying--
}

// end tries to remove the entry of b, if it has a name, or else to revoke the lease. It reports
// whether the burial is over: the lease is revoked, or has ended in any case.
func (d *Driver) end(b *burial) (over bool) {
	ctx, cancel := context.WithTimeout(d.cluster.ctx, revokeTime)
	defer cancel()
	if b.name != "" {
		removed, err := d.removeEntry(ctx, b.lease, b.name, 0)
		if err == nil && removed {
			d.pool.give(b.lease)
			return true
		}
		b.name = ""
		b.lease.doubtful.Store(true)
	}
	err := d.revoke(ctx, b.lease.id)

	// A new leader begins the terms anew, so a lease may last for longer than its term.
	return err == nil || isGone(err) || d.cluster.ctx.Err() != nil || d.left(b.lease) < -time.Duration(b.lease.ttl+10)*time.Second
}

// revoke ends a lease of any driver. It returns errGone if the lease has ended before.
func (d *Driver) revoke(ctx context.Context, id int64) error {
	_, err := call(ctx, d.cluster, func(m *member) (*pb.LeaseRevokeResponse, error) {
		return m.leases.LeaseRevoke(ctx, &pb.LeaseRevokeRequest{ID: id})
	})
	return err
}
