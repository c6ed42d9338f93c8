package redisstore

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

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
func (s *Store) share(ctx context.Context, at *server, args []any) (any, error) {
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
				return nil, resp.ErrUnsent
			}
		}

		reply, err := w.Do(ctx, args)

		// If another server has the address now, this reply counts, but later
		// commands need a new connection.
		if isWrongServer(err, at.addr) {
			w.GiveUp(errWrongServer)
		}
		if err != resp.ErrUnsent || !w.Over() {
			return reply, err
		}
		at.wire.CompareAndSwap(w, nil) // so that the next caller makes another
	}
	return nil, resp.ErrUnsent
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

var errWrongServer = errors.New("the connection leads to the wrong server")

// isWrongServer reports whether a reply means that another server has the address
// now. Only a new connection leads to that server.
func isWrongServer(err error, addr string) bool {
	if err == nil {
		return false
	}
	to, moved := redis.IsMovedError(err)
	return moved && to == addr || isReadOnly(err)
}

// sendAndShare sends a command over a connection of the pool. If the command
// succeeds, the connection becomes the wire.
func (s *Store) sendAndShare(ctx context.Context, at *server, args []any) (any, error) {
	owner := at.rdb.(*redis.Client).Conn()
	within, end := s.calls.Begin(ctx)
	began := time.Now()
	v, err := resp.Do(within, owner, args)
	end()

	if err != nil && err != redis.Nil || !s.startWire(at, owner, within, time.Since(began)) {
		owner.Close() // returns the connection to the pool, or drops it after an error
	}
	return v, err
}

// startWire makes a wire of the connection that a call has used. within is the call's
// context. took is how long the call lasted, with the time to connect if the connection
// is new. If the connection is not known, or the Store is being closed, startWire
// returns false.
func (s *Store) startWire(at *server, owner *redis.Conn, within context.Context, took time.Duration) bool {
	conn := s.calls.Conn(within)
	if conn == nil {
		return false
	}

	w := resp.NewWire(conn, took, s.always, func(ok bool) {
		if !ok {
			// The connection is closed. The Ping fails, and so the pool drops it.
			_ = owner.Ping(context.Background())
		}
		owner.Close()
	})

	// Count before the goroutine starts, so that close waits for it.
	if !s.wires.add() {
		return false
	}

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
