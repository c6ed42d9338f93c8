package hasp

import (
	"context"

	"github.com/hasplock/hasp/backend"
)

// recalls receives the messages by which other Clients ask this Client for keys that may linger.
type recalls struct {
	*store
	queue *queue

	// All below is guarded by mu.
	id      string  // the ID to which other Clients send messages; empty until this Client receives them
	asked   bool    // Recalls is in flight or has succeeded
	askNext instant // when to call Recalls again, after it has failed
}

// mark adds a mark to the token of a claim whose hold may linger, and returns the result. The mark
// has this Client's ID, so that refused callers know which Client to ask for the key. If this
// Client does not receive messages yet, mark adds no mark, and begins to receive them.
func (r *recalls) mark(token string) string {
	d, ok := r.driver.(backend.Recaller)
	if !ok {
		return token
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if now := r.clock.now(); !r.asked && now >= r.askNext {
		id := token[:8]
		r.asked, r.askNext = true, now.add(listenPoll)
		r.spawnLocked(func() {
			ctx, cancel := context.WithTimeout(context.Background(), r.opts.Timeout)
			defer cancel()
			err := d.Recalls(ctx, id, r.received)
			r.mu.Lock()
			defer r.mu.Unlock()
			if r.asked = err == nil; r.asked {
				r.id = id
			}
		})
	}
	if r.id == "" {
		return token
	}
	return backend.RecallMark + r.id + backend.RecallMark + token
}

// received handles a message that says that a caller of another Client was refused key. If callers
// of this Client use the key in a busy loop, received may wait long for mu. So it leaves the key
// where the next Unlock of the loop finds it.
func (r *recalls) received(key string) {
	r.queue.recalled <- key // if the channel is full, the call that filled it empties it soon
	r.mu.Lock()
	defer r.mu.Unlock()
	r.queue.recallLocked()
}

// breaks ends the linger of a key that this Client breaks, because the next caller here must not
// get the broken hold.
func (q *queue) breaks(key string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if ln := q.lines[key]; ln != nil && ln.hold != nil && ln.hold.lingers != 0 {
		ln.hold.endLingerLocked(nil)
	}
}
