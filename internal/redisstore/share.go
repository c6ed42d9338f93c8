package redisstore

import (
	"context"
	"sync"
	"time"

	"github.com/hasplock/hasp/internal/redisstore/resp"
)

// maxShared is how many bytes of arguments a command on a wire may have. A server
// closes the connection if it finds an argument too long.
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

// While one caller makes a wire, the others wait for it, until hesitation has passed
// since it began. If they did not wait, many would take connections from the pool at
// once.
const hesitation = 20 * time.Millisecond

// share sends a command over the server's wire. If there is none, it sends the command
// over a connection of the pool, and then makes that connection the wire. share returns
// resp.ErrUnsent if the caller should use the pool.
func (s *Store) share(ctx context.Context, at *server, args []any) Reply {
	// Try a second time if a wire was given up before it sent the command.
	for range 2 {
		w := at.wire.Load()
		if w == nil {
			if end, ok := at.beginWire(); ok {
				defer end()
				return s.sendAndShare(ctx, at, args)
			}
			if others := at.making.Load(); others != nil {
				select {
				case <-(*others).Done():
				case <-ctx.Done():
				}
			}
			// If there is no wire now, the other caller has failed or takes too
			// long.
			if w = at.wire.Load(); w == nil {
				return Reply{Err: resp.ErrUnsent}
			}
		}

		r := w.Do(ctx, args)
		if r.Err != resp.ErrUnsent || !w.Over() {
			return r
		}
		at.wire.CompareAndSwap(w, nil) // so that the next caller makes another
	}
	return Reply{Err: resp.ErrUnsent}
}

// beginWire reports whether the caller is to make a wire: there is none, and no other
// caller makes one. If so, the caller calls end when it has made the wire or has failed.
func (at *server) beginWire() (end func(), ok bool) {
	made, cancel := context.WithTimeout(context.Background(), hesitation)
	if at.making.CompareAndSwap(nil, &made) {
		// Since share loaded wire, another caller may have made one.
		if at.wire.Load() == nil {
			return func() {
				// First clear making: a caller that cancel wakes may soon make a wire
				// itself.
				at.making.Store(nil)
				cancel()
			}, true
		}
		at.making.Store(nil)
	}
	cancel()
	return nil, false
}

// sendAndShare sends a command over a connection of the pool. If the command
// succeeds, the connection becomes the wire.
func (s *Store) sendAndShare(ctx context.Context, at *server, args []any) Reply {
	conn, err := at.pool.Get(ctx)
	if err != nil {
		return Reply{Err: err}
	}
	began := time.Now()
	replies, good := conn.Do(ctx, args)
	r := replies[0]
	if !good || r.Err != nil || !s.startWire(at, conn, time.Since(began)) {
		at.pool.Put(conn, good)
	}
	return r
}

// startWire makes a wire of a connection that a call has used. took is how long the call
// lasted. If the Store is being closed, startWire returns false.
func (s *Store) startWire(at *server, conn *resp.Conn, took time.Duration) bool {
	// Count before the goroutine starts, so that close waits for it.
	if !s.wires.add() {
		return false
	}

	w := resp.NewWire(conn, took, s.always, func(ok bool) { at.pool.Put(conn, ok) })
	at.wire.Store(w)
	go func() {
		defer s.wires.wg.Done()
		w.Read()
		// This comes before End, which waits for the writer. New callers need another
		// wire now.
		at.wire.CompareAndSwap(w, nil)
		w.End()
	}()
	return true
}

// group counts goroutines, so that close can wait for them.
type group struct {
	mu   sync.Mutex // guards over
	over bool       // add counts no more goroutines
	wg   sync.WaitGroup
}

// add counts one more goroutine, which calls wg.Done at its end. It reports false after
// close has begun: then no goroutine may start.
func (g *group) add() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	// close sets over with mu held before it waits. During that wait, wg grows only if a
	// counted goroutine starts another one.
	if !g.over {
		g.wg.Add(1)
	}
	return !g.over
}

// close waits until all goroutines have ended. The caller has closed what they wait
// for.
func (g *group) close() {
	g.mu.Lock()
	g.over = true
	g.mu.Unlock()
	g.wg.Wait()
}
