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
	asked   bool    // the call of Recalls is in flight or has succeeded
	askNext instant // when to call Recalls again, after it has failed
}

// mark adds a mark to the token of a claim whose hold may linger, and returns the result. The mark
// contains this Client's ID, so that refused callers know which Client to ask for the key. If this
// Client does not receive messages yet, the method adds no mark, and begins to receive messages.
func (r *recalls) mark(token string) string {
	d, ok := r.driver.Driver.(backend.Recaller)
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

// received handles a message: a caller of another Client was refused the key. If callers of this
// Client use the key in a busy loop, received may wait for mu for a long time. Therefore it first
// puts the key where the next Unlock of the loop finds it.
func (r *recalls) received(key string) {
	r.queue.recalled <- key // if the channel is full, the call that filled it empties it soon
	r.mu.Lock()
	defer r.mu.Unlock()
	r.queue.recallLocked()
}
