package redlock

import (
	"context"
	"time"

	"github.com/hasplock/hasp/internal/redisstore"
)

// Readers do not stand in the queue. As long as readers keep coming, a quorum of the nodes is
// never free. So the first waiter, if readers have refused it, leaves an intent on every node,
// and repeats it. A node with an intent votes no for readers.

// leaveIntent leaves an intent on all nodes, in the background, if readers have refused this
// writer.
func (w *waiting) leaveIntent() {
	if !w.wants {
		return
	}
	w.intent = true
	// The next look repeats the intent. If nodes are far away, that look takes longer.
	ttl := redisstore.IntentTTL + min(2*w.trip, w.c.Timeout)
	w.onNodes("set", redisstore.IntentKey(w.c.Key), w.c.Token, "px", ttl.Milliseconds())
}

// endIntent removes the intents when Wait ends. It may remove those of another writer, which
// repeats them. An intent that arrives later ends by itself.
func (w *waiting) endIntent() {
	if w.intent {
		w.onNodes("del", redisstore.IntentKey(w.c.Key))
	}
}

// onNodes sends a command to all nodes, in the background.
func (w *waiting) onNodes(command ...any) {
	for _, n := range w.d.nodes {
		w.d.spawn(func() {
			if n.admit() != nil {
				return
			}
			ctx, cancel := context.WithTimeout(context.Background(), w.c.Timeout)
			defer cancel()
			began := time.Now()
			// If the intent does not arrive, readers may come first, and the next look repeats it.
			n.observe(ctx, began, n.store.DoAll(ctx, command)[0].Err)
		})
	}
}
