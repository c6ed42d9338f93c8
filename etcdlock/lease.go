package etcdlock

import (
	"context"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
)

// lease is a lease of etcd. At most one hold or waiter of this driver uses it at a time.
type lease struct {
	id    int64
	asked int64 // the term that was asked for, in seconds
	ttl   int64 // the term that etcd has granted, in seconds

	// began is the time, on the driver's clock, at which the driver sent the last request that
	// began the term anew. The lease does not end before began + ttl.
	began atomic.Int64

	// doubtful is set if a put under the lease has an unknown outcome. Such a lease is never used
	// again, because a late put would change the next hold on the lease. A late keep-alive is
	// harmless.
	doubtful atomic.Bool

	beat atomic.Pointer[beat] // the last answer to a keep-alive of a waiter; nil if there was none

	since time.Time // when the lease was last given back to the pool
}

const (
	idleTime   = 5 * time.Second // an unused lease is revoked after this time
	maxIdle    = 1024            // how many unused leases of one term are kept
	revokeTime = 3 * time.Second // bounds one attempt to revoke a lease
)

// pool keeps unused leases, so that a hold need not wait for a new lease.
type pool struct {
	d    *driver
	mu   sync.Mutex         // guards idle
	idle map[int64][]*lease // maps a term in seconds to the unused leases for which that term was asked
}

// seconds returns ttl rounded up to whole seconds, and at least minTTL.
func seconds(ttl time.Duration) int64 {
	return max(int64(minTTL/time.Second), int64((ttl-1)/time.Second)+1)
}

// term returns the term of a lease.
func (l *lease) term() time.Duration { return time.Duration(l.ttl) * time.Second }

// isRefused reports whether etcd has answered a waiter's keep-alive that the lease has ended.
func (l *lease) isRefused() bool {
	b := l.beat.Load()
	return b != nil && b.ttl <= 0
}

// age returns how much of l's term may have passed.
func (d *driver) age(l *lease) time.Duration { return d.clock.now() - time.Duration(l.began.Load()) }

// take returns a lease with a term of secs seconds, from the pool if possible. Part of the term of
// a pooled lease has passed. The argument now is the present time by the driver's clock.
func (p *pool) take(ctx context.Context, secs int64, now time.Duration) (*lease, error) {
	if l := p.reuse(secs, now); l != nil {
		return l, nil
	}
	return p.grant(ctx, secs)
}

// reuse takes leases out of the pool, the last one first, until it finds a young one. It returns
// that one, or nil if there is none, and ends the others that it has taken out. A lease is young if
// at least a third of its term is left.
func (p *pool) reuse(secs int64, now time.Duration) *lease {
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(p.idle[secs]) > 0 {
		last := len(p.idle[secs]) - 1
		l := p.idle[secs][last]
		p.idle[secs] = p.idle[secs][:last]
		if age := now - time.Duration(l.began.Load()); age <= l.term()*2/3 {
			return l
		}
		p.d.bury(l)
	}

	return nil
}

// The method grant creates a lease. The driver chooses the lease's number, so that it can revoke
// the lease even if the answer is lost.
func (p *pool) grant(ctx context.Context, secs int64) (*lease, error) {
	l := &lease{id: rand.Int64N(1<<62) + 1, asked: secs, ttl: secs}
	l.began.Store(int64(p.d.clock.now()))
	r, err := call(ctx, p.d.cluster, func(m *member) (*pb.LeaseGrantResponse, error) {
		return m.leases.LeaseGrant(ctx, &pb.LeaseGrantRequest{ID: l.id, TTL: secs})
	})
	if err != nil {
		if !unchanged(err) {
			p.d.bury(l) // etcd may have made the lease
		}
		return nil, err
	}

	l.ttl = r.TTL
	return l, nil
}

// The method give puts a lease into the pool, or ends it if it must not be reused. The caller knows
// for certain that the lease has no entry. If the lease is old, take or prune ends it later,
// because to read the driver's clock here would cost each unlock two system calls.
func (p *pool) give(l *lease) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if l.doubtful.Load() || p.d.isClosed() || len(p.idle[l.asked]) >= maxIdle {
		p.d.bury(l)
		return
	}
	l.since = time.Now()
	p.idle[l.asked] = append(p.idle[l.asked], l)
}

// prune removes and ends the leases that have been in the pool for the time maxUnused or longer.
func (p *pool) prune(maxUnused time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for secs, leases := range p.idle {
		var stay []*lease
		for _, l := range leases {
			if time.Since(l.since) < maxUnused {
				stay = append(stay, l)
			} else {
				p.d.bury(l)
			}
		}

		p.idle[secs] = stay
		if len(stay) == 0 {
			delete(p.idle, secs)
		}
	}
}

// bury marks a lease as one that must not be used again, and starts a goroutine that ends it. The
// goroutine tries again, after ever longer pauses, until the lease has ended or end gives up.
func (d *driver) bury(l *lease) {
	l.doubtful.Store(true)
	d.active.Add(1)
	d.cluster.spawn(func() {
		defer d.active.Add(-1)
		for rest := 50 * time.Millisecond; !d.end(l); rest = min(2*rest, time.Second) {
			pause(d.cluster.ctx, rest)
		}
	})
}

// buryForeign ends the lease with this id, which any driver may have made. The term of the lease is
// not known here. The term of 1 s makes the method end give up after 12 s.
func (d *driver) buryForeign(id int64) {
	l := &lease{id: id, ttl: 1}
	l.began.Store(int64(d.clock.now()))
	d.bury(l)
}

// The method end tries once to revoke a lease. It returns true if the lease has ended, or if it is
// no use to try again, and false if the caller must try again.
func (d *driver) end(l *lease) bool {
	if d.burials.take(d.cluster.ctx) != nil {
		return true // the driver is closed, so the lease ends with its term
	}
	defer d.burials.give()

	ctx, cancel := context.WithTimeout(d.cluster.ctx, revokeTime)
	defer cancel()
	err := d.revoke(ctx, l.id)

	// Long after its term, the lease has ended by itself. A new leader begins all terms anew, so a
	// lease may outlive its term: wait for two terms and 10 s.
	isOld := d.age(l) > 2*l.term()+10*time.Second
	hasEnded := err == nil || isGone(err)
	return hasEnded || isOld || d.cluster.ctx.Err() != nil
}

// revoke ends a lease of any driver. It returns errGone if the lease had already ended.
func (d *driver) revoke(ctx context.Context, id int64) error {
	_, err := call(ctx, d.cluster, func(m *member) (*pb.LeaseRevokeResponse, error) {
		return m.leases.LeaseRevoke(ctx, &pb.LeaseRevokeRequest{ID: id})
	})
	return err
}

// timeToLive returns the rest and the whole of the term of any driver's lease. If the lease has
// ended, GrantedTTL is 0, or the error is errGone.
func (d *driver) timeToLive(ctx context.Context, id int64) (*pb.LeaseTimeToLiveResponse, error) {
	return call(ctx, d.cluster, func(m *member) (*pb.LeaseTimeToLiveResponse, error) {
		return m.leases.LeaseTimeToLive(ctx, &pb.LeaseTimeToLiveRequest{ID: id})
	})
}
