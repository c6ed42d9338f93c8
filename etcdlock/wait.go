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

	// The newest entry that was created before this one and excludes it. It is nil if there is
	// none, or if that is not known. New entries join the queue behind this one, so it suffices to
	// watch the entry ahead.
	ahead  *mvccpb.KeyValue
	isNext bool   // the entry ahead is the only one that excludes this one
	read   int64  // the revision of the last read of the queue
	watch  *watch // the watch for the deletion of the entry ahead; nil while there is none

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
	defer context.AfterFunc(d.open, cancel)() // Close ends ctx

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

// wakeOne makes one waiter that has not read its queue lately read it again. The order of a map
// picks the waiter at random. The read has two uses. The waiter notices a deletion whose event was
// lost. And if the member in use hangs, so that it reports no events, the read begins a search.
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
		g, over, err := w.step(ctx) // gives the turn back
		if over || backend.Definite(err) {
			return g, err
		}

		switch {
		case err == nil: // an entry ahead excludes this one
			w.since = time.Time{}
			w.err = nil
			if w.watch != nil && w.watch.over.Load() {
				// etcd refuses watches, or the member was given up. Without a watch, isBehind lets
				// the waiter read again, so do not read too often.
				pause(ctx, minRest)
			}
		case errors.Is(err, errGone):
			w.abandon() // the next step queues anew
		case ctx.Err() == nil: // an outage has begun or goes on
			// A deadline does not replace an earlier error, which says more: the deadline may be
			// the one of ctx, which was about to end.
			if w.err == nil || !errors.Is(err, os.ErrDeadlineExceeded) {
				w.err = err
			}
			if w.since.IsZero() {
				w.since = began
			}
			w.keepAlive()
			pause(ctx, 20*time.Millisecond+rand.N(80*time.Millisecond))
		}
		// If ctx has ended, w.ended returns the error of the Wait.
	}
}

// step makes the next call of the Wait, for which the caller has taken a turn. It puts the entry,
// or reads the queue if the entry is there, and gives the turn back. If no entry ahead excludes
// this one, step calls grant. The result over is true if the Wait ends with g and err.
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

// The method ended returns the error that ends the Wait, or nil if the Wait goes on.
func (w *waiter) ended(ctx context.Context) error {
	if w.d.isClosed() {
		return errClosed
	}

	// An outage is under way if this Wait's calls fail, or else if the driver's calls have no
	// answer.
	since, err := w.since, w.err
	if since.IsZero() {
		since, err = w.d.cluster.silence()
	}
	silent := time.Duration(0) // how long this Wait has been in the outage; 0 if there is none
	if !since.IsZero() {
		if since.Before(w.began) {
			since = w.began
		}
		silent = time.Since(since)
	}

	outage := &backend.UnavailableError{Since: since, Err: cmp.Or(err, errNoAnswer)}

	if ctx.Err() == nil {
		if silent >= w.c.Timeout {
			return outage
		}
		return nil
	}

	// ctx has ended. Report an outage even if it is shorter than the Timeout: after failed calls,
	// or a third of the Timeout without an answer, the last answer is too old to say whether the
	// key is held (see backend.Waiter).
	switch {
	case silent >= w.c.Timeout/3 || w.err != nil:
		return errors.Join(outage, ctx.Err())
	case w.ahead == nil: // no read has shown that the key is held
		return ctx.Err()
	}

	// If the entry ahead is the only one before this one, it is the holder. But before a shared
	// claim there may be shared holds, which the last read has left out.
	var holder []*mvccpb.KeyValue // empty if the holder is not known
	if w.isNext && !w.c.Shared {
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
	isDue := w.due.Swap(false) // if it is due, the caller reads the queue next
	if w.ahead == nil || isDue || w.lease.isRefused() {
		return false
	}
	if w.watch.gone.Load() > w.read || w.watch.over.Load() {
		return false // the entry ahead was deleted after the read, or the watch reports nothing
	}

	// The entry ahead may be deleted before etcd confirms the watch, and etcd reports such a
	// deletion up to 100 ms late. If that deletion would free the key, that is too late. So read
	// once more after etcd has confirmed the watch.
	mustReadAgain := w.isNext && w.watch.at.Load() > w.read
	return !mustReadAgain
}

// sleep waits for a signal, or until it is time to check whether the lease needs a keep-alive, or
// the Wait must end. An eighth is short enough: a keep-alive is sent after a third of the lease's
// term, and an outage ends the Wait after the Timeout. The limits of 10 ms and 1 s are for a very
// short or long Timeout.
func (w *waiter) sleep(ctx context.Context) {
	timer := time.NewTimer(min(w.lease.term()/8, max(w.c.Timeout/8, 10*time.Millisecond), time.Second))
	defer timer.Stop()
	select {
	case <-w.wake:
	case <-timer.C:
	case <-ctx.Done():
	}
}

// bounded returns a context for one call, which lasts for the claim's Timeout divided by divisor.
// In an outage, it ends when the Timeout has passed since the outage began. The divisor is 3 for a
// call that will be repeated, because etcd may drop a call at a change of the leader.
func (w *waiter) bounded(ctx context.Context, divisor int) (context.Context, context.CancelFunc) {
	left := w.c.Timeout
	if !w.since.IsZero() {
		left -= time.Since(w.since)
	}
	return context.WithTimeout(ctx, min(left, w.c.Timeout/time.Duration(divisor)))
}

// enter puts the waiter's entry into the queue, and reads the entries ahead. If it must take a
// lease first, it does. isFirst is true if no entry ahead excludes the waiter's. enter returns
// errGone if the lease has ended, or the entry was removed.
func (w *waiter) enter(ctx context.Context) (isFirst bool, err error) {
	within, cancel := w.bounded(ctx, 3)
	defer cancel()
	if w.lease == nil {
		secs := min(seconds(w.c.TTL), w.d.window)
		l, err := w.d.pool.take(within, secs, w.d.clock.now())
		if err != nil {
			return false, err
		}
		w.lease = l
		w.entry = newEntry(w.c, l, time.Time{})
	}

	// Put the entry only once under a lease. If the outcome was unknown, the lease is doubtful:
	// then only look for the entry. If the entry is not there, another driver may have removed it.
	// That driver revokes the lease next (see evict), which would end a second entry as well.
	name := string(w.entry.Key)
	then := []clientv3.Op{clientv3.OpGet(name)}
	if !w.lease.doubtful.Load() {
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

	wasPut := len(r.Responses) == 3 // the answers to the put and the two reads
	if wasPut {
		kvs := r.Responses[2].GetResponseRange().Kvs
		w.entry = r.Responses[1].GetResponseRange().Kvs[0]
		isOwn := func(kv *mvccpb.KeyValue) bool { return string(kv.Key) == name }
		return w.see(r, slices.DeleteFunc(kvs, isOwn)), nil
	}

	// An earlier put had an unknown outcome, and the only answer is that to the read of the entry.
	kvs := r.Responses[0].GetResponseRange().Kvs
	if len(kvs) == 0 {
		return false, errGone
	}
	w.entry = kvs[0]
	return w.look(ctx)
}

// rivals returns the operation that reads the newest entries that exclude a claim like this one. It
// reads three, because the method see needs up to two, and one may be the waiter's own.
func (w *waiter) rivals(opts ...clientv3.OpOption) clientv3.Op {
	newestFirst := clientv3.WithSort(clientv3.SortByCreateRevision, clientv3.SortDescend)
	opts = append(opts, clientv3.WithPrefix(), newestFirst, clientv3.WithLimit(3))
	return clientv3.OpGet(rivalsOf(w.c), opts...)
}

// look reads the waiter's entry and the entries ahead. isFirst is true if no entry ahead excludes
// the waiter's. look returns errGone if the entry is gone, or the lease has ended.
//
// If isFirst is true, the waiter holds the key, because later entries join the queue behind its
// own. So this read is the last one before the grant. It also proves the last keep-alive before it.
func (w *waiter) look(ctx context.Context) (isFirst bool, err error) {
	within, cancel := w.bounded(ctx, 3)
	defer cancel()
	b := w.lease.beat.Load() // before the read, because only a later read proves a keep-alive
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
		_ = b.outcome(w.lease, r) // after an error, the lease just counts as older
	}
	w.entry = own[0]
	return w.see(r, r.Responses[1].GetResponseRange().Kvs), nil
}

// see records what the read r has shown. The argument rivals has the entries ahead that exclude the
// waiter's, from the newest to the oldest. If there are any, see watches the newest one. It reports
// whether there are none.
func (w *waiter) see(r txnAnswer, rivals []*mvccpb.KeyValue) (isFirst bool) {
	w.seen.Store(int64(w.d.clock.now()))
	if len(rivals) == 0 {
		w.ahead = nil
		return true
	}
	w.ahead = rivals[0]
	w.isNext = len(rivals) == 1
	w.read = r.Header.Revision

	// Keep a watch that still reports deletions of this entry. Its member must have sent this
	// answer, because another member's revisions may not be comparable.
	name := string(w.ahead.Key)
	if w.watch == nil || w.watch.m != r.m || w.watch.name != name || w.watch.over.Load() {
		w.watch.stop()
		w.watch = r.m.watcher.watch(name, w.read+1, w.wake)
	}
	return false
}

// keepAlive sends a keep-alive on a goroutine, if a third of the lease's term has passed since the
// last one. Before a grant counts on the keep-alive, a read proves it: see look.
func (w *waiter) keepAlive() {
	l := w.lease
	if l == nil || w.entry.CreateRevision == 0 || w.beating.Load() {
		return // the entry is not there yet, or a keep-alive is under way
	}
	age := w.d.age(l) // does not know keep-alives that no read has proven
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
// true, the Wait ends with g and err. Otherwise the Wait goes on, and err says why: the entry was
// removed meanwhile, or a call has failed.
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
		// If the outcome of the move is unknown, the Wait fails, and both leases must end. Wait
		// ends the lease l. Because h.ended is set, doubt ends the new lease.
		h.ended = true
		g, err = w.d.move(within, w.c, h, w.entry)
		return g, err == nil || !unchanged(err), err
	}

	// If too much of the term may have passed, begin it anew. Of the whole term, half of the drift
	// may be missing.
	allowed := backend.Drift(term) / 2
	if w.c.Renewed {
		allowed = term / 3
	}
	if w.d.age(l) > allowed {
		w.d.prove(within, []*renewal{{h: h}}, func(_ *renewal, e error) { err = e })
		if err != nil {
			return g, false, err
		}
	}

	return h.grant(w.c, term), true, nil
}
