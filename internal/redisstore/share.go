package redisstore

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/redisstore/resp"
)

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

// hesitation is how long after it was begun callers wait for a wire that is
// being made. Many at once would have to queue for the connections of the pool.
const hesitation = 20 * time.Millisecond

// share sends the command of a caller that is not alone: over the wire, or, if
// there is none, in a way that makes one. It says resp.ErrUnsent to whoever is
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
				return nil, resp.ErrUnsent
			}
		}
		reply, err := w.Do(ctx, args)
		if astray(err, at.addr) {
			w.GiveUp(errAstray)
		}
		if err != resp.ErrUnsent || !w.Over() {
			return reply, err
		}
		at.wire.CompareAndSwap(w, nil) // so that the next caller makes another
	}
	return nil, resp.ErrUnsent
}

var errAstray = errors.New("leads to the wrong server")

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
	c, end := s.calls.Begin(ctx)
	cmd := resp.NewCommand(c, args)
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
func (s *Store) lay(at *server, owner *redis.Conn, c context.Context, took time.Duration) bool {
	conn := s.calls.Conn(c)
	if conn == nil {
		return false
	}
	w := resp.NewWire(conn, took, s.always, func(ok bool) {
		if !ok {
			_ = owner.Ping(context.Background()) // which fails, by which the pool learns that it is closed
		}
		owner.Close()
	})
	if !s.wires.add() {
		return false
	}
	at.wire.Store(w)
	go func() {
		defer s.wires.wg.Done()
		w.Read()
		at.wire.CompareAndSwap(w, nil)
		w.End()
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
