package redisstore

import (
	"context"
	"time"

	"github.com/hasplock/hasp/internal/redisstore/resp"
)

// maxShared is the most bytes of arguments that a command on a wire may have, because a server
// closes the connection if it finds an argument too long.
const maxShared = 64 << 10

// isLarge reports whether a command must have a connection of its own.
func isLarge(args []string) bool {
	n := 0
	for _, arg := range args {
		n += len(arg)
	}
	return n > maxShared
}

// hesitation is how long a caller may take to make a wire before the others stop waiting for it. If
// they did not wait, many would take connections from the pool at once.
const hesitation = 20 * time.Millisecond

// share sends a command over the server's wire. If there is none, it sends the command
// over a connection of the pool, and then makes that connection the wire. share returns
// resp.ErrUnsent if the caller should use the pool.
func (s *Store) share(ctx context.Context, at *server, args []string) Reply {
	// Try a second time if a wire was given up before it sent the command.
	for range 2 {
		w := at.wire.Load()
		if w == nil {
			made, cancel := context.WithTimeout(context.Background(), hesitation)
			if at.making.CompareAndSwap(nil, &made) {
				// Set making to nil before cancel wakes the callers that wait, so that the next of
				// them can make a wire.
				defer cancel()
				defer at.making.Store(nil)
				return s.sendAndShare(ctx, at, args)
			}
			cancel()
			if others := at.making.Load(); others != nil {
				select {
				case <-(*others).Done():
				case <-ctx.Done():
				}
			}
			// If there is no wire now, the other caller has failed, or takes too long.
			if w = at.wire.Load(); w == nil {
				return Reply{Err: resp.ErrUnsent}
			}
		}

		r := w.Do(ctx, args)
		if r.Err != resp.ErrUnsent {
			return r
		}
		at.wire.CompareAndSwap(w, nil) // so that the next caller makes another
	}
	return Reply{Err: resp.ErrUnsent}
}

// sendAndShare sends a command over a connection of the pool. If the command
// succeeds, the connection becomes the wire.
func (s *Store) sendAndShare(ctx context.Context, at *server, args []string) Reply {
	conn, err := at.pool.Get(ctx)
	if err != nil {
		return Reply{Err: err}
	}
	began := time.Now()
	var replies [1]Reply
	good := conn.Do(ctx, replies[:], args)
	r := replies[0]
	if !good || r.Err != nil || !s.startWire(at, conn, time.Since(began)) {
		at.pool.Put(conn, good)
	}
	return r
}

// startWire makes a wire of a connection that a call has used. took is how long the call lasted. If
// the Store is being closed, startWire returns false. The new wire replaces another one, which ends
// when its callers have their replies.
func (s *Store) startWire(at *server, conn *resp.Conn, took time.Duration) bool {
	w := resp.NewWire(conn, took, s.always, func(ok bool) { at.pool.Put(conn, ok) })
	reads := s.dialer.spawn(func() {
		w.Read()
		// Remove the wire before End, because End waits for the writer, and new callers need
		// another wire now.
		at.wire.CompareAndSwap(w, nil)
		w.End()
	})
	if reads {
		at.wire.Store(w) // if Read has ended by now, the next caller finds that the wire is over
	}
	return reads
}
