package etcdlock

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"

	"github.com/hasplock/hasp/backend"
)

// wait is the state of one Wait.
type wait struct {
	d *Driver
	c backend.Claim
	q *queue
	w *waiter

	began time.Time
	lease *lease
	entry *mvccpb.KeyValue
	sure  bool      // the entry of lease is in the queue, and no call about it is unanswered
	held  error     // the last answer, if it was that the key is held
	since time.Time // when the first of the calls that failed began, or zero
	err   error     // by which they failed
	beat  *beat     // that is under way, or nil

	unknown error // the entry may be under another lease
	late    bool  // a put of the entry had no answer, and may still arrive
}

// Wait puts an entry into the queue of the key, and returns when all entries before it that
// exclude it are gone.
func (d *Driver) Wait(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	if err := d.check(ctx, c); err != nil {
		return backend.Grant{}, err
	}
	d.begin()
	defer d.finish()
	defer d.cluster.wait()()

	s := &wait{d: d, c: c, began: time.Now(), w: &waiter{wake: make(chan struct{}, 1)}}
	s.q = d.join(c.Key, s.w)
	g, err := s.run(ctx)
	s.q.leave(c.Key, s.w)

	if err != nil && s.lease != nil {
		s.leave()
	}
	return g, err
}

// leave ends the lease of a Wait that has failed, and the entry with it.
func (s *wait) leave() {
	switch {
	case s.unknown != nil:
		// The entry may be under another lease, so a Release must look for it.
		s.d.bury(s.lease, "", "")
	case s.sure && s.beat == nil && !s.late:
		s.d.bury(s.lease, s.c.Token, string(s.entry.Key))
	default:
		s.d.bury(s.lease, s.c.Token, "")
	}
}

// run returns the grant, or the error that ends the Wait.
func (s *wait) run(ctx context.Context) (backend.Grant, error) {
	for {
		if err := s.ended(ctx); err != nil {
			return backend.Grant{}, err
		}
		began := time.Now()
		switch s.q.place(s.w) {
		case front:
			g, ok, err := s.grant(ctx)
			if s.unknown != nil {
				s.sure = false
				return backend.Grant{}, s.unknown
			}
			if ok || err != nil && definite(err) && !errors.Is(err, errGone) {
				return g, err
			}
			s.note(ctx, began, err)
		case behind:
			s.sleep(ctx)
		case unsure:
			if !s.turn(ctx) {
				continue
			}
			began = time.Now()
			armed, err := s.enter(ctx)
			<-s.q.turns
			if armed != nil {
				err = s.watched(ctx, armed)
			}
			if err != nil && definite(err) && !errors.Is(err, errGone) {
				return backend.Grant{}, err
			}
			s.note(ctx, began, err)
		}
	}
}

// ended returns the error that ends the Wait, or nil.
func (s *wait) ended(ctx context.Context) error {
	select {
	case <-s.d.closed:
		return errClosed
	default:
	}

	// An outage is one of this Wait's own calls, or of the driver's.
	since, err := s.since, s.err
	if silent := s.d.cluster.silence(); since.IsZero() && !silent.IsZero() {
		since, err = silent, s.d.cluster.lastErr()
		if silent.Before(s.began) {
			since = s.began
		}
	}
	if err == nil {
		err = errors.New("etcd: no answer")
	}
	outage := &backend.UnavailableError{Since: since, Err: err}
	silent := time.Duration(0)
	if !since.IsZero() {
		silent = time.Since(since)
	}

	switch {
	case ctx.Err() == nil && silent >= s.c.Timeout:
		return outage
	case ctx.Err() == nil:
		return nil
	case silent >= s.c.Timeout/3 || s.err != nil:
		return errors.Join(outage, ctx.Err())
	case s.held != nil:
		return errors.Join(s.held, ctx.Err())
	}
	return ctx.Err()
}

// note takes in the outcome of a call that began at a time. After an outage it sleeps for a
// moment.
func (s *wait) note(ctx context.Context, began time.Time, err error) {
	switch {
	case err == nil:
		s.since, s.err = time.Time{}, nil
	case errors.Is(err, errGone):
		// The lease has ended, and the entry with it. The next attempt takes another lease.
		if s.lease != nil {
			s.d.bury(s.lease, "", "")
		}
		s.lease, s.sure, s.beat = nil, false, nil
		s.q.forget(s.w)
	case ctx.Err() == nil:
		if s.err = err; s.since.IsZero() {
			s.since = began
		}
		pause(ctx, 20*time.Millisecond+rand.N(80*time.Millisecond))
	}
}

func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// bounded returns a context for one call, which ends with the longest outage that this Wait
// may go on in.
func (s *wait) bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	left := s.c.Timeout
	if !s.since.IsZero() {
		left -= time.Since(s.since)
	}
	ctx, cancel := context.WithTimeout(ctx, left)
	stop := context.AfterFunc(s.d.cluster.ctx, cancel)
	return ctx, func() { stop(); cancel() }
}

// turn waits for this waiter's turn to enter the queue. It returns false if that takes
// long, so that the caller looks for an end of the Wait.
func (s *wait) turn(ctx context.Context) bool {
	if s.lease != nil {
		s.keepAlive()
	}
	t := time.NewTimer(100 * time.Millisecond)
	defer t.Stop()
	select {
	case s.q.turns <- struct{}{}:
		return true
	case <-t.C:
	case <-ctx.Done():
	case <-s.d.closed:
	}
	return false
}

// enter puts the entry into the queue, unless it is there, and reads the queue. A repeat
// finds the entry in its place. If there is no watch, enter returns a channel that is closed
// when there is one.
func (s *wait) enter(ctx context.Context) (armed <-chan struct{}, err error) {
	within, cancel := s.bounded(ctx)
	defer cancel()
	if s.w.isLost(s.q) && s.lease != nil {
		// Somebody has removed the entry. Its lease is alive or not.
		s.d.bury(s.lease, "", "")
		s.lease, s.sure, s.beat = nil, false, nil
	}
	if s.lease == nil {
		l, err := s.d.pool.take(within, min(seconds(s.c.TTL), s.d.window))
		if err != nil {
			return nil, s.failed(ctx, err)
		}
		s.lease, s.late = l, false
	}

	// The watch comes first, so that no deletion falls between the two.
	s.entry = newEntry(s.c, s.lease)
	entry := string(s.entry.Key)
	known, ok, armed := s.q.begin(s.w, entry)
	if !ok {
		return armed, nil
	}

	queue := queueOf(s.c.Key)
	s.sure = false
	r, err := call(within, s.d.cluster, func(m *member) (*pb.TxnResponse, error) {
		return m.kv.Txn(within, txn([]*pb.Compare{createdAt(entry, nil, 0)},
			[]*pb.RequestOp{put(entry, s.entry.Value, s.lease.id), name(entry), names(queue, known), first(queue)},
			name(entry), names(queue, known), first(queue)))
	})
	if err != nil {
		s.late = s.late || !unchanged(err)
		return nil, s.failed(ctx, err)
	}
	ops := r.Responses[len(r.Responses)-3:]
	s.sure = true
	own := ops[0].GetResponseRange().Kvs[0]
	s.entry.CreateRevision, s.entry.ModRevision = own.CreateRevision, own.ModRevision
	s.q.read(s.w, own.CreateRevision, r.Header.Revision, ops[1].GetResponseRange().Kvs)
	s.held = refusalFor(ops[2].GetResponseRange().Kvs, entry)
	return nil, nil
}

// watched waits until the queue has a watch.
func (s *wait) watched(ctx context.Context, armed <-chan struct{}) error {
	within, cancel := s.bounded(ctx)
	defer cancel()
	select {
	case <-armed:
		return nil
	case <-s.d.closed:
		return nil
	case <-within.Done():
		return s.failed(ctx, errors.New("etcd: no answer to a watch"))
	}
}

// refusalFor is refusal for a waiter, who may be the first.
func refusalFor(kvs []*mvccpb.KeyValue, name string) error {
	if len(kvs) > 0 && string(kvs[0].Key) == name {
		return nil
	}
	return refusal(kvs)
}

// failed returns err, or nil if the caller's context caused it.
func (s *wait) failed(ctx context.Context, err error) error {
	if ctx.Err() != nil && !definite(err) {
		return nil // ended says more
	}
	return err
}

func (w *waiter) isLost(q *queue) bool {
	q.d.mu.Lock()
	defer q.d.mu.Unlock()
	return w.lost
}

// sleep waits for a change, and keeps the lease alive meanwhile.
func (s *wait) sleep(ctx context.Context) {
	s.keepAlive()
	t := time.NewTimer(min(time.Duration(s.lease.ttl)*time.Second/8, max(s.c.Timeout/8, 10*time.Millisecond), time.Second))
	defer t.Stop()
	var beaten <-chan struct{}
	if s.beat != nil {
		beaten = s.beat.done
	}
	select {
	case <-s.w.wake:
	case <-beaten:
	case <-t.C:
	case <-ctx.Done():
	case <-s.d.closed:
	}
}

// keepAlive begins the lease's term anew if a third of it has passed.
func (s *wait) keepAlive() {
	if b := s.beat; b != nil {
		select {
		case <-b.done:
			s.beat = nil
			s.beaten(b)
		default:
			return
		}
	}
	if s.d.left(s.lease) > time.Duration(s.lease.ttl)*time.Second*2/3 || s.lease.doubtful.Load() {
		return
	}

	s.beat = s.d.cluster.tryBeat(s.lease.id)
}

// beaten takes in the answer to a beat.
func (s *wait) beaten(b *beat) {
	switch {
	case b.err != nil:
	case b.ttl <= 0:
		s.d.mu.Lock()
		s.w.lost = true
		s.d.mu.Unlock()
	default:
		s.d.beganAt(s.lease, b.began)
	}
}

// grant returns the hold of an entry at the front of the queue. A hold that is not renewed
// gets the whole TTL. A hold that is renewed starts with the rest of its place's lease, at
// least two thirds of that term, and its first renewal moves it to a lease of the whole TTL.
func (s *wait) grant(ctx context.Context) (g backend.Grant, ok bool, err error) {
	within, cancel := s.bounded(ctx)
	defer cancel()
	term := min(s.c.TTL, time.Duration(s.lease.ttl)*time.Second)
	if term < s.c.TTL && !s.c.Renewed {
		return s.lengthen(within)
	}

	enough := term - backend.Drift(term)/2
	if s.c.Renewed {
		enough = term * 2 / 3
	}
	began := time.Duration(s.lease.began.Load())
	if term-(s.d.clock.now()-began) < enough || s.lease.doubtful.Load() {
		b, err := s.d.cluster.beat(within, s.lease.id)
		if err != nil {
			return g, false, s.failed(ctx, err)
		}
		ttl, err := b.wait(within)
		switch {
		case err != nil:
			return g, false, s.failed(ctx, err)
		case ttl <= 0:
			return g, false, errGone
		}
		s.d.beganAt(s.lease, b.began)
		began = b.began
	}

	// The entry may have been removed meanwhile, by a Break, whose event has come.
	if s.q.place(s.w) != front {
		return g, false, nil
	}
	if s.late {
		// A put that arrives after the release would take the key for nobody, if the lease
		// lived on.
		s.lease.doubtful.Store(true)
	}
	return s.d.newHold(s.c, s.entry, s.lease, began, term), true, nil
}

// lengthen moves the entry from the lease of a place to one with the whole term.
func (s *wait) lengthen(ctx context.Context) (backend.Grant, bool, error) {
	l, err := s.d.pool.grant(ctx, seconds(s.c.TTL))
	if err != nil {
		return backend.Grant{}, false, err
	}
	g, err := s.d.move(ctx, s.c, s.entry, l)
	switch {
	case err == nil:
		g.Fence = 0
		if s.c.Fenced {
			g.Fence = uint64(s.entry.CreateRevision)
		}
		return g, true, nil
	case errors.Is(err, errGone):
		// It was removed. The event may not have come yet.
		return g, false, err
	case !unchanged(err):
		// The entry may be under either lease. The hold was not granted, so both end.
		s.unknown = err
		s.d.bury(l, "", "")
	}
	return g, false, err
}
