// Package pubsub subscribes to channels of a Redis, over one connection to each server.
//
// A Subscriber has a channel for each name, and a link for each server that has channels. Each
// command is about only one channel, and the replies come in the order of the commands. Therefore
// the Subscriber knows the channel of each reply.
package pubsub

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// Config describes the store of a Subscriber.
type Config struct {
	// Server returns the server that has the slot of a key.
	Server func(ctx context.Context, slotKey string) (redis.UniversalClient, error)

	// Cluster reports whether the servers are a cluster, whose channels may be in slots.
	Cluster bool

	// Reload makes the store search for the server of each slot, and does not wait for the result.
	// It is nil without a cluster, because then channels cannot move to another server.
	Reload func()

	// Wrap adds the name of the store to an error.
	Wrap func(error) error
}

// Subscriber holds the subscriptions of a store. Many goroutines may use it at once.
type Subscriber struct {
	sharding
	open context.Context    // ends with the Subscriber
	end  context.CancelFunc // ends the context open
	wg   sync.WaitGroup     // all goroutines of the Subscriber

	// mu guards the fields below, and those of channels, links and Listeners. It is not
	// held while a Listener's function runs.
	mu       sync.Mutex
	channels map[string]*channel
	links    map[redis.UniversalClient]*link
	keeping  bool // the method keep runs
}

// New returns a Subscriber without connections.
func New(c Config) *Subscriber {
	b := &Subscriber{
		sharding: sharding{store: c},
		channels: map[string]*channel{},
		links:    map[redis.UniversalClient]*link{},
	}
	b.open, b.end = context.WithCancel(context.Background())
	return b
}

// Listen subscribes to a channel, which is in the cluster slot of slotKey, until the Listener is
// closed. It returns after the server has confirmed the subscription, so that the Listener receives
// all that is published afterwards. Listen returns an error if ctx ends, the server cannot be
// reached, or the server refuses the channel, for example with NOPERM.
//
// receive(payload, false) reports a message. receive("", true) reports that messages may have been
// missed, because the connection was lost and the subscription was just confirmed again. receive
// runs on the goroutine that reads the connection, and must not block. It may run before Listen
// returns. It may also run once after Close has returned, because Close does not wait for it.
func (b *Subscriber) Listen(ctx context.Context, channel, slotKey string,
	receive func(payload string, again bool)) (*Listener, error) {
	l, err := b.Subscribe(ctx, channel, slotKey, receive)
	if err != nil {
		l.Close()
		return nil, err
	}
	return l, nil
}

// Subscribe is Listen for a caller that can work without a subscription. Even after an error, the
// Listener retries until it is closed, and receive("", true) reports each confirmation.
func (b *Subscriber) Subscribe(ctx context.Context, channel, slotKey string,
	receive func(payload string, again bool)) (*Listener, error) {
	l := &Listener{receive: receive, sub: b, settled: make(chan error, 1)}
	b.join(ctx, l, channel, slotKey)
	var err error
	select {
	case err = <-l.settled:
	case <-ctx.Done():
		// If the server's answer has come at the same moment, it is in settled already, and is the
		// result.
		b.mu.Lock()
		l.settleLocked(ctx.Err())
		b.mu.Unlock()
		err = <-l.settled
	}

	if err != nil {
		err = b.store.Wrap(fmt.Errorf("channel %q: %w", channel, err))
	}
	return l, err
}

// join adds l to the channel with the name, and subscribes to the channel if it is new. If the
// channel's server is not found, the method keep goes on searching.
func (b *Subscriber) join(ctx context.Context, l *Listener, name, slotKey string) {
	// Do not hold mu here, because b.server may call a server. The error matters only if the
	// channel neither has a subscription nor waits for one.
	server, err := b.server(ctx, slotKey)

	b.mu.Lock()
	defer b.mu.Unlock()
	if b.open.Err() != nil {
		l.settleLocked(redis.ErrClosed)
		return
	}

	ch := b.channels[name]
	if ch == nil {
		ch = &channel{name: name, slotKey: slotKey}
		b.channels[name] = ch
	}

	l.ch = ch
	ch.listeners = append(ch.listeners, l)
	if !b.keeping {
		b.keeping = true
		b.wg.Go(b.keep)
	}

	switch {
	case ch.state == isConfirmed:
		l.settleLocked(nil)
	case ch.state == isPending && ch.link != nil: // the reply to the subscription will settle l
	case err != nil:
		l.settleLocked(err)
	default: // also after a refusal, because the user's rights may have changed
		b.placeLocked(ch, server)
	}
}

// Demoted replaces the connection to a server that has become a replica. On a cluster, the method
// keep then moves the channels to the servers that have their slots.
func (b *Subscriber) Demoted(server redis.UniversalClient) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if k := b.links[server]; k != nil {
		k.drop(errEnded)
	}
}

// Close ends all goroutines. It waits for them, but only for the time writeTimeout, because a
// client that the caller passed may not end a call when its context ends.
func (b *Subscriber) Close() {
	b.mu.Lock()
	b.end()
	for _, ch := range b.channels {
		ch.settleLocked(redis.ErrClosed)
	}
	b.mu.Unlock()

	// The context ends when all goroutines have ended, or after the timeout.
	wait, end := context.WithTimeout(context.Background(), writeTimeout)
	go func() {
		b.wg.Wait()
		end()
	}()
	<-wait.Done()
}

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
// no channels, and links that have ended. It returns the channels that are left. If there are none,
// it notes that the method keep ends, so that join starts it again.
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

// find moves ch to the server that now has the channel's slot, and subscribes again after a
// refusal. Without find, ch could stay at a server that has become a replica. A release learns from
// the reply of PUBLISH whether anybody listens, and that reply leaves out the subscribers of
// replicas.
func (b *Subscriber) find(ctx context.Context, ch *channel) {
	// Do not hold mu here, because b.server may call a server.
	server, err := b.server(ctx, ch.slotKey)

	b.mu.Lock()
	defer b.mu.Unlock()
	lost := ch.link == nil || ch.link.ctx.Err() != nil // ch has no connection
	switch {
	case b.open.Err() != nil: // the Subscriber is closed
	case err != nil && lost:
		// Calls of Listen return the error now. Listeners of Subscribe stay, and retry.
		ch.settleLocked(err)
	case err != nil: // the old subscription still works
	case lost || ch.link.server != server || ch.state == isRefused:
		b.placeLocked(ch, server)
		if lost {
			// Search again, because the store may have asked a server that did not know yet that
			// the slot has moved. Then ch is now at the old server. As a replica, that server
			// accepts the subscription, so no error would show the mistake.
			b.reload()
		}
	}
}

// placeLocked subscribes to ch on the link to the given server, and unsubscribes on the old link.
// If there is no link to the server, it starts one. If the link has just ended, the method keep
// finds another link.
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
	ch.state = isPending
	ch.link = k
	k.addLocked(command{"subscribe", ch})
}

// movedLocked records that the method keep must find the server of a channel again.
func (b *Subscriber) movedLocked(ch *channel) {
	ch.state = isPending
	ch.link = nil
	b.reload()
}

// reload makes the store search for the servers of the channels, and does not wait.
func (b *Subscriber) reload() {
	if b.store.Reload != nil {
		b.store.Reload()
	}
}
