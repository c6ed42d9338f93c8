package resp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/internal/lazyctx"
)

// wire is a connection that those who want something of one server at the same
// time share: their commands travel together, and so do the replies. It is one
// that go-redis has made, taken from its pool, and goes back there as soon as
// nobody uses it. Who is alone uses the pool, and has nobody to wait for but
// the server.
//
// Who leaves takes nobody along: a command that was not written yet is not
// sent, and the reply to one that was is read and dropped. Nobody waits in a
// read or a write: a writer runs while there is something to write, a reader
// for as long as there is a wire.
//
// A wire that is over takes no more commands, which then go to another one, and
// ends when nobody waits for a reply any more.
type Wire struct {
	conn net.Conn      // to read from and write to
	base net.Conn      // what to close; conn itself, or what is below its TLS
	back func(ok bool) // parts with the connection, which may be as good as before
	kept bool          // until somebody closes it; for tests

	mu      sync.Mutex // guards the rest, but not what is the reader's
	queue   []*errand  // not written yet
	sent    []*errand  // written, or about to be, in this order
	writing bool
	over    error     // why it takes no more commands
	wake    time.Time // the reader, if nothing comes
	writers sync.WaitGroup
	errands sync.Pool // of *errand; not of all wires, since channels stay in their bubble of testing/synctest

	out   []byte    // the writer's
	batch []*errand // the writer's

	due     []*errand     // from sent: those to be answered next; the reader's
	told    int           // of due; the reader's
	midway  bool          // in a reply; the reader's
	heard   bool          // since the last tick; the reader's
	asked   bool          // at the last tick: something is under way; the reader's
	quiet   int           // ticks in a row without a word, asked all the time or never; the reader's
	tickEnd time.Time     // the reader's
	trip    time.Duration // a round trip, smoothed; the reader's
	ended   error         // why the reader has ended; the reader's
}

// NewWire returns a wire of a connection that a call of go-redis has used. trip is
// how long that call took. A wire that is kept ends only when it is closed. back
// parts with the connection, which may be as good as before.
func NewWire(c *Conn, trip time.Duration, kept bool, back func(ok bool)) *Wire {
	w := &Wire{conn: c.Conn, base: c.Conn, kept: kept, trip: trip, back: back}
	if c.secure != nil {
		w.conn = c.secure
	}
	return w
}

// Pending returns how many commands are queued, and how many are written and not
// taken up by the reader, for tests.
func (w *Wire) Pending() (queued, sent int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.queue), len(w.sent)
}

// errand is one command on a wire, and where its caller and its reply meet:
// the one that comes second knows what to do.
type errand struct {
	args  []any
	until time.Time // its caller waits no longer; zero if there is no end
	sent  time.Time // when it was written
	met   atomic.Bool
	done  chan outcome // one, to a caller that is still there
}

// outcome is what a command has come to.
type outcome struct {
	reply any
	err   error
}

// errand returns a blank one.
func (w *Wire) errand() *errand {
	if e, ok := w.errands.Get().(*errand); ok {
		return e
	}
	return &errand{done: make(chan outcome, 1)}
}

// forget is called by the last who has to do with an errand.
func (w *Wire) forget(e *errand) {
	*e = errand{done: e.done}
	w.errands.Put(e)
}

// answer ends an errand.
func (w *Wire) answer(e *errand, reply any, err error) {
	if e.met.Swap(true) {
		w.forget(e)
		return
	}
	e.done <- outcome{reply, err}
}

// maxKept is how much room for commands an idle wire keeps.
const maxKept = 256 << 10

var (
	ErrUnsent  = errors.New("not sent")
	errIdle    = errors.New("idle")
	ErrNoReply = fmt.Errorf("no reply: %w", os.ErrDeadlineExceeded)
)

// Do sends a command and returns its reply. If it was not sent, and will not
// be, that is ErrUnsent.
func (w *Wire) Do(ctx context.Context, args []any) (any, error) {
	e := w.errand()
	e.args = args
	e.until, _ = ctx.Deadline()
	if !w.put(e) {
		w.forget(e)
		return nil, ErrUnsent
	}
	done, quit, _ := lazyctx.Split(ctx) // the reader knows the time
	var o outcome
	select {
	case o = <-e.done:
		w.forget(e)
		return o.reply, o.err
	case <-done:
	case <-quit:
	}

	if !e.met.Swap(true) {
		return nil, ErrNoReply
	}
	o = <-e.done // the reply came first
	w.forget(e)
	return o.reply, o.err
}

// put queues an errand, if the wire is still there.
func (w *Wire) put(e *errand) bool {
	w.mu.Lock()
	if w.over != nil {
		w.mu.Unlock()
		return false
	}
	w.queue = append(w.queue, e)
	if !e.until.IsZero() && e.until.Before(w.wake) {
		w.listen(e.until)
	}
	begin := !w.writing
	if begin {
		w.writing = true
		w.writers.Add(1)
	}
	w.mu.Unlock()
	if begin {
		go w.write()
	}
	return true
}

// write writes what is queued until nothing is. It first lets all run that can,
// since whoever has just been answered is about to ask for more: without that,
// each command would travel alone.
func (w *Wire) write() {
	defer w.writers.Done()
	for {
		runtime.Gosched()
		if !w.next() {
			return
		}
		w.encode()
		if len(w.out) == 0 {
			continue
		}
		_ = w.conn.SetWriteDeadline(time.Now().Add(silence))
		if _, err := w.conn.Write(w.out); err != nil {
			w.fail(err)
		}
	}
}

// next takes what is queued. If that is nothing, or the wire is over, the
// writer ends.
func (w *Wire) next() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.batch, w.queue = w.queue, w.batch[:0]
	if w.over != nil {
		for _, e := range w.batch {
			w.answer(e, nil, ErrUnsent)
		}
		w.batch = nil
	}
	w.writing = len(w.batch) > 0
	return w.writing
}

// encode makes one piece of the commands of those who are still there, and has
// the reader wait for their replies.
func (w *Wire) encode() {
	w.out = w.out[:0]
	if cap(w.out) > maxKept {
		w.out = nil
	}
	now := time.Now()
	sent := w.batch[:0]
	for _, e := range w.batch {
		if e.met.Load() {
			w.forget(e)
			continue
		}
		out, ok := appendCommand(w.out, e.args)
		if !ok {
			w.answer(e, nil, ErrUnsent)
			continue
		}
		e.sent = now
		w.out, sent = out, append(sent, e)
	}
	w.mu.Lock()
	w.sent = append(w.sent, sent...)
	w.mu.Unlock()
	clear(w.batch)
}

// GiveUp declares a wire over, unless it is.
func (w *Wire) GiveUp(up error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.giveLocked(up)
}

// giveLocked is give with mu held. What is not written yet is not sent here any
// more, even if the writer hangs in a write.
func (w *Wire) giveLocked(up error) {
	if w.over != nil {
		return
	}
	w.over = up
	for _, e := range w.queue {
		w.answer(e, nil, ErrUnsent)
	}
	clear(w.queue)
	w.queue = w.queue[:0]
}

// Over reports whether the wire takes no more commands.
func (w *Wire) Over() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.over != nil
}

// fail ends the wire: its reader finds out.
func (w *Wire) fail(err error) {
	w.GiveUp(err)
	w.base.Close()
}
