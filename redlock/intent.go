package redlock

import (
	"context"
	"time"

	"github.com/hasplock/hasp/internal/redisstore"
)

// Readers do not stand in the queue. As long as new readers join, no quorum of the nodes becomes
// free for a writer. So if readers have refused the first waiter, it stores an intent on every
// node, and repeats that. A node with an intent votes no for readers.

// leaveIntent stores an intent on all nodes if readers have refused this writer. It does not
// wait for the nodes.
func (w *waiting) leaveIntent() {
	if w.answer != nextReaders {
		return
	}
	w.intent = true
	// The intent lasts until the next look repeats it. If nodes are far away, a look takes longer.
	ttl := redisstore.IntentTTL + min(2*w.trip, w.c.Timeout)
	w.onNodes("set", redisstore.IntentKey(w.c.Key), w.c.Token, "px", ttl.Milliseconds())
}

// endIntent removes the intents when Wait ends. It may remove those of another writer, which
// repeats them. An intent that arrives later expires.
func (w *waiting) endIntent() {
	if w.intent {
		w.onNodes("del", redisstore.IntentKey(w.c.Key))
	}
}

// onNodes sends a command to all nodes. It does not wait for the answers.
func (w *waiting) onNodes(command ...any) {
	for _, n := range w.d.nodes {
		w.d.spawn(func() {
			if n.admit() != nil {
				return
			}
			ctx, cancel := context.WithTimeout(context.Background(), w.c.Timeout)
			defer cancel()
			began := time.Now()
			// If this fails, readers may come first, until the next look repeats the intent.
			n.observe(ctx, began, n.store.DoAll(ctx, command)[0].Err)
		})
	}
}
