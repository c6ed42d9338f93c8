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

// hesitation is how long callers wait for a wire that is being made, counted from
// when it was begun. If they did not wait, many would take connections from the
// pool at once.
const hesitation = 20 * time.Millisecond

// share sends a command over the server's wire. If there is none, it makes one: the
// command is then the first on it. share returns resp.ErrUnsent if the caller
// should use the pool.
func (s *Store) share(ctx context.Context, at *server, args []any) (any, error) {
	// Try a second time if a wire was given up before it sent the command.
	for range 2 {
		w := at.wire.Load()
		if w == nil {
			made, cancel := context.WithTimeout(context.Background(), hesitation)
			defer cancel()
			if at.making.CompareAndSwap(nil, &made) {
				// Between the two loads another caller may have made a wire.
				if at.wire.Load() == nil {
					// This runs before cancel. So the callers that cancel wakes
					// find no caller that makes a wire.
					defer at.making.Store(nil)
					return s.sendAndShare(ctx, at, args)
				}
				at.making.Store(nil)
			} else if others := at.making.Load(); others != nil {
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

var errWrongServer = errors.New("the connection leads to the wrong server")

// isWrongServer reports whether a reply means that another server has the address
// now. Only a new connection leads to that server.
func isWrongServer(err error, addr string) bool {
	if err == nil {
		return false
	}
	to, moved := redis.IsMovedError(err)
	return moved && to == addr || redis.HasErrorPrefix(err, "READONLY")
}

// sendAndShare sends a command over a connection of the pool. If the command
// succeeds, the connection becomes the wire.
func (s *Store) sendAndShare(ctx context.Context, at *server, args []any) (any, error) {
	owner := at.rdb.(*redis.Client).Conn()
	within, end := s.calls.Begin(ctx)
	cmd := resp.NewCommand(within, args)
	began := time.Now()
	// The command has the same error.
	_ = owner.Process(within, cmd)
	end()

	v, err := cmd.Result()
	if err != nil && err != redis.Nil || !s.startWire(at, owner, within, time.Since(began)) {
		owner.Close() // returns the connection to the pool, or drops it after an error
	}
	return v, err
}

// startWire makes a wire of the connection that a call has used. within is the
// call's context, and took its duration, with the time to connect if the connection
// is new. startWire reports false if there is no wire.
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
		// Before End, which waits for the writer: new callers need another wire.
		at.wire.CompareAndSwap(w, nil)
		w.End()
	}()
	return true
}

// wires counts the wires of a Store.
type wires struct {
	mu   sync.Mutex // guards over; after over, wg does not grow
	over bool
	wg   sync.WaitGroup
}

// add counts one more wire. It reports false if the Store is closed.
func (ws *wires) add() bool {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	// close sets over with mu held before it waits, so wg does not grow during that
	// wait.
	if !ws.over {
		ws.wg.Add(1)
	}
	return !ws.over
}

// close waits until all wires have ended. Their connections are closed already.
func (ws *wires) close() {
	ws.mu.Lock()
	ws.over = true
	ws.mu.Unlock()
	ws.wg.Wait()
}
