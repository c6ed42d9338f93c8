package pubsub

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/redisstore/resp"
)

// doubtFor is how long the cluster's answer is not trusted after a slot or a
// server was lost. The servers of a cluster learn of it one after another.
const doubtFor = 5 * time.Second

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

// learnKind asks the server once whether channels are in slots. The client's type does
// not say it: a cluster client may be used with a server that is in no cluster. All
// clients that publish and subscribe must agree. The commands have no effect.
func (b *Subscriber) learnKind(ctx context.Context, client redis.UniversalClient) error {
	sharded := true
	for _, q := range []struct {
		args    []any
		isPlain string // the reply if channels are not in slots
	}{
		{[]any{"spublish"}, "unknown command"},
		{[]any{"cluster", "info"}, "cluster support disabled"},
	} {
		within, end := b.store.Begin(ctx)
		_, err := resp.Do(within, client, q.args)
		end()

		// Without a reply the kind stays unknown, and the next call asks again. The same
		// applies to a reply that says nothing about the command.
		if err != nil && (!resp.IsReply(err) || willPass(err)) {
			return err
		}
		if err != nil && strings.Contains(err.Error(), q.isPlain) {
			sharded = false
		}
	}
	// While a cluster is upgraded, two callers may learn different kinds. The first counts.
	b.sharded.CompareAndSwap(nil, &sharded)
	return nil
}

// willPass reports whether a server replies err to any command for a while.
func willPass(err error) bool {
	return slices.ContainsFunc([]string{"LOADING", "BUSY", "MASTERDOWN", "CLUSTERDOWN", "NOAUTH"}, func(word string) bool {
		return redis.HasErrorPrefix(err, word)
	})
}

// moveLocked finds the new server of channels that are not at n any more.
func (b *Subscriber) moveLocked(n *node, chs []*channel) {
	// An earlier reply may have moved some of them already.
	chs = slices.DeleteFunc(slices.Clone(chs), func(ch *channel) bool { return ch.node != n })
	if b.closed || len(chs) == 0 {
		return
	}

	for _, ch := range chs {
		ch.state, ch.node = isPending, nil
	}
	b.lost = time.Now()
	b.wg.Go(func() { b.findServers(chs) })
}

// findServers places channels as soon as the store knows their servers.
func (b *Subscriber) findServers(chs []*channel) {
	for try := 4; len(chs) > 0; try++ {
		// Reload is not nil here: without it Server does not fail, and channels do not
		// move. It works in the background, and the pause gives it time. If servers
		// disagree about a slot, a channel moves back and forth, but not often.
		b.store.Reload()
		select {
		case <-time.After(backoff(try)):
		case <-b.open.Done():
			return
		}

		ctx, cancel := context.WithTimeout(b.open, connectTimeout)
		chs = slices.DeleteFunc(chs, func(ch *channel) bool {
			_, err := b.findServer(ctx, ch, nil)
			return err == nil
		})
		cancel()
	}
}

// findServer moves ch from n to the server that has its slot now. n is nil if ch is at no
// server. findServer reports false if ch is not at n any more, or already at that server.
func (b *Subscriber) findServer(ctx context.Context, ch *channel, n *node) (moved bool, err error) {
	// mu is not held while the server is found, because that may need a call.
	client, err := b.server(ctx, ch.slotKey)

	b.mu.Lock()
	defer b.mu.Unlock()

	// Meanwhile the channel may have been placed, removed, or replaced by one with its
	// name.
	if b.closed || ch.node != n || b.channels[ch.name] != ch {
		return false, nil
	}
	if n == nil && err != nil {
		// Calls of Listen return now. A Listener that stays waits for the next try.
		ch.failLocked(err)
	}

	switch {
	case n == nil && len(ch.listeners) == 0:
		delete(b.channels, ch.name)
		return false, nil
	case err != nil:
		return false, err
	case n != nil && client == n.client:
		return false, nil
	}
	b.placeLocked(ch, client)
	return true, nil
}

// Demoted closes the connection to a server that has become a replica, but not before
// the connection is a second old. All commands in flight get the same reply. Without the
// delay, each of them would close the connection that was just made. On a cluster, rehome
// follows the slots.
func (b *Subscriber) Demoted(client redis.UniversalClient) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if n := b.nodes[client]; n != nil && n.link != nil {
		n.link.dropped = true
		n.wakeWriter()
	}
}

// rehome moves the channels of n that are at another server now, and returns them. A
// server that has become a replica may still confirm subscriptions and pass on messages.
// But PUBLISH on the master does not count its subscribers.
func (b *Subscriber) rehome(n *node) (gone []*channel) {
	if b.store.Reload == nil {
		return nil
	}
	b.mu.Lock()
	chs, doubt := n.channelsLocked(), time.Since(b.lost) < doubtFor
	b.mu.Unlock()
	if doubt {
		b.store.Reload()
	}

	ctx, cancel := context.WithTimeout(b.open, connectTimeout)
	defer cancel()
	for _, ch := range chs {
		moved, err := b.findServer(ctx, ch, n)
		if err != nil {
			break // the others stay
		}
		if moved {
			gone = append(gone, ch)
		}
	}
	return gone
}
