// Package pubsub subscribes to channels of a Redis, over one connection to each server.
//
// A Subscriber has a channel for each name, and a link for each server that has channels. Each
// command is about only one channel, and the replies come in the order of the commands. Therefore
// the Subscriber knows the channel of each reply.
package pubsub

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

// Config describes the store of a Subscriber.
type Config struct {
	// Server returns the server that has the slot of a key.
	Server func(ctx context.Context, slotKey string) (redis.UniversalClient, error)

	// Cluster reports whether the servers are a cluster, whose channels may be in slots.
	Cluster bool

	// Reload makes the store search for the server of each slot, or for the master, and does not
	// wait for the result. It is nil if channels cannot move to another server.
	Reload func()

	// Wrap adds the name of the store to an error.
	Wrap func(error) error
}

// Subscriber holds the subscriptions of a store. Many goroutines may use it at once.
type Subscriber struct {
	store Config
	open  context.Context    // ends with the Subscriber
	end   context.CancelFunc // ends the context open
	wg    sync.WaitGroup     // all goroutines of the Subscriber

	sharded atomic.Pointer[bool] // whether channels are in slots; nil until it is known

	// mu guards the fields below, and those of channels, links and Listeners. It is not
	// held while a Listener's function runs.
	mu       sync.Mutex
	channels map[string]*channel
	links    map[redis.UniversalClient]*link
	keeping  bool // the method keep runs
}

// Listener receives the messages of one channel.
type Listener struct {
	receive func(payload string, again bool)
	sub     *Subscriber
	ch      *channel // nil if the Subscriber was already closed

	settled chan error  // receives the result of Subscribe; has room for one result
	done    bool        // settled has received the result
	closed  atomic.Bool // deliver reads it without mu
}

// channel describes a channel that has listeners, or whose last listener was closed a moment ago.
type channel struct {
	name, slotKey string
	listeners     []*Listener
	state         state
	link          *link     // nil while the server is not known
	idle          time.Time // when the last listener was closed
}

// state is the state of a channel's subscription.
type state int

const (
	isPending   state = iota // the server has not answered yet
	isConfirmed              // the server has confirmed it
	isRefused                // the server has refused it
)

// New returns a Subscriber without connections.
func New(c Config) *Subscriber {
	b := &Subscriber{store: c, channels: map[string]*channel{}, links: map[redis.UniversalClient]*link{}}
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
func (b *Subscriber) Listen(ctx context.Context, channel, slotKey string, receive func(payload string, again bool)) (*Listener, error) {
	l, err := b.Subscribe(ctx, channel, slotKey, receive)
	if err != nil {
		l.Close()
		return nil, err
	}
	return l, nil
}

// Subscribe is Listen for a caller that can work without a subscription. Even after an error, the
// Listener retries until it is closed, and receive("", true) reports each confirmation.
func (b *Subscriber) Subscribe(ctx context.Context, channel, slotKey string, receive func(payload string, again bool)) (*Listener, error) {
	l := &Listener{receive: receive, sub: b, settled: make(chan error, 1)}
	b.join(ctx, l, channel, slotKey)
	var err error
	select {
	case err = <-l.settled:
	case <-ctx.Done():
		// If the server's answer has come at the same moment, that answer is the result.
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

// Command returns the command that publishes to the Listener, PUBLISH or SPUBLISH. If the
// subscription is not confirmed, or its connection is known to be lost, Command returns "".
func (l *Listener) Command() string {
	l.sub.mu.Lock()
	defer l.sub.mu.Unlock()
	switch {
	case l.ch == nil || l.ch.state != isConfirmed:
		return ""
	case l.sub.isSharded():
		return "SPUBLISH"
	}
	return "PUBLISH"
}

// Close ends the Listener. After the last Listener is closed, the subscription stays for a moment,
// so that the next Listener finds it confirmed.
func (l *Listener) Close() {
	if l.closed.Swap(true) {
		return
	}

	l.sub.mu.Lock()
	defer l.sub.mu.Unlock()
	if l.ch != nil {
		i := slices.Index(l.ch.listeners, l)
		l.ch.listeners = slices.Delete(l.ch.listeners, i, i+1)
		l.ch.idle = time.Now() // matters if this was the last listener
	}
}

// Relisten replaces a connection on which messages do not arrive. When a subscription is confirmed
// again, its Listeners are called with again set to true.
func (l *Listener) Relisten() {
	l.sub.mu.Lock()
	defer l.sub.mu.Unlock()
	if l.ch != nil && l.ch.link != nil {
		l.ch.link.drop(errEnded)
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

// Close ends all goroutines. It waits for them, but at most a second, because a client that the
// caller passed may not end a call when its context ends.
func (b *Subscriber) Close() {
	b.mu.Lock()
	b.end()
	for _, ch := range b.channels {
		ch.settleLocked(redis.ErrClosed)
	}
	b.mu.Unlock()

	done, end := context.WithTimeout(context.Background(), writeTimeout)
	go func() { b.wg.Wait(); end() }()
	<-done.Done()
}

// join adds l to the channel with the name, and subscribes to the channel if it is new. If the
// channel's server is not found, the method keep goes on searching.
func (b *Subscriber) join(ctx context.Context, l *Listener, name, slotKey string) {
	// Do not hold mu here, because b.server may call a server. Ignore an error if the channel
	// already has a subscription, or waits for one.
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
	case ch.state == isPending && ch.link != nil: // the reply will settle l
	case err != nil:
		l.settleLocked(err)
	default: // also after a refusal, because the user's rights may have changed
		b.placeLocked(ch, server)
	}
}

// settleLocked decides the result of Listen, unless it is decided already.
func (l *Listener) settleLocked(err error) {
	if !l.done {
		l.done = true
		l.settled <- err
	}
}

// settleLocked lets the calls of Listen that wait for ch return err. It returns the Listeners whose
// results were decided before.
func (ch *channel) settleLocked(err error) (others []*Listener) {
	for _, l := range ch.listeners {
		if l.done {
			others = append(others, l)
		}
		l.settleLocked(err)
	}
	return others
}

// deliver calls the functions of the given Listeners. The caller must not hold mu.
func deliver(listeners []*Listener, payload string, again bool) {
	for _, l := range listeners {
		// Skip a Listener that was closed after the slice listeners was made.
		if !l.closed.Load() {
			l.receive(payload, again)
		}
	}
}
