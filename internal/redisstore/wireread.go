package redisstore

import (
	"bufio"
	"errors"
	"os"
	"time"
)

// A wire is looked after in ticks. One on which nothing is under way for a
// whole tick goes back to the pool. One that says nothing although it is asked
// is dead: after impatience, if whoever has waited longest was not willing to
// wait longer, or after silence in any case. Ticks are counted, not time, so
// that a process that was stopped listens before it judges.
const (
	tick       = 250 * time.Millisecond
	impatience = time.Second
	silence    = 3 * time.Second
)

// read hands the replies out until the wire ends.
func (w *wire) read() {
	w.listen() // there is still the deadline of the call before
	in := bufio.NewReaderSize(hearer{w}, 32<<10)
	for {
		reply, err := readReply(in)
		if err == nil && !w.expect() {
			err = errors.New("a reply that nobody asked for")
		}
		if err != nil {
			w.mu.Lock()
			if w.over == nil {
				w.over = err
			}
			w.mu.Unlock()
			return
		}
		e := w.due[w.told]
		w.due[w.told] = nil
		w.told++
		if refused, ok := reply.(replyError); ok {
			w.answer(e, nil, refused)
		} else {
			w.answer(e, reply, nil)
		}
	}
}

// expect reports whether somebody is to be answered.
func (w *wire) expect() bool {
	if w.told < len(w.due) {
		return true
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.due, w.sent, w.told = w.sent, w.due[:0], 0
	return len(w.due) > 0
}

// hearer reads from a wire. A reply may come in pieces, between which it listens
// on.
type hearer struct{ w *wire }

func (r hearer) Read(p []byte) (int, error) {
	for {
		n, err := r.w.conn.Read(p)
		if n > 0 {
			r.w.heard = true
			return n, nil
		}
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return 0, err
		}
		if err := r.w.tick(); err != nil {
			return 0, err
		}
		r.w.listen()
	}
}

// listen begins a tick.
func (w *wire) listen() {
	end := time.Now().Add(tick)
	if w.kept {
		end = time.Time{}
	}
	_ = w.conn.SetReadDeadline(end) // fails on a closed connection only
}

// tick returns why a wire that has said nothing for a moment ends, if it does.
func (w *wire) tick() error {
	w.quiet++
	if w.heard {
		w.heard, w.quiet = false, 0
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	var oldest *errand
	switch {
	case w.told < len(w.due):
		oldest = w.due[w.told]
	case len(w.sent) > 0:
		oldest = w.sent[0]
	case w.writing:
		return nil
	case w.quiet > 0:
		w.over = errIdle
		return errIdle
	default:
		return nil
	}
	// What was sent just before the first tick has been waited for since then.
	quiet := time.Duration(w.quiet-1) * tick
	if quiet >= silence || quiet >= impatience && !oldest.until.IsZero() && time.Now().After(oldest.until) {
		return errNoReply
	}
	return nil
}

// end parts with the connection of a wire that is over, and tells all who
// still wait.
func (w *wire) end() {
	idle := w.over == errIdle
	if !idle {
		w.base.Close()
	}
	w.back(idle)
	w.writers.Wait()
	for _, e := range append(w.due[w.told:], w.sent...) {
		w.answer(e, nil, w.over)
	}
	for _, e := range w.queue {
		w.answer(e, nil, errUnsent)
	}
}
