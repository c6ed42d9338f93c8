package fairlock

import (
	"context"
	"time"

	"github.com/hasplock/hasp/internal/redisstore"
)

// Bounds of looking.
const (
	strangerEvery = time.Second            // how often to look at a hold whose release tells nobody
	silentEvery   = 250 * time.Millisecond // and how often without a channel
	lookSize      = 500                    // tokens in one look
	maxLooks      = 64                     // looks under way
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
	looking bool
	again   bool      // another look was due meanwhile
	since   time.Time // looks were not answered since
	tries   int
}

// join puts w into the line of its key, with a channel that is listened to.
func (d *Driver) join(ctx context.Context, w *waiter) error {
	e, err := d.listen(ctx, w.c.Key)
	if err != nil {
		return err
	}
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
	return nil
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
	if l.ear.how == silent {
		after = min(after, silentEvery)
	}
	if s.stranger || s.pttl == -2 {
		after = min(after, strangerEvery)
	}
	at := sent.Add(after)
	if s.pttl >= 0 {
		// The reply may be as old as the call.
		if end := time.Now().Add(redisstore.Term(s.pttl) + time.Millisecond); end.Before(at) {
			return end
		}
	}
	return at
}

// look is called by the timer. One look is under way at most.
func (l *line) look() {
	d := l.d
	d.mu.Lock()
	l.due = time.Time{}
	l.again = l.looking
	ok := !l.looking && d.beginLocked()
	l.looking = l.looking || ok
	d.mu.Unlock()
	if !ok {
		return
	}
	defer d.wg.Done()
	d.looks <- struct{}{}
	defer func() { <-d.looks }()
	for l.lookOnce() {
	}
}

// question is a waiter in the queue, as it was when a look began.
type question struct {
	w     *waiter
	round int
}

// lookOnce asks about all waiters that are in the queue, and reports whether
// it is to be called again at once.
func (l *line) lookOnce() bool {
	d := l.d
	qs, timeout := l.questions()
	var s state
	var err error
	sent := time.Now()
	for len(qs) > 0 && err == nil {
		n := min(len(qs), lookSize)
		s, err = l.ask(qs[:n], timeout)
		qs = qs[n:]
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case l.again && err == nil:
		l.again = false
		return true
	case err != nil:
		l.ail(err, sent)
		l.lookBy(time.Now().Add(pause(l.tries)))
		l.tries++
	case timeout > 0:
		l.since, l.tries = time.Time{}, 0
		l.lookBy(l.next(s, sent))
	}
	l.looking, l.again = false, false
	return false
}

func (l *line) questions() (qs []question, timeout time.Duration) {
	l.d.mu.Lock()
	defer l.d.mu.Unlock()
	for _, w := range l.waiters {
		if w.queued && w.told == nil {
			qs = append(qs, question{w, w.round})
			if timeout == 0 || w.c.Timeout < timeout {
				timeout = w.c.Timeout
			}
		}
	}
	return qs, timeout
}

// ask makes one look.
func (l *line) ask(qs []question, timeout time.Duration) (state, error) {
	d := l.d
	args := []any{l.ear.channel, redisstore.Millis(d.window), 0, ""}
	for _, q := range qs {
		args = append(args, q.w.c.Token)
	}
	ctx, cancel := context.WithTimeout(d.calls, timeout)
	defer cancel()
	sent := time.Now()
	reply, err := d.store.Run(ctx, lookScript, d.call(l.key, args...))
	if err != nil {
		return state{}, err
	}
	s, ok := decode(reply)
	if !ok || len(s.found) != len(qs) {
		return state{}, d.store.Unexpected(reply)
	}
	d.tell(l.key, s.told, sent)
	d.mu.Lock()
	defer d.mu.Unlock()
	for i, q := range qs {
		l.answer(q, s, s.found[i] == '1', sent)
	}
	return s, nil
}

// answer tells a waiter what a look that was sent then has found of it. The
// caller holds mu.
func (l *line) answer(q question, s state, found bool, sent time.Time) {
	w := q.w
	switch {
	case w.round != q.round || !w.queued || w.told != nil || l.waiters[w.c.Token] != w:
		return // it knows better by now
	case s.token == w.c.Token && (s.fence > 0 || !w.c.Fenced):
		w.told = &told{fence: s.fence}
		l.d.expect(l.ear, w.c.Token)
	case found:
		w.stand(s, sent)
		return
	default:
		w.again()
	}
	w.poke()
}

// ail notes that a look that was sent then was not answered, and ends the
// waits that have ridden that out as long as they may. The caller holds mu.
func (l *line) ail(err error, sent time.Time) {
	if l.since.IsZero() {
		l.since = sent
	}
	for _, w := range l.waiters {
		if w.queued && time.Since(l.since) >= w.c.Timeout {
			w.gone = redisstore.Outage(err, l.since)
			w.poke()
		}
	}
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
			reply, err := d.store.Run(ctx, lookScript, d.call(key, d.listensFor(key), redisstore.Millis(d.window), r.int(1), r.text(2)))
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
