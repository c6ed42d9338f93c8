package resp

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/internal/lazyctx"
)

// Wire is a connection to a server that concurrent callers share. Their commands are written
// together, and the replies are read together. When no caller uses the wire any more, the
// connection goes back to its pool.
//
// When a caller's context ends, the caller leaves, without an effect on others. If its command is
// not written yet, the command is not sent. Otherwise the reply is dropped. No caller blocks in a
// read or a write, because one goroutine writes the commands, and another one reads.
//
// Once the field over is set, a wire takes no more commands, and it ends when no caller waits.
type Wire struct {
	conn *Conn
	back func(ok bool) // returns the connection to the pool; ok says whether it may be used again
	kept bool          // the wire never ends by itself; for tests

	mu      sync.Mutex // guards the fields up to writers
	queue   []*request // not written yet
	sent    []*request // written, or about to be written; the replies come in this order
	writing bool       // the writer runs
	over    error      // why the wire takes no more commands; nil while it takes them
	wake    time.Time  // the time at which the reader wakes if nothing arrives
	writers sync.WaitGroup

	// requests contains values of the type *request for reuse. It is not shared by wires, because
	// the channels in the values must stay in one bubble of testing/synctest.
	requests sync.Pool

	// Only the writer uses these.
	out   []byte
	batch []*request

	// Only the reader uses these fields. After the reader has ended, the method End uses them.
	due      []*request    // taken from sent; their replies come next
	answered int           // how many requests in due have their reply
	inReply  bool          // a part of a reply has arrived
	received bool          // bytes have arrived since the last tick
	busy     bool          // at the last tick, a reply was outstanding or the writer ran
	quiet    int           // ticks in a row without bytes and without a change of busy
	tickEnd  time.Time     // when the current tick ends
	trip     time.Duration // a moving average of the round trip
	ended    error         // why the reader has ended
}

// NewWire returns a wire over c, a connection that a call has used. The argument trip is how long
// that call took. If kept is true, the wire ends only when its connection is closed. The function
// back is called once, at the end; its argument ok says whether the connection may be used again.
func NewWire(c *Conn, trip time.Duration, kept bool, back func(ok bool)) *Wire {
	return &Wire{conn: c, kept: kept, trip: trip, back: back}
}

// Pending returns how many commands are queued, and how many are written but not
// yet taken over by the reader. It is for tests.
func (w *Wire) Pending() (queued, sent int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.queue), len(w.sent)
}

// request is one command on a wire. met is set when the reply arrives or the caller leaves. If the
// reply arrives first, the caller receives it. Otherwise the reply is dropped.
type request struct {
	name  string          // of the command
	out   []byte          // the command, encoded
	until time.Time       // the deadline of the caller, or zero
	quit  context.Context // when this context ends, the caller leaves within a tick
	sent  time.Time       // when the command was written
	met   atomic.Bool     // the reply has arrived, or the caller has left
	done  chan Reply      // has room for one, so that answer never blocks
}

// answer ends a request. If the caller has left, the reply is dropped.
func (r *request) answer(reply Reply) {
	if !r.met.Swap(true) {
		r.done <- reply
	}
}

var (
	// ErrUnsent means that the command was not sent and will not be sent.
	ErrUnsent = errors.New("not sent")

	// ErrNoReply means that no reply arrived before the caller left, its deadline passed, or a
	// silent wire ended. The outcome of the command is unknown.
	ErrNoReply = fmt.Errorf("no reply: %w", os.ErrDeadlineExceeded)

	errIdle    = errors.New("idle")
	errUnasked = errors.New("a reply without a command")
	errAstray  = errors.New("the connection leads to the wrong server")
)

// Do sends commands, one after another, and stores their replies. It returns false if the wire was
// given up and nothing was sent. If the caller leaves, some commands may not be sent.
func (w *Wire) Do(ctx context.Context, replies []Reply, commands [][]string) (sent bool) {
	var room [2]*request // enough for the usual call, on the stack
	all := room[:0]
	parent, quit, until := lazyctx.Split(ctx)
	for _, args := range commands {
		r, ok := w.requests.Get().(*request)
		if !ok {
			r = &request{done: make(chan Reply, 1)}
		}
		// The caller encodes its command, because many callers share one writer.
		r.name, r.out = args[0], appendCommand(r.out, args)
		r.until, r.quit = until, quit
		all = append(all, r)
	}
	if !w.put(all) {
		return false
	}
	for i, r := range all {
		replies[i] = w.receive(parent, r)
	}
	return replies[0].Err != ErrUnsent // if the first command was not sent, the others were not sent either
}

// receive returns the reply to a request. If the request was not sent, the error is ErrUnsent.
func (w *Wire) receive(parent context.Context, r *request) Reply {
	// The reader ends the request at its deadline, or soon after quit has ended. Therefore the
	// caller needs no timer, and need not wait for quit, which all callers of a Client share.
	select {
	case reply := <-r.done:
		if reply.Err != ErrNoReply { // after ErrNoReply, the wire still keeps r for a late reply
			*r = request{done: r.done, out: r.out[:0]}
			w.requests.Put(r)
		}
		return reply
	case <-parent.Done():
	}

	// The caller leaves.
	if !r.met.Swap(true) {
		return Reply{Err: ErrNoReply}
	}
	return <-r.done // the reply arrived first
}

// put queues the requests of one caller. It returns false if the wire takes no more commands.
func (w *Wire) put(all []*request) bool {
	w.mu.Lock()
	if w.over != nil {
		w.mu.Unlock()
		return false
	}
	w.queue = append(w.queue, all...)
	if until := all[0].until; !until.IsZero() && until.Before(w.wake) {
		w.wakeAtLocked(until)
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

// write writes the queue until the queue is empty.
func (w *Wire) write() {
	defer w.writers.Done()
	for {
		// Yield, because callers that have just received replies are about to send their next
		// commands. Without the yield, each command would be written alone.
		runtime.Gosched()
		if !w.nextBatch() {
			return
		}
		w.join()
		if len(w.out) == 0 {
			continue // all callers have left
		}

		_ = w.conn.SetWriteDeadline(time.Now().Add(silence))
		if _, err := w.conn.Write(w.out); err != nil {
			// Write nothing more, because only a part of a command may have been written.
			w.GiveUp(err)
			w.conn.Close() // ends the reader
		}
	}
}

// nextBatch moves the queue to batch. It reports false if there is nothing to
// write; the writer then ends.
func (w *Wire) nextBatch() bool {
	w.mu.Lock()
	defer w.mu.Unlock()

	w.batch, w.queue = w.queue, w.batch[:0]
	if w.over != nil {
		for _, r := range w.batch {
			r.answer(Reply{Err: ErrUnsent})
		}
		w.batch = nil
	}
	// mu is still held, so if the writer ends here, the next caller starts a new one.
	w.writing = len(w.batch) > 0
	return w.writing
}

// join joins the commands of the batch, without those of callers that have left, and passes the
// batch to the reader.
func (w *Wire) join() {
	w.out = w.out[:0]

	// The reader does not see the batch during join. If the deadline of a request passes now, the
	// reader ends that request by the end of the tick.
	now := time.Now()
	sent := w.batch[:0]
	for _, r := range w.batch {
		if r.met.Load() { // the caller has left: do not send
			continue
		}
		r.sent = now
		w.out, sent = append(w.out, r.out...), append(sent, r)
	}

	// Append before the write, because a reply can arrive before Write returns.
	w.mu.Lock()
	w.sent = append(w.sent, sent...)
	w.mu.Unlock()
	clear(w.batch)
}

// GiveUp stops the wire from taking commands, and err is the reason. Commands that are already
// written can still be answered.
func (w *Wire) GiveUp(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.giveUpLocked(err)
}

// giveUpLocked is GiveUp for a caller that holds mu. It ends the queued requests itself, because
// the writer may hang in a write.
func (w *Wire) giveUpLocked(err error) {
	if w.over != nil {
		return
	}
	w.over = err
	for _, r := range w.queue {
		r.answer(Reply{Err: ErrUnsent})
	}
	clear(w.queue)
	w.queue = w.queue[:0]
}
