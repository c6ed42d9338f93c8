package resp

import (
	"errors"
	"os"
	"time"
)

// The reader of a wire checks the wire once in each tick.
//
// If no command has been outstanding for the duration rest, the connection goes back to the pool.
//
// If commands are outstanding and nothing arrives for a few round trips, and for at least two
// ticks, the reader gives the wire up, so that a dead connection fails few calls. The wire then
// takes no more commands, and unwritten commands use another connection. Written commands are not
// repeated. Their callers wait until their deadlines, or without a deadline until nothing has
// arrived for the duration silence. If the server has answered all commands when the wire ends, the
// connection goes back to the pool.
//
// The reader counts ticks instead of time. Therefore, after the process was stopped for a while,
// the reader first reads the replies that have arrived meanwhile.
const (
	tick       = 25 * time.Millisecond
	rest       = 250 * time.Millisecond
	roundTrips = 4
	impatience = time.Second // the upper limit for the time of roundTrips round trips
	silence    = 3 * time.Second
)

// wireBuffer is the size of the buffer for replies. The replies of hundreds of callers fit in.
const wireBuffer = 32 << 10

// Read passes replies to their callers until the wire ends. One goroutine calls Read, and then End.
func (w *Wire) Read() {
	_ = w.checkTime() // replaces the deadline that the last call on the connection set
	in := newReader(wireReader{w}, wireBuffer)
	for {
		answer, err := w.readNext(in)
		if err != nil {
			w.GiveUp(err)
			w.ended = err
			return
		}

		r := w.due[w.answered]
		w.due[w.answered] = nil
		if w.answered == 0 {
			w.trip += (time.Since(r.sent) - w.trip) / 8
		}
		w.answered++
		answer.Run = w.conn.Run
		if answer.Err != nil && w.conn.leadsAstray(answer.Err) {
			w.GiveUp(errAstray)
		}
		r.answer(answer)
	}
}

// readNext reads one reply. It returns an error if no command is outstanding, or
// if the reply is a status that the command cannot have.
func (w *Wire) readNext(in *reader) (Reply, error) {
	w.inReply = false
	begin, err := in.Peek(1)
	if err != nil {
		return Reply{}, err
	}
	w.inReply = true
	// Use the slice begin now, because the method reply overwrites the buffer behind that slice.
	isStatus := begin[0] == '+'

	reply, err := in.reply()
	switch {
	case err != nil:
	case !w.replyIsDue():
		err = errUnasked
	case isStatus && !canReply(w.due[w.answered].name, reply.Value):
		err = Unexpected(reply.Value)
	}
	return reply, err
}

// canReply reports whether a status can be the reply to a command. If not, replies no longer match
// their commands, and the next reply could be an OK that another caller waits for. None of hasp's
// scripts returns a status.
func canReply(name string, status any) bool {
	switch name {
	case "set":
		return status == "OK"
	case "eval", "evalsha":
		return false
	}
	return true
}

// replyIsDue reports whether a command is outstanding. If so, its request is due[answered].
func (w *Wire) replyIsDue() bool {
	if w.answered < len(w.due) {
		return true
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.due, w.sent, w.answered = w.sent, w.due[:0], 0
	return len(w.due) > 0
}

// wireReader reads from a wire. When a read times out, even in the middle of a reply, wireReader
// checks the wire and reads on.
type wireReader struct{ w *Wire }

func (r wireReader) Read(p []byte) (int, error) {
	for {
		n, err := r.w.conn.Read(p)
		if n > 0 {
			r.w.received = true
			return n, nil
		}
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return 0, err
		}
		if err := r.w.checkTime(); err != nil {
			return 0, err
		}
	}
}

// wakeAtLocked sets the time at which the reader wakes if nothing arrives earlier.
func (w *Wire) wakeAtLocked(at time.Time) {
	w.wake = at
	_ = w.conn.SetReadDeadline(at) // fails on a closed connection only
}

// checkTime ends the tick if it has lasted long enough, and ends the requests whose deadlines have
// passed. The reader then sleeps until the next deadline or the end of the tick. If checkTime
// returns an error, the wire ends.
func (w *Wire) checkTime() error {
	now := time.Now()
	w.mu.Lock()
	defer w.mu.Unlock()

	if !now.Before(w.tickEnd) {
		if err := w.tickLocked(now); err != nil {
			return err
		}
		w.tickEnd = now.Add(tick)
	}

	next := w.tickEnd
	for _, some := range [][]*request{w.due[w.answered:], w.sent, w.queue} {
		for _, r := range some {
			switch {
			case r.met.Load():
			case !r.until.IsZero() && !now.Before(r.until), r.quit.Err() != nil:
				// Keep the request in its list, because its reply can still arrive.
				r.answer(Reply{Err: ErrNoReply})
			case !r.until.IsZero() && r.until.Before(next):
				next = r.until
			}
		}
	}
	w.wakeAtLocked(next)
	return nil
}

// tickLocked runs at the end of a tick. It gives up a wire that is idle or silent, and returns an
// error if the wire must end.
func (w *Wire) tickLocked(now time.Time) error {
	wait := append(w.due[w.answered:len(w.due):len(w.due)], w.sent...)
	busy := len(wait) > 0 || w.inReply || w.writing
	if w.received || busy != w.busy || w.tickEnd.IsZero() {
		w.received, w.busy, w.quiet = false, busy, 0
	} else {
		w.quiet++
	}
	if w.kept {
		return nil
	}

	quiet := time.Duration(w.quiet) * tick
	switch {
	case w.over != nil:
	case !busy && quiet >= rest:
		// No writer runs, so the queue is empty.
		w.over = errIdle
	case busy && quiet >= max(2*tick, min(roundTrips*w.trip, impatience)):
		w.giveUpLocked(ErrNoReply)
	}

	// Keep the wire while the writer runs, or a caller waits for a reply.
	if w.writing && quiet < silence {
		return nil
	}
	for _, r := range wait {
		if !r.met.Load() && (now.Before(r.until) || r.until.IsZero() && quiet < silence) {
			return nil
		}
	}
	return w.over
}

// End is called when Read has returned. It gives the connection back to the pool, or closes it if
// it must not be used again. It ends the requests that have no reply yet.
func (w *Wire) End() {
	w.mu.Lock()
	good := !w.inReply && !w.writing
	if wait := append(w.due[w.answered:len(w.due):len(w.due)], w.sent...); len(wait) > 0 {
		good, w.conn.used = false, wait[0].sent // so that the pool doubts what was idle since then
	}
	w.mu.Unlock()

	// Keep the connection if all commands were answered, and the wire ended because it was idle or
	// silent, not because it failed or led to the wrong server.
	good = good && (w.ended == errIdle || w.ended == ErrNoReply)
	if !good {
		w.conn.Close()
	}
	w.back(good)

	// Wait until the writer has ended, because until then w.sent may change. If the writer hangs in
	// a write, the close of the connection ends that write.
	w.writers.Wait()
	for _, r := range append(w.due[w.answered:], w.sent...) {
		r.answer(Reply{Err: w.over})
	}
}
