package redisstore

import (
	"context"
	"time"

	"github.com/hasplock/hasp/internal/redisstore/resp"
)

// maxShared limits the bytes in the arguments of a command on a wire. A longer command could end
// the wire, because a server closes the connection if an argument is too long.
const maxShared = 64 << 10

// isLarge reports whether commands must have a connection of their own.
func isLarge(commands ...[]string) bool {
	n := 0
	for _, args := range commands {
		for _, arg := range args {
			n += len(arg)
		}
	}
	return n > maxShared
}

// hesitation is how long callers wait while another caller makes a wire. If they did not wait, many
// would take connections from the pool at once.
const hesitation = 20 * time.Millisecond

// share sends commands over the server's wire, and stores their replies. If there is no wire, share
// sends the commands over a connection of the pool, which then becomes the wire. If another caller
// takes too long to make a wire, share uses the pool and makes no wire.
func (s *Store) share(ctx context.Context, at *server, replies []Reply, commands ...[]string) {
	// Try a second time if a wire was given up before it sent the command.
	for range 2 {
		w := at.wire.Load()
		if w == nil {
			made, cancel := context.WithTimeout(context.Background(), hesitation)
			if at.making.CompareAndSwap(nil, &made) {
				// Set the field making to nil before cancel wakes the waiting callers, so that one
				// of these can make a wire.
				defer cancel()
				defer at.making.Store(nil)
				s.sendAndShare(ctx, at, replies, commands)
				return
			}
			cancel()
			if others := at.making.Load(); others != nil {
				select {
				case <-(*others).Done():
				case <-ctx.Done():
				}
			}
			// If there still is no wire, the other caller failed or takes too long, or ctx ended.
			if w = at.wire.Load(); w == nil {
				break
			}
		}

		if w.Do(ctx, replies, commands) {
			return
		}
		at.wire.CompareAndSwap(w, nil) // so that the next caller makes another wire
	}
	at.pool.Do(ctx, replies, commands...)
}

// sendAndShare sends commands over a connection of the pool. If the first command succeeds, the
// connection becomes the wire.
func (s *Store) sendAndShare(ctx context.Context, at *server, replies []Reply, commands [][]string) {
	conn, err := at.pool.Get(ctx)
	if err != nil {
		for i := range replies {
			replies[i].Err = err
		}
		return
	}
	began := time.Now()
	good := conn.Do(ctx, replies, commands...)
	if !good || replies[0].Err != nil || !s.startWire(at, conn, time.Since(began)) {
		at.pool.Put(conn, good)
	}
}

// startWire makes a wire of a connection that a call has used. The argument took is how long that
// call lasted. If the Store is being closed, startWire returns false. If the server has a wire
// already, the new wire replaces it, and the old one ends when its callers have their replies.
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
		at.wire.Store(w) // if Read has ended by now, the next caller finds that the wire takes no commands
	}
	return reads
}
