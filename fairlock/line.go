package fairlock

import (
	"context"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/hasplock/hasp/internal/redisstore"
)

// Bounds of looking.
const (
	strangerEvery = time.Second            // how often to look at a hold whose release tells nobody
	silentEvery   = 250 * time.Millisecond // and how often without a channel
	lookSize      = 500                    // tokens in one look
	lookBatch     = 256                    // looks that travel together
	gathering     = time.Millisecond       // how long a look that is due waits for other looks
)

// line is the waiters of this client for one key. It exists while there are
// any, and says for all of them that they are alive.
type line struct {
	d   *Driver
	key string
	ear *ear

	// Driver.mu guards these.
	waiters map[string]*waiter // by token
	timer   *time.Timer        // of the next look
	due     time.Time          // when that is; zero if none is to come
	asked   int                // looks that are due or under way; above one only if there are many tokens
	sent    time.Time          // when the looks under way were sent; zero if none is
	again   bool               // another look became due meanwhile
	err     error              // error of one of several looks
	since   time.Time          // when looks ceased to be answered; zero if they are
	outage  error              // of the last look, if since is set
	tries   int
}

// join puts w into the line of its key, with a channel that is listened to.
func (d *Driver) join(ctx context.Context, w *waiter) {
	e := d.listen(ctx, w.c)
	d.mu.Lock()
	defer d.mu.Unlock()
	l := d.lines[w.c.Key]
	if l == nil {
		l = &line{d: d, key: w.c.Key, ear: e, waiters: map[string]*waiter{}}
		d.lines[l.key] = l
	}
	w.line = l
	l.waiters[w.c.Token] = w
	d.waiters[w.c.Token] = w
}

// part takes w out of its line, which ends with the last one.
func (d *Driver) part(w *waiter) {
	l := w.line
	if l == nil {
		return
	}
	d.mu.Lock()
	delete(d.waiters, w.c.Token)
	delete(l.waiters, w.c.Token)
	if len(l.waiters) == 0 {
		delete(d.lines, l.key)
		l.stop()
	}
	d.mu.Unlock()
	d.unlisten(l.ear)
}

// stop ends the timer. The caller holds mu.
func (l *line) stop() {
	if l.timer != nil {
		l.timer.Stop()
	}
	l.due = time.Time{}
}

// lookBy has the next look come at that time at the latest. The caller holds
// mu.
func (l *line) lookBy(at time.Time) {
	switch {
	case len(l.waiters) == 0 || l.d.closed:
	case l.timer == nil:
		l.due = at
		l.timer = time.AfterFunc(time.Until(at), l.look)
	case l.due.IsZero() || at.Before(l.due):
		l.due = at
		l.timer.Reset(time.Until(at))
	}
}

// next is when to look again after a call sent then, which has said s: for the
// refresh, when the holder's term ends, and at a hold that will be released
// without a word.
func (l *line) next(s state, sent time.Time) time.Time {
	after := l.d.window / 3
	if l.ear.how() == silent {
		after = min(after, silentEvery)
	}
	if s.stranger || s.pttl == -2 {
		after = min(after, strangerEvery)
	}
	// Looks that are due within the same sixteenth of the interval travel together.
	at := l.d.began.Add((sent.Sub(l.d.began) + after).Truncate(after / 16))
	if s.pttl >= 0 {
		// The reply may be as old as the call.
		if end := time.Now().Add(redisstore.Term(s.pttl) + time.Millisecond); end.Before(at) {
			return end
		}
	}
	return at
}

// look is called by the timer. It queues a look at the line, to travel together
// with other looks that are due.
func (l *line) look() {
	d := l.d
	d.mu.Lock()
	defer d.mu.Unlock()
	l.due = time.Time{}
	if l.asked > 0 {
		l.again = true
		return
	}
	if len(d.ready) == 0 {
		if !d.beginLocked() {
			return
		}
		time.AfterFunc(gathering, d.lookAll)
	}
	l.asked = 1
	d.ready = append(d.ready, l)
}

// look is one call about waiters of one line.
type look struct {
	l    *line
	how  string
	qs   []question
	done bool
}

// question is a waiter in the queue, as it was when a look began.
type question struct {
	w     *waiter
	round int
}

// lookAll makes the looks at all lines that are due. They travel as renewals do:
// each server has its own pipeline, so that a server that hangs delays no look at
// another.
func (d *Driver) lookAll() {
	defer d.wg.Done()
	d.mu.Lock()
	var all []*look
	var timeout time.Duration
	for _, l := range d.ready {
		var qs []question
		for _, w := range l.waiters {
			if w.queued && w.told == nil {
				qs = append(qs, question{w, w.round})
				if timeout == 0 || w.c.Timeout < timeout {
					timeout = w.c.Timeout
				}
			}
		}
		how := l.ear.how()
		l.asked, l.again = 0, false
		for qs := range slices.Chunk(qs, lookSize) {
			l.asked++
			l.sent = time.Now()
			all = append(all, &look{l: l, how: how, qs: qs})
		}
	}
	d.ready = nil
	d.mu.Unlock()
	for batch := range slices.Chunk(all, lookBatch) {
		// A look that is lost with its connection leaves time for another one, before
		// it counts as an outage and before the place is lost.
		d.wg.Go(func() { d.ask(batch, timeout/2) })
	}
}

// ask makes some looks.
func (d *Driver) ask(looks []*look, timeout time.Duration) {
	calls := make([]redisstore.Call, len(looks))
	for i, k := range looks {
		args := []any{k.how, k.l.ear.channel, redisstore.Millis(d.window), 0, ""}
		for _, q := range k.qs {
			args = append(args, q.w.c.Token)
		}
		calls[i] = d.call(k.l.key, args...)
	}
	ctx, cancel := context.WithTimeout(d.calls, timeout)
	defer cancel()
	sent := time.Now()
	d.store.RunEach(ctx, lookScript, calls, func(i int, reply any, err error) {
		looks[i].done = true
		d.looked(looks[i], reply, err, sent)
	})
	for _, k := range looks {
		if !k.done {
			d.looked(k, nil, fmt.Errorf("%s: %w", d.store.Name(), ctx.Err()), sent)
		}
	}
}

// looked processes the reply to a look that was sent at the given time.
func (d *Driver) looked(k *look, reply any, err error, sent time.Time) {
	l := k.l
	s, ok := decode(reply)
	switch {
	case err != nil:
	case !ok || len(s.found) != len(k.qs):
		err = d.store.Unexpected(reply)
	default:
		d.tell(l.key, s.told, sent)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if err != nil {
		l.err = err
	} else {
		if s.deaf {
			l.ear.listener.Relisten()
		}
		how := l.ear.how()
		for i, q := range k.qs {
			l.answer(q, s, s.found[i] == '1', how, sent)
		}
	}
	if l.asked--; l.asked > 0 {
		return
	}

	// All looks at the line have been answered or have failed.
	l.sent = time.Time{}
	next := time.Now()
	switch {
	case l.err != nil:
		l.ail(l.err, sent)
		next = next.Add(pause(l.tries))
		l.tries++
	default:
		l.since, l.outage, l.tries = time.Time{}, nil, 0
		if !l.again {
			next = l.next(s, sent)
		}
	}
	l.again, l.err = false, nil
	l.lookBy(next)
}

// answer tells a waiter what a look that was sent then has found of it. The
// caller holds mu.
func (l *line) answer(q question, s state, found bool, how string, sent time.Time) {
	w := q.w
	switch {
	case w.round != q.round || !w.queued || w.told != nil || l.waiters[w.c.Token] != w:
		return // it knows better by now
	case s.token == w.c.Token && (s.fence > 0 || !w.c.Fenced):
		w.told = &told{fence: s.fence}
	case !found:
		w.again()
	case w.how != how:
		// Since the entry was written, the client has got or lost its subscription.
		// The waiter keeps its place, and its entry is rewritten.
		w.queued = false
	default:
		w.stand(s, sent)
		return
	}
	w.poke()
}

// ail notes that a look that was sent then was not answered, and ends the
// waits that have ridden that out as long as they may. The caller holds mu.
func (l *line) ail(err error, sent time.Time) {
	if l.since.IsZero() {
		l.since = sent
	}
	l.outage = err
	for _, w := range l.waiters {
		if w.queued && time.Since(l.since) >= w.c.Timeout {
			w.gone = redisstore.Outage(err, l.since)
			w.poke()
		}
	}
}

// silence returns the outage that began after the given answer, if a look has
// failed or has not been answered for a third of timeout, and otherwise nil. The
// caller holds mu.
func (l *line) silence(answered time.Time, timeout time.Duration) error {
	switch {
	case l.since.After(answered):
		return redisstore.Outage(l.outage, l.since)
	case l.sent.After(answered) && time.Since(l.sent) >= timeout/3:
		took := time.Since(l.sent).Round(time.Millisecond)
		return redisstore.Outage(fmt.Errorf("%s: no answer for %v: %w", l.d.store.Name(), took, os.ErrDeadlineExceeded), l.sent)
	}
	return nil
}

// tell tells the waiter concerned what pass has said, in the reply to a call
// that was sent then, and goes on where that has stopped.
func (d *Driver) tell(key string, r parts, sent time.Time) {
	if len(r) == 0 {
		return
	}
	d.goOn(key, r)
	round := r.text(2)
	d.mu.Lock()
	defer d.mu.Unlock()
	w := d.concerned(r.text(1), round)
	if w == nil || r.int(0) == 2 {
		return
	}
	t := w.toldOf(r.text(3))
	switch {
	case r.int(0) == -1:
		w.gone = noFence(key)
	case r.int(0) != 1 || t == nil:
		w.gone = d.store.Unexpected(r)
	default:
		if sent.After(w.asked) {
			w.asked = sent
		}
		w.told = t
	}
	w.poke()
}

// goOn has the rest of a queue looked at, which was too long for one script.
func (d *Driver) goOn(key string, r parts) {
	if r.int(0) != 2 || !d.begin() {
		return
	}
	go func() {
		defer d.wg.Done()
		for r.int(0) == 2 && d.open.Err() == nil {
			ctx, cancel := context.WithTimeout(d.calls, onTimeout)
			sent := time.Now()
			reply, err := d.store.Run(ctx, lookScript, d.call(key, silent, d.listensFor(key), redisstore.Millis(d.window), r.int(1), r.text(2)))
			cancel()
			s, ok := decode(reply)
			if err != nil || !ok {
				return // whoever waits looks, too
			}
			if r = s.told; r.int(0) != 2 {
				d.tell(key, r, sent)
			}
		}
	}()
}

// onTimeout bounds a call that nobody waits for.
const onTimeout = 3 * time.Second

// listensFor is the channel of this client's waiters for key, if there are any.
func (d *Driver) listensFor(key string) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	if l := d.lines[key]; l != nil {
		return l.ear.channel
	}
	return ""
}
