package pubsub

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/redisstore/resp"
)

// home is the client of the server where the keys of slotKey's slot are, and
// where scripts publish.
func (b *Subscriber) home(ctx context.Context, slotKey string) (redis.UniversalClient, error) {
	switch rdb := b.store.Client.(type) {
	case *redis.ClusterClient:
		if err := b.learn(ctx, slotKey); err != nil {
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
		return nil, err // and not a nil *redis.Client, which is no nil interface
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

// Sharded reports whether messages are to be published with SPUBLISH rather
// than PUBLISH: on a cluster of Redis 7 or later. The first call asks the server
// that has slotKey, which the caller needs anyway; if that fails, the answer is
// no, which costs a message.
func (b *Subscriber) Sharded(ctx context.Context, slotKey string) bool {
	if b.cluster() {
		_ = b.learn(ctx, slotKey)
	}
	return b.kind.Load() == kindSharded
}

// What learn finds out.
const (
	unlearned int32 = iota
	kindPlain
	kindSharded
)

// learn finds out, once, whether this is a cluster whose channels live in
// slots. All who publish and listen must come to the same answer, so it is
// the server's: a client made for clusters may be used without one. The
// commands do nothing.
func (b *Subscriber) learn(ctx context.Context, slotKey string) error {
	if b.kind.Load() != unlearned {
		return nil
	}
	client, err := master(ctx, b.store.Client.(*redis.ClusterClient), slotKey)
	if err != nil {
		return err
	}
	kind := kindSharded
	for _, q := range []struct {
		args []any
		no   string
	}{
		{[]any{"spublish"}, "unknown command"},
		{[]any{"cluster", "info"}, "cluster support disabled"},
	} {
		within, end := b.store.Begin(ctx)
		cmd := resp.NewCommand(within, q.args)
		resp.Process(within, client, cmd)
		end()
		err := cmd.Err()
		if err != nil && !resp.IsReply(err) {
			return err
		}
		if err != nil && strings.Contains(err.Error(), q.no) {
			kind = kindPlain
		}
	}
	b.kind.Store(kind)
	return nil
}

// cluster reports whether channels have a slot, which moves.
func (b *Subscriber) cluster() bool {
	_, ok := b.store.Client.(*redis.ClusterClient)
	return ok
}

// move looks for the node of chs, which are not at n any more. mu is held.
func (b *Subscriber) move(n *node, chs []*channel) {
	chs = slices.DeleteFunc(slices.Clone(chs), func(ch *channel) bool { return ch.node != n })
	if b.closed || len(chs) == 0 {
		return
	}
	for _, ch := range chs {
		ch.state, ch.node = isPending, nil
		ch.moves++
	}
	b.lost = time.Now()
	wait := backoff(chs[0].moves)
	b.wg.Go(func() { b.look(chs, wait) })
}

// look places chs as soon as the cluster says where they are.
func (b *Subscriber) look(chs []*channel, wait time.Duration) {
	for try := 0; len(chs) > 0; try++ {
		b.store.Reload(b.life)
		select {
		case <-time.After(wait + backoff(try)):
		case <-b.life.Done():
			return
		}
		var left []*channel
		for _, ch := range chs {
			if !b.settleDown(ch) {
				left = append(left, ch)
			}
		}
		chs = left
	}
}

// settleDown looks for the node of ch once, and reports whether that is done
// with.
func (b *Subscriber) settleDown(ch *channel) bool {
	ctx, cancel := context.WithTimeout(b.life, connectTimeout)
	defer cancel()
	client, err := b.home(ctx, ch.slotKey)
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed || ch.node != nil || b.channels[ch.name] != ch {
		return true
	}
	if err != nil {
		ch.fail(err)
	}
	switch {
	case len(ch.listeners) == 0:
		delete(b.channels, ch.name)
		return true
	case err != nil:
		return false
	}
	b.place(ch, client)
	return true
}

// doubtFor is how long the word of the cluster is not trusted after a slot or
// a node was lost: its nodes hear of it one after another.
const doubtFor = 5 * time.Second

// Demoted drops the connection to a server that has become a replica, now or
// when it is a second old: the replies to other commands in flight say the
// same. On a cluster rehome follows the slots.
func (b *Subscriber) Demoted(client redis.UniversalClient) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if n := b.nodes[client]; n != nil && n.link != nil {
		n.link.demoted = true
		n.kick()
	}
}

// rehome places the channels of n that the cluster says are elsewhere, and
// returns them. A node that has become a replica may have accepted them, and
// hears what is published, but those who publish count it out.
func (b *Subscriber) rehome(n *node) (gone []*channel) {
	if !b.cluster() {
		return nil
	}
	b.mu.Lock()
	chs, doubt := n.channels(), time.Since(b.lost) < doubtFor
	b.mu.Unlock()
	if doubt {
		b.store.Reload(b.life)
	}
	ctx, cancel := context.WithTimeout(b.life, connectTimeout)
	defer cancel()
	for _, ch := range chs {
		client, err := b.home(ctx, ch.slotKey)
		if err != nil {
			break // they stay
		}
		if client == n.client {
			continue
		}
		b.mu.Lock()
		if b.channels[ch.name] == ch && ch.node == n && !b.closed {
			gone = append(gone, ch)
			b.place(ch, client)
		}
		b.mu.Unlock()
	}
	return gone
}
