package etcdlock

import (
	"cmp"
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"slices"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/hasplock/hasp/backend"
)

// waiter is the state of one Wait. Only the goroutine of that Wait uses it, except for the fields
// seen, beating, due and wake.
type waiter struct {
	d *driver
	c backend.Claim

	began time.Time
	lease *lease
	entry *mvccpb.KeyValue // the entry of the lease; its revisions are 0 before etcd has confirmed it
	since time.Time        // when calls began to fail; zero after a success
	err   error            // the error of these calls

	// The newest entry that was created before this one and excludes it. It is nil if there is none, or
	// if that is not known. A later entry never comes before this one, so it suffices to watch this.
	ahead *mvccpb.KeyValue
	next  bool   // the entry ahead is the only one that excludes this one
	read  int64  // the revision of the read
	watch *watch // the watch for the deletion of the entry ahead; nil while there is none

	seen    atomic.Int64 // when the queue was last read, by the driver's clock
	beating atomic.Bool  // a keep-alive is under way
	due     atomic.Bool  // the waiter must read the queue again

	// Signals a change of the watch, of the lease, or of the field due. It has room for one signal.
	wake chan struct{}
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
	d.join(w)
	g, err := w.run(ctx)
	d.leave(w)
	w.watch.stop()
	if err != nil && w.lease != nil {
		d.bury(w.lease) // ends the entry as well
	}
	return g, err
}

func (d *driver) join(w *waiter) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.waiters[w] = true
}

func (d *driver) leave(w *waiter) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.waiters, w)
}

// wakeOne makes a waiter that has not read its queue lately, chosen at random, read it again. The
// waiter notices a deletion whose event was lost. If there is no answer, the read begins a search,
// because a member that hangs reports no events.
func (d *driver) wakeOne() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for w := range d.waiters {
		if d.clock.now()-time.Duration(w.seen.Load()) >= liveness/2 {
			w.due.Store(true)
			signal(w.wake)
			return
		}
	}
}

// run returns the grant, or the error that ends the Wait.
func (w *waiter) run(ctx context.Context) (backend.Grant, error) {
	for {
		if err := w.ended(ctx); err != nil {
			return backend.Grant{}, err
		}
		if w.isBehind() {
			w.keepAlive()
			w.sleep(ctx)
			continue
		}

		if !w.turn(ctx) {
			w.keepAlive()
			continue
		}
		began := time.Now()
		g, over, err := w.step(ctx)
		if over || backend.Definite(err) {
			return g, err
		}
		switch {
		case err == nil:
			w.since, w.err = time.Time{}, nil
			if w.watch != nil && w.watch.over.Load() {
				pause(ctx, minRest) // etcd refuses watches, or the member was given up
			}
		case errors.Is(err, errGone):
			w.abandon()
		case ctx.Err() == nil:
			// After the end of ctx, w.ended returns the error. A deadline does not replace an earlier
			// error, because it may only be ctx that was about to end.
			if w.err == nil || !errors.Is(err, os.ErrDeadlineExceeded) {
				w.err = err
			}
			if w.since.IsZero() {
				w.since = began
			}
			w.keepAlive()
			pause(ctx, 20*time.Millisecond+rand.N(80*time.Millisecond))
		}
	}
}

// step makes the next call of the Wait: it puts the entry or reads the queue. If no entry ahead
// excludes this one, step grants the hold, and over is true if that ends the Wait.
func (w *waiter) step(ctx context.Context) (g backend.Grant, over bool, err error) {
	ask := w.look
	if w.lease == nil || w.entry.CreateRevision == 0 {
		ask = w.enter
	}
	isFirst, err := ask(ctx)
	w.d.turns.give()
	if err != nil || !isFirst {
		return g, false, err
	}
	return w.grant(ctx)
}

// The method ended returns the error that ends the Wait, or nil.
func (w *waiter) ended(ctx context.Context) error {
	if w.d.isClosed() {
		return errClosed
	}

	// Look for an outage of this Wait's calls, or else of the driver's calls.
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

	// While ctx lasts, an outage ends the Wait after the Timeout. After the end of ctx, an outage is
	// reported if there has been no answer for a third of the Timeout, because then it is not known
	// whether the key is held: see backend.Waiter.
	switch {
	case ctx.Err() == nil && silent >= w.c.Timeout:
		return outage
	case ctx.Err() == nil:
		return nil
	case silent >= w.c.Timeout/3 || w.err != nil:
		return errors.Join(outage, ctx.Err())
	case w.ahead == nil:
		return ctx.Err()
	}

	var holder []*mvccpb.KeyValue // unknown
	// Before a shared claim there may be shared holds, which the last read has left out.
	if w.next && !w.c.Shared {
		holder = append(holder, w.ahead)
	}
	return errors.Join(refusal(holder), ctx.Err())
}

// The method abandon gives up an entry that is gone, so that the next attempt takes another lease.
func (w *waiter) abandon() {
	if w.lease != nil {
		w.d.bury(w.lease)
	}
	w.watch.stop()
	w.lease, w.ahead, w.watch = nil, nil, nil
}

func pause(ctx context.Context, d time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	<-ctx.Done()
}

// turn waits for this waiter's turn to make a call. After 100 ms, turn returns false, so that the
// caller can check whether the Wait must end.
func (w *waiter) turn(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
	defer cancel()
	return w.d.turns.take(ctx) == nil
}

// isBehind reports whether the waiter may sleep, because an entry ahead excludes its own, and a
// watch will report the deletion.
func (w *waiter) isBehind() bool {
	isDue := w.due.Swap(false)
	if w.ahead == nil || isDue || w.lease.isRefused() {
		return false
	}
	if w.watch.gone.Load() > w.read || w.watch.over.Load() {
		return false
	}

	// The holder may release the key before etcd confirms the watch, and etcd reports such a deletion
	// up to 100 ms late. So read once more after the confirmation.
	return !w.next || w.watch.at.Load() <= w.read
}

// sleep waits for a signal, or until it is time to check whether the Wait must end.
func (w *waiter) sleep(ctx context.Context) {
	timer := time.NewTimer(min(w.lease.term()/8, max(w.c.Timeout/8, 10*time.Millisecond), time.Second))
	defer timer.Stop()
	select {
	case <-w.wake:
	case <-timer.C:
	case <-ctx.Done():
	}
}

// bounded returns a context for one call, with a part of the claim's Timeout. The Timeout counts from
// the beginning of the outage, if there is one. A call that will be repeated has a third, because
// etcd may drop a call at a change of the leader.
func (w *waiter) bounded(ctx context.Context, part int) (context.Context, context.CancelFunc) {
	left := w.c.Timeout
	if !w.since.IsZero() {
		left -= time.Since(w.since)
	}
	return context.WithTimeout(ctx, min(left, w.c.Timeout/time.Duration(part)))
}

// enter puts the waiter's entry into the queue, and reads the entries ahead. It returns errGone if the
// lease has ended, or the entry was removed.
func (w *waiter) enter(ctx context.Context) (isFirst bool, err error) {
	within, cancel := w.bounded(ctx, 3)
	defer cancel()
	if w.lease == nil {
		secs := min(seconds(w.c.TTL), w.d.window)
		l, err := w.d.pool.take(within, secs, w.d.clock.now())
		if err != nil {
			return false, err
		}
		w.lease, w.entry = l, newEntry(w.c, l, time.Time{})
	}

	name := string(w.entry.Key)
	then := []clientv3.Op{clientv3.OpGet(name)}
	if !w.lease.doubtful.Load() {
		// Put the entry only once under a lease. If another driver has removed the entry, that driver
		// revokes the lease next (see evict), and would end a new entry as well.
		then = []clientv3.Op{put(name, w.entry.Value, w.lease.id), clientv3.OpGet(name), w.rivals()}
	}

	isNew := clientv3.Compare(clientv3.CreateRevision(name), "=", 0)
	r, err := w.d.txn(within, []clientv3.Cmp{isNew}, then, clientv3.OpGet(name))
	if err != nil {
		if !unchanged(err) {
			w.lease.doubtful.Store(true)
		}
		return false, err
	}

	if len(r.Responses) == 3 {
		kvs := r.Responses[2].GetResponseRange().Kvs
		w.entry = r.Responses[1].GetResponseRange().Kvs[0]
		isOwn := func(kv *mvccpb.KeyValue) bool { return string(kv.Key) == name }
		return w.see(r, slices.DeleteFunc(kvs, isOwn)), nil
	}

	// An earlier put had an unknown outcome.
	kvs := r.Responses[0].GetResponseRange().Kvs
	if len(kvs) == 0 {
		return false, errGone
	}
	w.entry = kvs[0]
	return w.look(ctx)
}

// rivals returns the operation that reads the newest entries that exclude a claim like this one. It
// reads three, of which one may be the waiter's own.
func (w *waiter) rivals(opts ...clientv3.OpOption) clientv3.Op {
	prefix := queueOf(w.c.Key)
	if w.c.Shared {
		prefix += "x"
	}
	newestFirst := clientv3.WithSort(clientv3.SortByCreateRevision, clientv3.SortDescend)
	opts = append(opts, clientv3.WithPrefix(), newestFirst, clientv3.WithLimit(3))
	return clientv3.OpGet(prefix, opts...)
}

// look reads the waiter's entry and the entries ahead. It returns errGone if the entry is gone.
//
// If no entry ahead excludes the waiter's, and the waiter's entry is there, the key is the
// waiter's, because entries are created in the order of their revisions. So this read is the last
// one before the grant. It also proves the last keep-alive before it.
func (w *waiter) look(ctx context.Context) (isFirst bool, err error) {
	within, cancel := w.bounded(ctx, 3)
	defer cancel()
	b := w.lease.beat.Load()
	ahead := w.rivals(clientv3.WithMaxCreateRev(w.entry.CreateRevision - 1))
	r, err := w.d.txn(within, nil, []clientv3.Op{clientv3.OpGet(string(w.entry.Key)), ahead})
	if err != nil {
		return false, err
	}
	own := r.Responses[0].GetResponseRange().Kvs
	if !isUnder(own, w.entry, w.lease) || w.lease.isRefused() {
		return false, errGone
	}
	if b != nil {
		_ = b.outcome(w.lease, r) // an error says that the term may not have begun anew
	}
	w.entry = own[0]
	return w.see(r, r.Responses[1].GetResponseRange().Kvs), nil
}

// see records the entries ahead that exclude the waiter's, from the newest to the oldest, and watches
// the newest one. It reports whether there is none.
func (w *waiter) see(r txnAnswer, rivals []*mvccpb.KeyValue) (isFirst bool) {
	w.seen.Store(int64(w.d.clock.now()))
	if len(rivals) == 0 {
		w.ahead = nil
		return true
	}
	w.ahead, w.next, w.read = rivals[0], len(rivals) == 1, r.Header.Revision
	name := string(w.ahead.Key)
	if w.watch == nil || w.watch.m != r.m || w.watch.name != name || w.watch.over.Load() {
		w.watch.stop()
		w.watch = r.m.watcher.watch(name, w.read+1, w.wake)
	}
	return false
}

// keepAlive begins the lease's term anew, on a goroutine, if a third of the term has passed. Only a
// proven keep-alive counts: see look.
func (w *waiter) keepAlive() {
	l := w.lease
	if l == nil || w.entry.CreateRevision == 0 || w.beating.Load() {
		return
	}
	age := w.d.age(l)
	if b := l.beat.Load(); b != nil {
		age = min(age, w.d.clock.now()-b.began)
	}
	if age < l.term()/3 {
		return
	}
	w.beating.Store(true)
	w.d.cluster.spawn(func() {
		defer w.beating.Store(false)
		ctx, cancel := context.WithTimeout(w.d.cluster.ctx, l.term()/3)
		defer cancel()
		if b := w.d.cluster.beat(ctx, l.id); b.err == nil {
			l.beat.Store(&b)
			signal(w.wake)
		}
	})
}

// grant returns the hold of an entry that the last call has found first in the queue. If over is
// false, the entry was removed meanwhile, or a call has failed, and the Wait goes on.
//
// A hold that is not renewed starts with the whole TTL. A hold that is renewed keeps the lease of
// its place, with at least two thirds of its term left. If that lease is too short, the first
// renewal moves the hold to another lease.
func (w *waiter) grant(ctx context.Context) (g backend.Grant, over bool, err error) {
	within, cancel := w.bounded(ctx, 1)
	defer cancel()
	l := w.lease
	h := w.d.newHold(w.c, w.entry, l)
	term := min(w.c.TTL, l.term())
	if term < w.c.TTL && !w.c.Renewed {
		// Set h.ended, so that both leases end if the outcome is unknown. Then the Wait fails.
		h.ended = true
		g, err = w.d.move(within, w.c, h, w.entry)
		return g, err == nil || !unchanged(err), err
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

	return h.grant(w.c, term), true, nil
}
