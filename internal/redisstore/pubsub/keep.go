package pubsub

import (
	"context"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/redisstore/resp"
)

const (
	lingering   = time.Second            // how long a channel without listeners is kept
	searchAfter = 160 * time.Millisecond // when keep looks for a server that was lost, at most
)

// keep keeps each channel at the server that has its slot, as long as there are channels.
// It looks each second, and soon after channels have lost their server.
func (b *Subscriber) keep() {
	ticker := time.NewTicker(tickEvery)
	defer ticker.Stop()
	for {
		b.findAll()
		if !b.removeUnused() {
			return
		}

		select {
		case <-ticker.C:
		case <-b.lost:
			if b.store.Reload == nil {
				continue
			}
			// Reload works in the background, and the pause gives it time. If servers
			// disagree about a slot, a channel moves back and forth, but not often.
			b.store.Reload()
			select {
			case <-time.After(searchAfter/2 + rand.N(searchAfter/2)):
			case <-b.open.Done():
			}
		case <-b.open.Done():
		}
	}
}

// searchAgain makes keep look for servers soon.
func (b *Subscriber) searchAgain() {
	select {
	case b.lost <- struct{}{}:
	default:
	}
}

// movedLocked takes a channel from a server that does not have it any more.
func (b *Subscriber) movedLocked(ch *channel) {
	ch.state, ch.link = isPending, nil
	b.searchAgain()
}

// findAll finds the servers of all channels.
func (b *Subscriber) findAll() {
	b.mu.Lock()
	chs := slices.Collect(maps.Values(b.channels))
	b.mu.Unlock()

	ctx, cancel := context.WithTimeout(b.open, connectTimeout)
	defer cancel()
	for _, ch := range chs {
		b.find(ctx, ch)
	}
}

// removeUnused removes channels that have had no listeners for a while, and links that
// have no channels. If nothing is left, it reports false, and keep ends.
func (b *Subscriber) removeUnused() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	used := map[*link]bool{}
	for name, ch := range b.channels {
		if len(ch.listeners) > 0 || time.Since(ch.idle) < lingering {
			used[ch.link] = true
			continue
		}
		delete(b.channels, name)
		if ch.link != nil {
			ch.link.addLocked(command{"unsubscribe", ch})
		}
	}
	for client, k := range b.links {
		if !used[k] {
			k.drop(errUnused)
			// A channel that is added from now on needs another link.
			delete(b.links, client)
		}
	}
	b.keeping = len(b.channels) > 0 && !b.closed
	return b.keeping
}

// find moves ch to the server that has its slot now. A server that has become a replica
// may still confirm subscriptions and pass on messages. But PUBLISH on the master does not
// count its subscribers.
func (b *Subscriber) find(ctx context.Context, ch *channel) {
	// mu is not held while the server is found, because that may need a call.
	client, err := b.server(ctx, ch.slotKey)

	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	// Meanwhile the channel may have been removed, or replaced by one with its name.
	case b.closed || b.channels[ch.name] != ch:
	case err != nil && ch.link == nil:
		// Calls of Listen return now. A Listener that stays waits for the next try.
		ch.failLocked(err)
	case err != nil:
	case ch.link == nil || ch.link.client != client || ch.state == isRefused:
		b.placeLocked(ch, client)
	}
}

// placeLocked subscribes to ch on the link of client.
func (b *Subscriber) placeLocked(ch *channel, client redis.UniversalClient) {
	k := b.links[client]
	if k == nil {
		k = b.startLocked(client)
	}
	if ch.link != nil && ch.link != k {
		ch.link.addLocked(command{"unsubscribe", ch})
	}
	ch.state, ch.link = isPending, k
	k.addLocked(command{"subscribe", ch})
}

// server returns the client of the server that has the slot of slotKey. Scripts
// publish there.
func (b *Subscriber) server(ctx context.Context, slotKey string) (redis.UniversalClient, error) {
	client, err := b.store.Server(ctx, slotKey)
	if err != nil || !b.store.Cluster || b.sharded.Load() != nil {
		return client, err
	}
	// Several callers may ask at once.
	return client, b.learnKind(ctx, client)
}

// Sharded reports whether messages must be published by SPUBLISH instead of
// PUBLISH: on a cluster of Redis 7 or later. The first call asks the server that
// has slotKey. If that fails, Sharded returns false, and a message may be lost.
func (b *Subscriber) Sharded(ctx context.Context, slotKey string) bool {
	if b.store.Cluster && b.sharded.Load() == nil {
		_, _ = b.server(ctx, slotKey)
	}
	return b.isSharded()
}

// isSharded reports whether it is known that channels are in slots.
func (b *Subscriber) isSharded() bool {
	sharded := b.sharded.Load()
	return sharded != nil && *sharded
}

// learnKind asks the server once whether channels are in slots. All clients that publish
// and subscribe must agree. The command has no effect, because it lacks its arguments. A
// server finds that out before anything else, also while it loads its data.
func (b *Subscriber) learnKind(ctx context.Context, client redis.UniversalClient) error {
	within, end := b.store.Begin(ctx)
	_, err := resp.Do(within, client, []any{"spublish"})
	end()

	// Without a reply the kind stays unknown, and the next call asks again.
	if err != nil && !resp.IsReply(err) {
		return err
	}
	sharded := err == nil || !strings.Contains(err.Error(), "unknown command")
	// While a cluster is upgraded, two callers may learn different kinds. The first counts.
	b.sharded.CompareAndSwap(nil, &sharded)
	return nil
}
