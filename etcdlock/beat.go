package etcdlock

import (
	"cmp"
	"context"
	"sync"
	"sync/atomic"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
)

const (
	// maxBeats bounds how many keep-alives of a Client are under way at once.
	maxBeats = 64

	// A stream whose oldest keep-alive has no answer for this long is replaced, if no caller waits for
	// that answer any more.
	stuckTime = 5 * time.Second
)

// beat is a keep-alive with its answer.
type beat struct {
	// A time before the keep-alive was sent, by the driver's clock. The lease does not end before
	// began + ttl.
	began time.Duration

	ttl  int64   // the lease's term in seconds; 0 or less if the lease has ended
	term uint64  // the raft term that the member knew; each leader has another raft term
	m    *member // the member that answered
	err  error
}

// outcome returns nil if the keep-alive has begun the lease's term anew, and records that time. The
// argument r is the answer to a later read or put of the lease's entry, which has shown the entry.
//
// A keep-alive alone proves nothing. A deposed leader may answer it, and so may a leader that is
// revoking the lease. The later read or put proves that the lease was alive after the keep-alive. If
// both answers came over the same connection, and are from the same raft term, the leader has begun
// the lease's term anew.
func (b beat) outcome(l *lease, r txnAnswer) error {
	switch {
	case b.err != nil:
		return b.err
	case b.ttl <= 0, b.m != r.m, b.term != r.Header.RaftTerm:
		return errDoubtful
	}
	l.beganAt(b.began)
	return nil
}

// beat sends a keep-alive, which begins the term of a lease anew.
func (c *cluster) beat(ctx context.Context, lease int64) (b beat) {
	select {
	case c.beats <- struct{}{}:
		defer func() { <-c.beats }()
		_, b.err = call(ctx, c, func(m *member) (any, error) {
			b = m.beat(ctx, lease)
			return nil, b.err
		})
	case <-ctx.Done():
		b.err = ctx.Err()
	}
	return b
}

// pipe is one of the two streams that carry all keep-alives of a member. etcd answers the
// keep-alives of a stream one after another. If etcd is stuck with one of them, because it is just
// ending that lease, the next ones are sent again on the other stream.
type pipe struct {
	m *member

	mu sync.Mutex // guards the fields below

	// The stream is nil before the first keep-alive.
	stream *stream[pb.LeaseKeepAliveRequest, pb.LeaseKeepAliveResponse]
	asks   []*ask // the keep-alives without an answer, in the order in which they were sent
	err    error  // why the stream has ended; nil while it is open
}

// ask is a keep-alive that was sent on one stream, or on both.
type ask struct {
	lease  int64
	began  time.Duration
	sent   time.Time
	answer chan beat   // has room for the answers of both streams
	over   atomic.Bool // no caller waits for the answer any more
}

// beat sends a keep-alive on one of the streams. If another keep-alive blocks that stream, beat
// sends it on the other one as well.
func (m *member) beat(ctx context.Context, lease int64) beat {
	a := &ask{
		lease:  lease,
		began:  m.cluster.clock.now(),
		sent:   time.Now(),
		answer: make(chan beat, len(m.pipes)),
	}
	defer a.over.Store(true)
	first, second := m.choose()
	first.send(a)

	patience := liveness
	if end, ok := ctx.Deadline(); ok {
		patience = min(patience, time.Until(end)/4)
	}
	late := time.NewTimer(patience)
	defer late.Stop()
	for {
		select {
		case b := <-a.answer:
			return b
		case <-late.C:
			if first.blocks(a) {
				second.send(a)
			}
		case <-ctx.Done():
			return beat{err: ctx.Err()}
		case <-m.client.Ctx().Done():
			return beat{err: &noChange{m.client.Ctx().Err()}}
		}
	}
}

// choose returns both streams, first the one that will probably answer sooner. It replaces a stream
// that has ended or is stuck.
func (m *member) choose() (first, second *pipe) {
	m.mu.Lock()
	defer m.mu.Unlock()
	var waits [len(m.pipes)]int
	for i, p := range m.pipes {
		n, isLate, use := p.load()
		if !use {
			m.pipes[i] = &pipe{m: m}
			p.moveTo(m.pipes[i])
		}
		if waits[i] = n; isLate {
			waits[i] += maxBeats
		}
	}
	if waits[1] < waits[0] {
		return m.pipes[1], m.pipes[0]
	}
	return m.pipes[0], m.pipes[1]
}

// load returns how many keep-alives have no answer, whether the oldest one is late, and whether the
// stream may be used.
func (p *pipe) load() (n int, isLate, use bool) {
	if p == nil {
		return 0, false, false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err != nil || len(p.asks) == 0 {
		return 0, false, p.err == nil
	}
	oldest := p.asks[0]
	age := time.Since(oldest.sent)
	return len(p.asks), age >= liveness, age < stuckTime || !oldest.over.Load()
}

// moveTo ends a stream, and sends the keep-alives that callers still wait for on another one.
func (p *pipe) moveTo(next *pipe) {
	if p == nil {
		return
	}
	p.mu.Lock()
	asks := p.asks
	p.asks = nil
	p.err = errNoAnswer
	if p.stream != nil {
		p.stream.end()
	}
	p.mu.Unlock()
	for _, a := range asks {
		if !a.over.Load() {
			next.send(a)
		}
	}
}

func (p *pipe) send(a *ask) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err != nil {
		a.reply(beat{err: &noChange{p.err}})
		return
	}
	if p.stream == nil {
		p.stream = openStream(p.m, p.m.leases.LeaseKeepAlive, p.answer, p.fail)
	}
	p.asks = append(p.asks, a)
	p.stream.send(&pb.LeaseKeepAliveRequest{ID: a.lease})
}

// reply passes the answer on, unless both streams have answered already.
func (a *ask) reply(b beat) {
	select {
	case a.answer <- b:
	default:
	}
}

// blocks reports whether etcd has to answer other keep-alives before a.
func (p *pipe) blocks(a *ask) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.asks) > 0 && p.asks[0] != a
}

// answer passes an answer of etcd on to the oldest keep-alive.
func (p *pipe) answer(r *pb.LeaseKeepAliveResponse) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.asks) == 0 || p.asks[0].lease != r.ID {
		return // the stream was ended by moveTo
	}
	a := p.asks[0]
	p.asks = p.asks[1:]
	a.reply(beat{began: a.began, ttl: r.TTL, term: r.GetHeader().GetRaftTerm(), m: p.m})
}

// fail ends all keep-alives without an answer. A keep-alive may be sent again.
func (p *pipe) fail(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.err = cmp.Or(p.err, err)
	for _, a := range p.asks {
		a.reply(beat{err: &noChange{err}})
	}
	p.asks = nil
}
