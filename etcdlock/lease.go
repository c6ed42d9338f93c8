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
			p.d.bury(l.lease, "", "")
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
			p.d.bury(l, "", "")
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
		p.d.bury(l, "", "")
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || len(p.idle[l.asked]) >= maxIdle {
		p.d.bury(l, "", "")
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
			p.d.bury(ls[n].lease, "", "")
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
			p.d.bury(l.lease, "", "")
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
			p.d.bury(l.lease, "", "")
		}
	}
	clear(p.idle)
}

// burial is the end of a lease that may not be used again.
type burial struct {
	done  chan struct{}
	ended bool // its revocation ended the lease, and the entry with it; set before done is closed
}

// bury ends a lease in the background. If token is not empty, a Release of the token waits
// for that. If name is not empty, the entry of that name is certain, so it is removed, and
// the lease goes back to the pool.
func (d *Driver) bury(l *lease, token, name string) {
	b := &burial{done: make(chan struct{})}
	if token != "" {
		d.mu.Lock()
		d.burials[token] = b
		d.mu.Unlock()
	}
	if name == "" {
		l.doubtful.Store(true)
	}
	d.begin()
	run := func() {
		defer d.finish()
		b.ended = d.end(l, name)
		close(b.done)
		if token != "" {
			d.mu.Lock()
			delete(d.burials, token)
			d.mu.Unlock()
		}
	}
	if !d.cluster.spawn(run) {
		close(b.done)
		d.finish()
	}
}

// end removes the entry name, if it is not empty, or else revokes the lease. It tries until
// the lease has ended in any case. It reports whether it has ended an entry.
func (d *Driver) end(l *lease, name string) bool {
	for pause := 50 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		ctx, cancel := context.WithTimeout(d.cluster.ctx, revokeTime)
		if name != "" {
			removed, err := d.removeEntry(ctx, l, name, 0)
			cancel()
			if err == nil && removed {
				d.pool.give(l)
				return true
			}
			name = ""
			l.doubtful.Store(true)
			continue
		}

		_, err := call(ctx, d.cluster, func(m *member) (*pb.LeaseRevokeResponse, error) {
			return m.leases.LeaseRevoke(ctx, &pb.LeaseRevokeRequest{ID: l.id})
		})
		cancel()
		if err == nil || isGone(err) {
			return err == nil
		}

		// A new leader begins the terms anew, so a lease may last for longer than its term.
		if d.left(l) < -time.Duration(l.ttl+10)*time.Second {
			return false
		}
		t := time.NewTimer(pause)
		select {
		case <-t.C:
		case <-d.cluster.ctx.Done():
			t.Stop()
			return false
		}
	}
}

// revoke ends a lease of any driver.
func (d *Driver) revoke(ctx context.Context, id int64) error {
	_, err := call(ctx, d.cluster, func(m *member) (*pb.LeaseRevokeResponse, error) {
		return m.leases.LeaseRevoke(ctx, &pb.LeaseRevokeRequest{ID: id})
	})
	if isGone(err) {
		return nil
	}
	return err
}
