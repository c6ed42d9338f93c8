package redlock

import (
	"context"
	"time"

	"github.com/hasplock/hasp/internal/redisstore"
)

// Readers do not stand in the queue. As long as new readers join, a quorum of free nodes for a
// writer may never come. So if the first waiter waits for readers, it stores an intent on every
// node, again and again. A node with an intent votes no for readers. When readers also queued, they
// got the key later, and writers no sooner.

// leaveIntent stores an intent on all nodes if this writer waits for readers. It does not wait for
// the nodes.
func (w *waiting) leaveIntent() {
	if w.answer != nextReaders {
		return
	}
	w.intent = true
	// Let the intent last until the next look repeats it, even if nodes are far away.
	ttl := redisstore.IntentTTL + min(2*w.trip, w.c.Timeout)
	w.onNodes("set", redisstore.IntentKey(w.c.Key), w.c.Token, "px", redisstore.Millis(ttl))
}

// endIntent removes the intents when Wait ends. It may remove those of another writer, which
// repeats them. An intent that arrives later expires.
func (w *waiting) endIntent() {
	if w.intent {
		w.onNodes("del", redisstore.IntentKey(w.c.Key))
	}
}

// onNodes sends a command to all nodes. It does not wait for the answers.
func (w *waiting) onNodes(command ...string) {
	for _, n := range w.d.nodes {
		w.d.spawn(func() {
			if n.admit() != nil {
				return
			}
			ctx, cancel := context.WithTimeout(context.Background(), w.c.Timeout)
			defer cancel()
			began := time.Now()
			_, err := n.store.Do(ctx, command...)
			// If this fails, readers may come first, until the next look repeats the intent.
			n.observe(ctx, began, err)
		})
	}
}
