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
	switch rdb := b.store.Client.(type) {
	case *redis.ClusterClient:
		if err := b.learnKind(ctx, slotKey); err != nil {
			return nil, err
		}
		return master(ctx, rdb, slotKey)
	case *redis.Ring:
		return shard(rdb, slotKey)
	}
	return b.store.Client, nil
}

func master(ctx context.Context, rdb *redis.ClusterClient, key string) (redis.UniversalClient, error) {
	client, err := rdb.MasterForKey(ctx, key)
	if err != nil {
		return nil, err // not client: a nil *redis.Client is no nil interface
	}
	return client, nil
}

func shard(rdb *redis.Ring, key string) (redis.UniversalClient, error) {
	client, err := rdb.GetShardClientForKey(key)
	if err != nil {
		return nil, err
	}
	return client, nil
}

// isCluster reports whether the channels are in slots, which can move.
func (b *Subscriber) isCluster() bool {
	_, ok := b.store.Client.(*redis.ClusterClient)
	return ok
}

// Sharded reports whether messages must be published by SPUBLISH instead of
// PUBLISH: on a cluster of Redis 7 or later. The first call asks the server that
// has slotKey. If that fails, Sharded returns false, and a message may be lost.
func (b *Subscriber) Sharded(ctx context.Context, slotKey string) bool {
	if b.isCluster() {
		_ = b.learnKind(ctx, slotKey)
	}
	return b.kind.Load() == kindSharded
}

// The kinds of a Subscriber.
const (
	kindUnknown int32 = iota
	kindPlain
	kindSharded
)

// learnKind queries once whether the channels are in slots. All clients that
// publish and subscribe must have the same answer, so it is the server's: a
// cluster client may also be used with a server that is in no cluster. The commands
// have no effect.
func (b *Subscriber) learnKind(ctx context.Context, slotKey string) error {
	if b.kind.Load() != kindUnknown {
		return nil
	}

	// Several callers may ask at once. They ask the same cluster, so the last one to
	// store the kind changes nothing.
	client, err := master(ctx, b.store.Client.(*redis.ClusterClient), slotKey)
	if err != nil {
		return err
	}

	kind := kindSharded
	for _, q := range []struct {
		args    []any
		isPlain string // the reply if channels are not in slots
	}{
		{[]any{"spublish"}, "unknown command"},
		{[]any{"cluster", "info"}, "cluster support disabled"},
	} {
		within, end := b.store.Begin(ctx)
		cmd := resp.NewCommand(within, q.args)
		resp.Process(within, client, cmd)
		end()

		err := cmd.Err()
		// Without a reply the kind stays unknown, and the next call asks again.
		if err != nil && !resp.IsReply(err) {
			return err
		}
		if err != nil && strings.Contains(err.Error(), q.isPlain) {
			kind = kindPlain
		}
	}
	b.kind.Store(kind)
	return nil
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
		ch.moves++
	}

	b.lost = time.Now()
	// If servers disagree about the slot, the channel moves back and forth, so the
	// pause grows with each move.
	wait := backoff(chs[0].moves)
	b.wg.Go(func() { b.findServers(chs, wait) })
}

// findServers places channels as soon as the cluster reports their servers.
func (b *Subscriber) findServers(chs []*channel, wait time.Duration) {
	for try := 0; len(chs) > 0; try++ {
		b.store.Reload(b.open)
		// The client reloads in the background, and the pause gives it time.
		select {
		case <-time.After(wait + backoff(try)):
		case <-b.open.Done():
			return
		}
		chs = slices.DeleteFunc(chs, b.findServer)
	}
}

// findServer tries once to place ch, and reports whether ch needs no further try.
func (b *Subscriber) findServer(ch *channel) (done bool) {
	ctx, cancel := context.WithTimeout(b.open, connectTimeout)
	defer cancel()
	client, err := b.server(ctx, ch.slotKey)

	b.mu.Lock()
	defer b.mu.Unlock()

	// Meanwhile the channel may have been placed, removed, or replaced by one with its
	// name.
	if b.closed || ch.node != nil || b.channels[ch.name] != ch {
		return true
	}
	if err != nil {
		// Calls of Listen return now. A Listener that stays waits for the next try.
		ch.failLocked(err)
	}

	switch {
	case len(ch.listeners) == 0:
		delete(b.channels, ch.name)
		return true
	case err != nil:
		return false
	}
	b.placeLocked(ch, client)
	return true
}

// Demoted closes the connection to a server that has become a replica. It waits
// until the connection is a second old, because other commands in flight get the
// same reply. On a cluster, rehome follows the slots.
func (b *Subscriber) Demoted(client redis.UniversalClient) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if n := b.nodes[client]; n != nil && n.link != nil {
		n.link.demoted = true
		n.wakeWriter()
	}
}

// rehome moves the channels of n that the cluster reports at another server, and
// returns them. A server that has become a replica may have confirmed them and
// pass on their messages, but publishers do not count its subscribers.
func (b *Subscriber) rehome(n *node) (gone []*channel) {
	if !b.isCluster() {
		return nil
	}
	b.mu.Lock()
	chs, doubt := n.channelsLocked(), time.Since(b.lost) < doubtFor
	b.mu.Unlock()
	if doubt {
		b.store.Reload(b.open)
	}

	// mu is not held while the server of a channel is found, because that may need a
	// call.
	ctx, cancel := context.WithTimeout(b.open, connectTimeout)
	defer cancel()
	for _, ch := range chs {
		client, err := b.server(ctx, ch.slotKey)
		if err != nil {
			break // the others stay
		}
		if client == n.client {
			continue
		}

		// Meanwhile the channel may have moved or been removed.
		b.mu.Lock()
		if b.channels[ch.name] == ch && ch.node == n && !b.closed {
			gone = append(gone, ch)
			b.placeLocked(ch, client)
		}
		b.mu.Unlock()
	}
	return gone
}
