package resp

import (
	"bufio"
	"errors"
	"os"
	"time"
)

// A wire is looked after in ticks. A wire on which nothing is under way goes
// back to the pool after rest.
//
// A wire that says nothing although it is asked is given up after a few round
// trips, and after two ticks at the earliest: one dead connection must not take
// many calls with it. A wire that was given up takes no more commands. Those
// that were not written yet are sent otherwise. Those that were written are not
// repeated: their callers wait until their deadlines, as they would on
// connections of their own, or, without a deadline, until silence. If all of
// them are answered after all, the connection is as good as before.
//
// Ticks are counted, not time. So a process that was stopped reads the replies that
// have arrived before it gives a wire up.
const (
	tick       = 25 * time.Millisecond
	rest       = 250 * time.Millisecond
	roundTrips = 4
	impatience = time.Second // bounds the few round trips
	silence    = 3 * time.Second
)

// Read hands the replies out until the wire ends.
func (w *Wire) Read() {
	_ = w.look() // there is still the deadline of the call before
	in := bufio.NewReaderSize(hearer{w}, 32<<10)
	for {
		w.midway = false
		begin, err := in.Peek(1)
		w.midway = err == nil
		var reply any
		status := false
		if err == nil {
			status = begin[0] == '+'
			reply, err = readReply(in)
		}
		if _, ok := reply.(push); ok && err == nil {
			continue // nobody here asked for it
		}
		if err == nil && !w.expect() {
			err = errors.New("a reply that nobody asked for")
		}
		if err == nil && status && !mayBe(reply, w.due[w.told].args) {
			err = Unexpected(reply)
		}
		if err != nil {
			w.GiveUp(err)
			w.ended = err
			return
		}

		e := w.due[w.told]
		w.due[w.told] = nil
		if w.told == 0 {
			w.trip += (time.Since(e.sent) - w.trip) / 8
		}
		w.told++
		if refused, ok := reply.(replyError); ok {
			w.answer(e, nil, refused)
		} else {
			w.answer(e, reply, nil)
		}
	}
}

// mayBe reports whether a status may be the reply to a command. After one that
// is not, nobody knows whose the next is: it could be the OK that somebody else
// waits for. No script of hasp returns any.
func mayBe(status any, args []any) bool {
	switch args[0] {
	case "set":
		return status == "OK"
	case "eval", "evalsha":
		return false
	}
	return true
}

// expect reports whether somebody is to be answered.
func (w *Wire) expect() bool {
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
type hearer struct{ w *Wire }

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
		if err := r.w.look(); err != nil {
			return 0, err
		}
	}
}

// listen has the reader wake at a time, at the latest. mu is held.
func (w *Wire) listen(until time.Time) {
	w.wake = until
	_ = w.conn.SetReadDeadline(until) // fails on a closed connection only
}

// look sends those away whose time is up, and has the reader listen on until
// the next one's is or a tick ends. It returns why the wire ends, if it does.
func (w *Wire) look() error {
	now := time.Now()
	w.mu.Lock()
	defer w.mu.Unlock()
	if !now.Before(w.tickEnd) {
		if err := w.tick(now); err != nil {
			return err
		}
		w.tickEnd = now.Add(tick)
	}
	next := w.tickEnd
	for _, some := range [][]*errand{w.due[w.told:], w.sent, w.queue} {
		for i, e := range some {
			switch {
			case e.until.IsZero() || e.met.Load():
			case !now.Before(e.until):
				gone := w.errand() // in its place: the reply may still come
				gone.args, gone.until, gone.sent = e.args, e.until, e.sent
				gone.met.Store(true)
				some[i] = gone
				w.answer(e, nil, ErrNoReply)
			case e.until.Before(next):
				next = e.until
			}
		}
	}
	w.listen(next)
	return nil
}

// tick returns why a wire that has said nothing for a moment ends, if it does.
// mu is held.
func (w *Wire) tick(now time.Time) error {
	wait := append(w.due[w.told:len(w.due):len(w.due)], w.sent...)
	asked := len(wait) > 0 || w.midway || w.writing
	if w.heard || asked != w.asked || w.tickEnd.IsZero() {
		w.heard, w.asked, w.quiet = false, asked, 0
	} else {
		w.quiet++
	}
	if w.kept {
		return nil
	}

	quiet := time.Duration(w.quiet) * tick
	switch {
	case w.over != nil:
	case !asked && quiet >= rest:
		w.over = errIdle
	case asked && quiet >= max(2*tick, min(roundTrips*w.trip, impatience)):
		w.giveLocked(ErrNoReply)
	}

	// The wire that is over ends when nobody waits for it any more.
	if w.writing && quiet < silence {
		return nil
	}
	for _, e := range wait {
		if !e.met.Load() && (now.Before(e.until) || e.until.IsZero() && quiet < silence) {
			return nil
		}
	}
	return w.over
}

// End parts with the connection of a wire that is over, and tells all who
// still wait.
func (w *Wire) End() {
	w.mu.Lock()
	good := !w.midway && !w.writing && w.told == len(w.due) && len(w.sent) == 0
	w.mu.Unlock()

	// The wire is over, so nothing more is written. If the reader ended it and
	// not the connection, and all are answered, the connection is in order.
	good = good && (w.ended == errIdle || w.ended == ErrNoReply)
	if !good {
		w.base.Close()
	}
	w.back(good)
	w.writers.Wait()
	for _, e := range append(w.due[w.told:], w.sent...) {
		w.answer(e, nil, w.over)
	}
}
