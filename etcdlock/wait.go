package etcdlock

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"sync/atomic"
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

	began   time.Time
	lease   *lease
	entry   *mvccpb.KeyValue
	sure    bool        // the entry of lease is in the queue, and no call about it is unanswered
	late    bool        // a put of the entry had no answer, and may still arrive
	beating atomic.Bool // a keep-alive is under way
	blind   time.Time   // since when there is no watch, or zero
	since   time.Time   // when the first of the calls that failed began, or zero
	err     error       // by which they failed
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

	s := &wait{d: d, c: c, q: d.join(c.Key), w: &waiter{wake: make(chan struct{}, 1)}, began: time.Now()}
	g, err := s.run(ctx)
	s.q.leave(c.Key, s.w)
	if err != nil && s.lease != nil {
		name := ""
		if s.sure && !s.late && !s.beating.Load() {
			name = string(s.entry.Key)
		}
		d.bury(s.lease, name)
	}
	return g, err
}

// run returns the grant, or the error that ends the Wait.
func (s *wait) run(ctx context.Context) (g backend.Grant, err error) {
	for {
		if err := s.ended(ctx); err != nil {
			return g, err
		}
		began, over := time.Now(), false
		switch s.q.where(s.w) {
		case front:
			g, over, err = s.grant(ctx)
		case behind:
			s.sleep(ctx)
			continue
		case unsure:
			if !s.ready(ctx) {
				continue
			}
			began = time.Now()
			err = s.enter(ctx)
			<-s.d.turns
		}
		if over || err != nil && definite(err) && !errors.Is(err, errGone) {
			return g, err
		}

		switch {
		case err == nil:
			s.since, s.err = time.Time{}, nil
		case errors.Is(err, errGone):
			s.abandon()
		case ctx.Err() == nil:
			// The last call may have had no answer only because ctx was about to end.
			if s.err == nil || !errors.Is(err, os.ErrDeadlineExceeded) {
				s.err = err
			}
			if s.since.IsZero() {
				s.since = began
			}
			pause(ctx, 20*time.Millisecond+rand.N(80*time.Millisecond))
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
	if since.IsZero() {
		if since, err = s.d.cluster.silence(); since.IsZero() {
			since, err = s.blind, errors.New("etcd: no answer to a watch")
		}
		if !since.IsZero() && since.Before(s.began) {
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

	held := s.q.held(s.w)
	switch {
	case ctx.Err() == nil && silent >= s.c.Timeout:
		return outage
	case ctx.Err() == nil:
		return nil
	case silent >= s.c.Timeout/3 || s.err != nil:
		return errors.Join(outage, ctx.Err())
	case held != nil:
		return errors.Join(held, ctx.Err())
	}
	return ctx.Err()
}

// abandon gives up an entry that is gone. The next attempt takes another lease.
func (s *wait) abandon() {
	if s.lease != nil {
		s.d.bury(s.lease, "")
	}
	s.lease, s.sure = nil, false
	s.q.forget(s.w)
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

// ready waits until there is a watch, and for this waiter's turn to enter the queue. The watch
// comes first, so that no deletion falls between the two. It returns false if that takes long,
// so that the caller looks for an end of the Wait.
func (s *wait) ready(ctx context.Context) bool {
	s.keepAlive()
	turns := s.d.turns
	armed, changed := s.q.isArmed()
	switch {
	case armed:
		s.blind = time.Time{}
	case s.blind.IsZero():
		s.blind = time.Now()
		fallthrough
	default:
		turns = nil
	}
	t := time.NewTimer(100 * time.Millisecond)
	defer t.Stop()
	select {
	case turns <- struct{}{}:
		return true
	case <-changed:
	case <-t.C:
	case <-ctx.Done():
	case <-s.d.closed:
	}
	return false
}

// enter puts the entry into the queue, unless it is there, and reads the queue. A repeat
// finds the entry in its place.
func (s *wait) enter(ctx context.Context) error {
	within, cancel := s.bounded(ctx)
	defer cancel()
	if s.q.isLost(s.w) {
		s.abandon() // its lease is alive or not
	}
	if s.lease == nil {
		l, err := s.d.pool.take(within, min(seconds(s.c.TTL), s.d.window))
		if err != nil {
			return s.failed(ctx, err)
		}
		s.lease, s.late = l, false
	}

	s.entry = newEntry(s.c, s.lease, time.Time{})
	entry, queue := string(s.entry.Key), s.q.prefix
	known, ok := s.q.begin(s.w, entry)
	if !ok {
		return nil // the watch has just ended
	}
	s.sure = false
	r, err := call(within, s.d.cluster, func(m *member) (*pb.TxnResponse, error) {
		return m.kv.Txn(within, txn([]*pb.Compare{createdAt(entry, nil, 0)},
			[]*pb.RequestOp{put(entry, s.entry.Value, s.lease.id), name(entry), since(queue, known)},
			name(entry), since(queue, known)))
	})
	if err != nil {
		s.q.end(s.w, 0, 0, nil)
		s.late = s.late || !unchanged(err)
		return s.failed(ctx, err)
	}
	ops := r.Responses[len(r.Responses)-2:]
	s.sure = true
	own := ops[0].GetResponseRange().Kvs[0]
	s.entry.CreateRevision, s.entry.ModRevision = own.CreateRevision, own.ModRevision
	s.q.end(s.w, own.CreateRevision, r.Header.Revision, ops[1].GetResponseRange().Kvs)
	return nil
}

// failed returns err, or nil if the caller's context caused it.
func (s *wait) failed(ctx context.Context, err error) error {
	if ctx.Err() != nil && !definite(err) {
		return nil // ended says more
	}
	return err
}

// sleep waits for a change, and keeps the lease alive meanwhile.
func (s *wait) sleep(ctx context.Context) {
	s.keepAlive()
	t := time.NewTimer(min(time.Duration(s.lease.ttl)*time.Second/8, max(s.c.Timeout/8, 10*time.Millisecond), time.Second))
	defer t.Stop()
	select {
	case <-s.w.wake:
	case <-t.C:
	case <-ctx.Done():
	case <-s.d.closed:
	}
}

// keepAlive begins the lease's term anew, in the background, if a third of it has passed.
func (s *wait) keepAlive() {
	l := s.lease
	if l == nil || s.d.left(l) > time.Duration(l.ttl)*time.Second*2/3 || l.doubtful.Load() || s.beating.Swap(true) {
		return
	}
	name := string(s.entry.Key)
	if !s.d.cluster.spawn(func() {
		ctx, cancel := context.WithTimeout(s.d.cluster.ctx, time.Duration(l.ttl)*time.Second/3)
		defer cancel()
		b := s.d.cluster.beat(ctx, l.id)
		<-b.done
		switch {
		case b.err == nil && b.ttl > 0:
			s.d.beganAt(l, b.began)
		case b.err == nil:
			s.q.lose(s.w, name)
		}
		s.beating.Store(false)
	}) {
		s.beating.Store(false)
	}
}

// grant returns the hold of an entry at the front of the queue. A hold that is not renewed
// gets the whole TTL. A hold that is renewed starts with the rest of its place's lease, at
// least two thirds of that term, and its first renewal moves it to a lease of the whole TTL.
func (s *wait) grant(ctx context.Context) (g backend.Grant, over bool, err error) {
	within, cancel := s.bounded(ctx)
	defer cancel()
	l := s.lease
	term := min(s.c.TTL, time.Duration(l.ttl)*time.Second)
	if term < s.c.TTL && !s.c.Renewed {
		return s.lengthen(within)
	}

	enough := term - backend.Drift(term)/2
	if s.c.Renewed {
		enough = term * 2 / 3
	}
	h := s.d.newHold(s.c, s.entry, l)
	if s.d.age(l) > term-enough || l.doubtful.Load() {
		s.d.prove(within, []*renewal{{h: h}}, func(_ *renewal, e error) { err = e })
		if err != nil {
			return g, false, s.failed(ctx, err)
		}
	}

	// The entry may have been removed meanwhile, by a Break, whose event has come.
	if s.q.where(s.w) != front {
		return g, false, nil
	}
	if s.late || s.beating.Load() {
		// What arrives after the release would concern another hold, if the lease lived on.
		l.doubtful.Store(true)
	}
	return h.grant(s.c, term), true, nil
}

// lengthen moves the entry from the lease of a place to one with the whole term.
func (s *wait) lengthen(ctx context.Context) (g backend.Grant, over bool, err error) {
	l, err := s.d.pool.grant(ctx, seconds(s.c.TTL))
	if err != nil {
		return g, false, err
	}
	h, err := s.d.move(ctx, s.c, s.entry, l)
	switch {
	case err == nil:
		return h.grant(s.c, s.c.TTL), true, nil
	case !unchanged(err):
		// The entry may be under either lease. The hold was not granted, so both end.
		s.sure = false
		s.d.bury(l, "")
		return g, true, err
	}
	return g, false, err // if it was removed, the event may not have come yet
}
