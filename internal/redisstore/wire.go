package redisstore

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

	"github.com/redis/go-redis/v9"

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
type wire struct {
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
func (w *wire) errand() *errand {
	if e, ok := w.errands.Get().(*errand); ok {
		return e
	}
	return &errand{done: make(chan outcome, 1)}
}

// forget is called by the last who has to do with an errand.
func (w *wire) forget(e *errand) {
	*e = errand{done: e.done}
	w.errands.Put(e)
}

// answer ends an errand.
func (w *wire) answer(e *errand, reply any, err error) {
	if e.met.Swap(true) {
		w.forget(e)
		return
	}
	e.done <- outcome{reply, err}
}

// maxKept is how much room for commands an idle wire keeps.
const maxKept = 256 << 10

// maxShared is how many bytes of arguments travel with other callers' commands.
// A server that finds an argument too long closes the connection.
const maxShared = 64 << 10

// isLarge reports whether a command must have a connection of its own.
func isLarge(args []any) bool {
	n := 0
	for _, arg := range args {
		if text, ok := arg.(string); ok {
			n += len(text)
		}
	}
	return n > maxShared
}

var (
	errUnsent  = errors.New("not sent")
	errIdle    = errors.New("idle")
	errAstray  = errors.New("leads to the wrong server")
	errNoReply = fmt.Errorf("no reply: %w", os.ErrDeadlineExceeded)
)

// do sends a command and returns its reply. If it was not sent, and will not
// be, that is errUnsent.
func (w *wire) do(ctx context.Context, args []any) (any, error) {
	e := w.errand()
	e.args = args
	e.until, _ = ctx.Deadline()
	if !w.put(e) {
		w.forget(e)
		return nil, errUnsent
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
		return nil, errNoReply
	}
	o = <-e.done // the reply came first
	w.forget(e)
	return o.reply, o.err
}

// put queues an errand, if the wire is still there.
func (w *wire) put(e *errand) bool {
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
func (w *wire) write() {
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
func (w *wire) next() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.batch, w.queue = w.queue, w.batch[:0]
	if w.over != nil {
		for _, e := range w.batch {
			w.answer(e, nil, errUnsent)
		}
		w.batch = nil
	}
	w.writing = len(w.batch) > 0
	return w.writing
}

// encode makes one piece of the commands of those who are still there, and has
// the reader wait for their replies.
func (w *wire) encode() {
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
			w.answer(e, nil, errUnsent)
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

// give declares a wire over, unless it is.
func (w *wire) give(up error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.giveLocked(up)
}

// giveLocked is give with mu held. What is not written yet is not sent here any
// more, even if the writer hangs in a write.
func (w *wire) giveLocked(up error) {
	if w.over != nil {
		return
	}
	w.over = up
	for _, e := range w.queue {
		w.answer(e, nil, errUnsent)
	}
	clear(w.queue)
	w.queue = w.queue[:0]
}

// isOver reports whether the wire takes no more commands.
func (w *wire) isOver() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.over != nil
}

// fail ends the wire: its reader finds out.
func (w *wire) fail(err error) {
	w.give(err)
	w.base.Close()
}

// hesitation is how long after it was begun callers wait for a wire that is
// being made. Many at once would have to queue for the connections of the pool.
const hesitation = 20 * time.Millisecond

// share sends the command of a caller that is not alone: over the wire, or, if
// there is none, in a way that makes one. It says errUnsent to whoever is
// better off with the pool.
func (s *Store) share(ctx context.Context, at *server, args []any) (any, error) {
	// Try a second time if a wire was given up before it sent the command.
	for range 2 {
		w := at.wire.Load()
		if w == nil {
			made, cancel := context.WithTimeout(context.Background(), hesitation)
			defer cancel()
			if at.making.CompareAndSwap(nil, &made) {
				if at.wire.Load() == nil {
					defer at.making.Store(nil)
					return s.pioneer(ctx, at, args)
				}
				at.making.Store(nil)
			} else if others := at.making.Load(); others != nil {
				select {
				case <-(*others).Done():
				case <-ctx.Done():
				}
			}
			if w = at.wire.Load(); w == nil {
				return nil, errUnsent
			}
		}
		reply, err := w.do(ctx, args)
		if astray(err, at.addr) {
			w.give(errAstray)
		}
		if err != errUnsent || !w.isOver() {
			return reply, err
		}
		at.wire.CompareAndSwap(w, nil) // so that the next caller makes another
	}
	return nil, errUnsent
}

// astray reports whether a server says that it is not the one that its address
// is for any more: then only a new connection can lead to that.
func astray(err error, addr string) bool {
	if err == nil {
		return false
	}
	to, moved := redis.IsMovedError(err)
	return moved && to == addr || redis.HasErrorPrefix(err, "READONLY")
}

// pioneer sends a command over a connection which, if that went well, becomes
// the wire.
func (s *Store) pioneer(ctx context.Context, at *server, args []any) (any, error) {
	owner := at.rdb.(*redis.Client).Conn()
	c, end := s.calls.begin(ctx)
	cmd := newOnce(c, args)
	began := time.Now()
	_ = owner.Process(c, cmd)
	end()
	v, err := cmd.Result()
	if err != nil && err != redis.Nil || !s.lay(at, owner, c, time.Since(began)) {
		owner.Close() // which gives the connection back, or up
	}
	return v, err
}

// lay makes a wire of the connection that c has used. took is how long c did,
// which includes the making of the connection, if it is new.
func (s *Store) lay(at *server, owner *redis.Conn, c *call, took time.Duration) bool {
	conn := s.calls.used(c)
	if conn == nil {
		return false
	}
	w := &wire{conn: conn.Conn, base: conn.Conn, kept: s.always, trip: took}
	if conn.secure != nil {
		w.conn = conn.secure
	}
	w.back = func(ok bool) {
		if !ok {
			_ = owner.Ping(context.Background()) // which fails, by which the pool learns that it is closed
		}
		owner.Close()
	}
	if !s.wires.add() {
		return false
	}
	at.wire.Store(w)
	go func() {
		defer s.wires.wg.Done()
		w.read()
		at.wire.CompareAndSwap(w, nil)
		w.end()
	}()
	return true
}

// wires counts those of a Store.
type wires struct {
	mu   sync.Mutex // guards over
	over bool
	wg   sync.WaitGroup
}

// add counts one more, unless the Store is closed.
func (ws *wires) add() bool {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if !ws.over {
		ws.wg.Add(1)
	}
	return !ws.over
}

// close returns when all wires have ended, whose connections have been closed.
func (ws *wires) close() {
	ws.mu.Lock()
	ws.over = true
	ws.mu.Unlock()
	ws.wg.Wait()
}
