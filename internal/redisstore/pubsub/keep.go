package pubsub

import (
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/redisstore/resp"
)

// lingering is how long a channel without listeners is kept.
const lingering = time.Second

// The method keep moves each channel, once a second, to the server that now has the channel's slot,
// until there are no channels. Once a second is enough, because waiters poll anyway, and more
// searches would burden a server that cannot be used.
func (b *Subscriber) keep() {
	ticker := time.NewTicker(tickEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
		case <-b.open.Done():
			return
		}

		chs := b.removeUnused()
		if len(chs) == 0 {
			return
		}

		ctx, cancel := context.WithTimeout(b.open, connectTimeout)
		for _, ch := range chs {
			b.find(ctx, ch)
		}
		cancel()
	}
}

// removeUnused removes channels that have had no listeners for the time lingering, links that have
// no channels, and links that have ended. It returns the channels that are left. If no channel is
// left, the method keep ends.
func (b *Subscriber) removeUnused() []*channel {
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
	for server, k := range b.links {
		if !used[k] || k.ctx.Err() != nil {
			k.drop(errEnded)
			delete(b.links, server) // so that a channel that is added later starts a new link
		}
	}

	b.keeping = len(b.channels) > 0
	return slices.Collect(maps.Values(b.channels))
}

// find moves ch to the server that now has the channel's slot. Otherwise, ch could stay at a server
// that has become a replica. A PUBLISH on the master does not count a replica's subscribers.
func (b *Subscriber) find(ctx context.Context, ch *channel) {
	// Do not hold mu here, because b.server may call a server.
	server, err := b.server(ctx, ch.slotKey)

	b.mu.Lock()
	defer b.mu.Unlock()
	lost := ch.link == nil || ch.link.ctx.Err() != nil
	switch {
	case b.open.Err() != nil:
	case err != nil && lost:
		// Calls of Listen return the error now. Listeners of Subscribe stay, and retry.
		ch.settleLocked(err)
	case err != nil:
	case lost || ch.link.server != server || ch.state == isRefused:
		b.placeLocked(ch, server)
		if lost {
			// Search again, because the store may have asked a server that did not know yet that
			// the slot has moved. If ch is now at the old server, which is a replica, that server
			// confirms the subscription, so nothing else would show the mistake.
			b.reload()
		}
	}
}

// placeLocked subscribes to ch on the link to the given server. If that link has just ended, the
// method keep finds another link.
func (b *Subscriber) placeLocked(ch *channel, server redis.UniversalClient) {
	k := b.links[server]
	if k == nil {
		k = &link{b: b, server: server, wake: make(chan struct{}, 1)}
		k.ctx, k.drop = context.WithCancelCause(b.open)
		b.links[server] = k
		b.wg.Go(k.run)
	}
	if ch.link != nil && ch.link != k {
		ch.link.addLocked(command{"unsubscribe", ch})
	}
	ch.state, ch.link = isPending, k
	k.addLocked(command{"subscribe", ch})
}

// movedLocked records that the method keep must find the server of a channel again.
func (b *Subscriber) movedLocked(ch *channel) {
	ch.state, ch.link = isPending, nil
	b.reload()
}

// reload makes the store search for the servers of the channels, and does not wait.
func (b *Subscriber) reload() {
	if b.store.Reload != nil {
		b.store.Reload()
	}
}

// server returns the server that has the slot of slotKey. Scripts publish on that server. On a
// cluster, it also asks that server whether channels are in slots. It stores the first answer for
// all later calls, because publishers and subscribers must agree.
func (b *Subscriber) server(ctx context.Context, slotKey string) (redis.UniversalClient, error) {
	server, err := b.store.Server(ctx, slotKey)
	if err != nil || !b.store.Cluster || b.sharded.Load() != nil {
		return server, err
	}

	// The command lacks its arguments, so it has no effect, and even a server that loads its data
	// answers it. If there is no reply, b.sharded stays nil, and the next call asks again.
	err = server.Do(ctx, "spublish").Err()
	if err != nil && !resp.IsReply(err) {
		return server, err
	}
	sharded := err == nil || !strings.Contains(err.Error(), "unknown command")
	// Store only the first answer, because later answers may differ while a cluster is upgraded.
	b.sharded.CompareAndSwap(nil, &sharded)
	return server, nil
}

// Sharded reports whether messages must be published by SPUBLISH instead of PUBLISH, as on a
// cluster of Redis 7 or later. The first call asks the server that has the slot of slotKey. If that
// fails, Sharded returns false, and a message may be lost.
func (b *Subscriber) Sharded(ctx context.Context, slotKey string) bool {
	if b.store.Cluster && b.sharded.Load() == nil {
		_, _ = b.server(ctx, slotKey) // if this fails, isSharded reports false
	}
	return b.isSharded()
}

// isSharded reports whether it is known that channels are in slots.
func (b *Subscriber) isSharded() bool { s := b.sharded.Load(); return s != nil && *s }
