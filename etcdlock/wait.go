package etcdlock

import (
	"cmp"
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/hasplock/hasp/backend"
)

// waiter is the state of one Wait.
type waiter struct {
	d *driver
	c backend.Claim
	q *queue

	began   time.Time
	lease   *lease
	entry   *mvccpb.KeyValue // the entry of the lease
	beating atomic.Bool      // a keep-alive is under way
	since   time.Time        // when calls began to fail, or the watch was lost; zero after a success
	err     error            // the error of these calls

	place entryState    // guarded by the driver's mu
	wake  chan struct{} // signals a change of the field place; has room for one signal
}

// Wait puts an entry into the queue of the key, and returns when the entries ahead that exclude
// this entry are gone.
func (d *driver) Wait(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	if err := d.check(ctx, c); err != nil {
		return backend.Grant{}, err
	}
	d.active.Add(1)
	defer d.active.Add(-1)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(d.open, cancel)()

	w := &waiter{d: d, c: c, began: time.Now(), wake: make(chan struct{}, 1)}
	w.q = d.join(w)
	g, err := w.run(ctx)
	w.q.leave(w)
	if err != nil && w.lease != nil {
		d.bury(w.lease) // ends the entry as well
	}
	return g, err
}

// run returns the grant, or the error that ends the Wait.
func (w *waiter) run(ctx context.Context) (g backend.Grant, err error) {
	for {
		if err := w.ended(ctx); err != nil {
			return g, err
		}
		began, over := time.Now(), false
		switch w.q.where(w) {
		case front:
			g, over, err = w.grant(ctx)
		case behind:
			w.keepAlive()
			w.sleep(ctx, min(w.lease.term()/8, max(w.c.Timeout/8, 10*time.Millisecond), time.Second), w.wake, nil)
			continue
		case lost:
			w.abandon()
			fallthrough
		case unsure:
			if watched, ready := w.ready(ctx); !ready {
				if !watched && w.since.IsZero() {
					w.since = began // a missing watch is an outage as well
				}
				continue
			}
			began = time.Now()
			err = w.enter(ctx)
			<-w.d.turns
		}
		if over || backend.Definite(err) {
			return g, err
		}

		switch {
		case err == nil:
			w.since, w.err = time.Time{}, nil
		case errors.Is(err, errGone):
			w.abandon()
		case ctx.Err() == nil: // if ctx has ended, w.ended returns the error, and an earlier failure still counts
			// If err is a deadline, keep an earlier error, because ctx may have been about to end.
			if w.err == nil || !errors.Is(err, os.ErrDeadlineExceeded) {
				w.err = err
			}
			if w.since.IsZero() {
				w.since = began
			}
			pause(ctx, 20*time.Millisecond+rand.N(80*time.Millisecond))
		}
	}
}

// The method ended returns the error that ends the Wait, or nil.
func (w *waiter) ended(ctx context.Context) error {
	if w.d.isClosed() {
		return errClosed
	}

	// Look for an outage of this Wait's calls and watch, or else of the driver's calls.
	since, err := w.since, w.err
	if since.IsZero() {
		since, err = w.d.cluster.silence()
	}
	silent := time.Duration(0)
	if !since.IsZero() {
		if since.Before(w.began) {
			since = w.began
		}
		silent = time.Since(since)
	}
	outage := &backend.UnavailableError{Since: since, Err: cmp.Or(err, errNoAnswer)}

	switch {
	case ctx.Err() == nil && silent >= w.c.Timeout:
		return outage
	case ctx.Err() == nil:
		return nil
	case silent >= w.c.Timeout/3 || w.err != nil:
		return errors.Join(outage, ctx.Err())
	}
	if held := w.q.held(w); held != nil {
		return errors.Join(held, ctx.Err())
	}
	return ctx.Err()
}

// The method abandon gives up an entry that is gone, so that the next attempt takes another lease.
func (w *waiter) abandon() {
	if w.lease != nil {
		w.d.bury(w.lease)
		w.q.deleted(string(w.entry.Key), ended)
	}
	w.lease = nil
}

func pause(ctx context.Context, d time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	<-ctx.Done()
}

// sleep waits for a signal, for a slot in the channel turns, or until the duration d has passed. It
// reports whether it has taken a slot.
func (w *waiter) sleep(ctx context.Context, d time.Duration, signal <-chan struct{}, turns chan<- struct{}) bool {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	select {
	case turns <- struct{}{}:
		return true
	case <-signal:
	case <-ctx.Done():
	}
	return false
}

// bounded returns a context for one call. The context lasts for the claim's Timeout, which counts
// from the beginning of the outage, if there is one.
func (w *waiter) bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	left := w.c.Timeout
	if !w.since.IsZero() {
		left -= time.Since(w.since)
	}
	return context.WithTimeout(ctx, left)
}

// ready waits for a watch, and then for this waiter's turn to enter the queue. The watch comes
// first, so that it reports every deletion after the put of the entry. After 100 ms, ready returns
// even without the watch or the turn, so that the caller can check whether the Wait must end.
func (w *waiter) ready(ctx context.Context) (watched, ready bool) {
	w.keepAlive()
	w.d.mu.Lock()
	turns, changed := w.d.turns, w.q.changed
	if watched = w.q.view != nil; !watched {
		turns = nil
	}
	w.d.mu.Unlock()
	return watched, w.sleep(ctx, 100*time.Millisecond, changed, turns)
}

// enter puts the waiter's entry into the queue, if it is not there yet, and then reads the queue. It
// returns errGone if the lease has ended, or the entry was removed.
func (w *waiter) enter(ctx context.Context) error {
	within, cancel := w.bounded(ctx)
	defer cancel()
	if w.lease == nil {
		l, err := w.d.pool.take(within, min(seconds(w.c.TTL), w.d.window))
		if err != nil {
			return err
		}
		w.lease, w.entry = l, newEntry(w.c, l, time.Time{})
	}

	name := string(w.entry.Key)
	known, ok := w.q.begin(w, name)
	if !ok {
		return nil // the watch has just ended
	}
	reads := []clientv3.Op{clientv3.OpGet(name), clientv3.OpGet(w.q.prefix, clientv3.WithPrefix(), clientv3.WithMinCreateRev(known+1))}
	then := reads
	if w.entry.CreateRevision == 0 && !w.lease.doubtful.Load() {
		// Put the entry only once under a lease. If another driver has removed the entry, that driver
		// revokes the lease next (see evict), and would end a new entry as well.
		then = append([]clientv3.Op{put(name, w.entry.Value, w.lease.id)}, reads...)
	}
	r, err := w.d.txn(within, clientv3.Compare(clientv3.CreateRevision(name), "=", 0), then, reads...)
	if err != nil {
		w.q.end(w, 0, 0, nil)
		if !unchanged(err) {
			w.lease.doubtful.Store(true)
		}
		return err
	}
	read := r.Responses[len(r.Responses)-2:]
	if len(read[0].GetResponseRange().Kvs) == 0 {
		w.q.end(w, 0, 0, nil)
		return errGone
	}
	w.entry = read[0].GetResponseRange().Kvs[0]
	w.q.end(w, w.entry.CreateRevision, r.Header.Revision, read[1].GetResponseRange().Kvs)
	return nil
}

// keepAlive begins the lease's term anew, on a goroutine, if a third of the term has passed. Only a
// proven keep-alive counts: see outcome.
func (w *waiter) keepAlive() {
	l := w.lease
	if l == nil || w.entry.CreateRevision == 0 || w.d.age(l) < l.term()/3 || w.beating.Swap(true) {
		return
	}
	r := &renewal{h: w.d.newHold(w.c, w.entry, l)}
	w.d.cluster.spawn(func() {
		defer w.beating.Store(false)
		ctx, cancel := context.WithTimeout(w.d.cluster.ctx, l.term()/3)
		defer cancel()
		if r.beat = w.d.cluster.beat(ctx, l.id); r.beat.err != nil {
			return
		}
		w.d.read(ctx, []*renewal{r})
		switch {
		case r.err == nil && r.attached:
			_ = r.beat.outcome(l, r.term) // an error says that the term may not have begun anew
		case r.err == nil:
			w.q.lose(w, string(r.h.entry.Key))
		}
	})
}

// grant returns the hold of an entry at the front of the queue. If over is false and err is nil,
// the entry was removed meanwhile, and the Wait goes on. A hold that is not renewed starts with the
// whole TTL. A hold that is renewed keeps the lease of its place, with at least two thirds of its
// term left. If that lease is too short, the first renewal moves the hold to another lease.
func (w *waiter) grant(ctx context.Context) (g backend.Grant, over bool, err error) {
	within, cancel := w.bounded(ctx)
	defer cancel()
	l, h := w.lease, w.d.newHold(w.c, w.entry, w.lease)
	term := min(w.c.TTL, l.term())
	if term < w.c.TTL && !w.c.Renewed {
		// Set h.ended, so that both leases end if the outcome is unknown. Then the Wait fails.
		h.ended = true
		g, err = w.d.move(within, w.c, h, w.entry)
		return g, err == nil || !unchanged(err), err // after errGone, the entry was removed, but its event may be late
	}

	enough := term - backend.Drift(term)/2
	if w.c.Renewed {
		enough = term * 2 / 3
	}
	if w.d.age(l) > term-enough {
		w.d.prove(within, []*renewal{{h: h}}, func(_ *renewal, e error) { err = e })
		if err != nil {
			return g, false, err
		}
	}

	// Check again, because a Break may have removed the entry meanwhile.
	if w.q.where(w) != front {
		return g, false, nil
	}
	return h.grant(w.c, term), true, nil
}
