// Package pubsub subscribes to channels of a Redis, over one connection to each
// server.
//
// A Subscriber has a channel for each name, a node for each server that has
// channels, and a link for each node that is connected.
package pubsub

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

// Config is what a Subscriber needs of its store.
type Config struct {
	// Server returns the client of the server that has the slot of a key.
	Server func(ctx context.Context, slotKey string) (redis.UniversalClient, error)

	// Cluster reports whether the servers are a cluster, whose channels may be in
	// slots.
	Cluster bool

	// Reload makes the store find out soon which server has which slot, or which server
	// is the master. It is nil if channels cannot move to another server.
	Reload func()

	// Begin returns the context for one call of a client, and a function that the
	// Subscriber calls when the call has returned.
	Begin func(context.Context) (within context.Context, end func())

	// Wrap adds the name of the store to an error.
	Wrap func(error) error
}

// Subscriber has the subscriptions of a store. It may be used by many goroutines
// at once.
type Subscriber struct {
	store Config
	kind  atomic.Int32       // kindPlain or kindSharded, once learnKind knows it
	open  context.Context    // ends with the Subscriber
	end   context.CancelFunc // ends open
	wg    sync.WaitGroup     // all goroutines of the Subscriber

	// mu guards the fields below, and those of channels, nodes, links and
	// Listeners. It is not held while a Listener's function runs.
	mu       sync.Mutex
	channels map[string]*channel
	nodes    map[redis.UniversalClient]*node
	lost     time.Time // when a connection or a slot was lost, the last time
	closed   bool
}

// Listener receives the messages of one channel.
type Listener struct {
	receive func(payload string, again bool)
	stays   bool // if listen returns an error, the Listener waits for a later subscription
	sub     *Subscriber
	ch      *channel // nil if the Subscriber was closed before, or no server was found

	settled chan struct{} // closed when err and up are decided
	err     error         // why there is no subscription
	up      bool          // settled without an error
	closed  atomic.Bool
}

// channel is a channel that has listeners, or had some a moment ago.
type channel struct {
	name, slotKey string
	listeners     []*Listener // no element changes, because the reader uses it without mu
	left          int         // how many Listeners have been closed since listeners was copied
	state         state
	node          *node     // nil while the server is not known
	idle          time.Time // since when there are no listeners
	alone         bool      // gets a command of its own, because the server refused one for several channels
	moves         int       // how often the server has changed since the last confirmation
}

// state is the state of a channel's subscription.
type state int

const (
	isPending   state = iota // the link has not taken it over yet
	isSent                   // SUBSCRIBE is in the queue of the link, or is sent
	isConfirmed              // the server has confirmed it
	isRefused                // the server has refused it
)

// New returns a Subscriber without connections.
func New(c Config) *Subscriber {
	b := &Subscriber{store: c, channels: map[string]*channel{}, nodes: map[redis.UniversalClient]*node{}}
	b.open, b.end = context.WithCancel(context.Background())
	return b
}

// Listen subscribes to a channel, which is in the cluster slot of slotKey, until
// the Listener is closed. It returns when the server has confirmed the
// subscription. So the Listener receives all that is published afterwards. Listen
// returns an error if ctx ends, the server cannot be reached, or the server refuses
// the channel, for example with NOPERM.
//
// receive(payload, false) reports a message. receive("", true) reports that messages
// may have been missed: the connection was lost, and the subscription has just been
// confirmed again. receive runs on the goroutine that reads the connection, and must
// not block. It may run before Listen returns. Close does not wait for receive, so it may
// run once more after Close has returned.
func (b *Subscriber) Listen(ctx context.Context, channel, slotKey string, receive func(payload string, again bool)) (*Listener, error) {
	l, err := b.listen(ctx, channel, slotKey, &Listener{receive: receive})
	if err != nil {
		l.Close()
		return nil, err
	}
	return l, nil
}

// Subscribe is Listen for a caller that can work without a subscription. If it
// returns an error, the Listener retries until it is closed, and receive("", true)
// reports each confirmation.
func (b *Subscriber) Subscribe(ctx context.Context, channel, slotKey string, receive func(payload string, again bool)) (*Listener, error) {
	return b.listen(ctx, channel, slotKey, &Listener{receive: receive, stays: true})
}

// listen adds l to its channel, and waits until the subscription is settled.
func (b *Subscriber) listen(ctx context.Context, channel, slotKey string, l *Listener) (*Listener, error) {
	l.sub, l.settled = b, make(chan struct{})
	err := b.join(ctx, l, channel, slotKey)
	if err == nil {
		select {
		case <-l.settled:
			err = l.err
		case <-ctx.Done():
			// The server may confirm or refuse at the same moment. Then leave
			// returns that result.
			err = l.leave(ctx.Err())
		}
	}

	if err != nil {
		err = b.store.Wrap(fmt.Errorf("channel %q: %w", channel, err))
	}
	return l, err
}

// leave settles l with err, unless the subscription has been confirmed or refused
// already. It returns why there is no subscription.
func (l *Listener) leave(err error) error {
	l.sub.mu.Lock()
	defer l.sub.mu.Unlock()
	if l.isOpenLocked() {
		l.settleLocked(err)
	}
	return l.err
}

// Command returns the command that publishes to the Listener, PUBLISH or
// SPUBLISH. It returns an empty string unless the subscription is confirmed, on
// a connection that is not known to be lost.
func (l *Listener) Command() string {
	l.sub.mu.Lock()
	defer l.sub.mu.Unlock()
	switch {
	case l.ch == nil || l.ch.state != isConfirmed:
		return ""
	case l.sub.kind.Load() == kindSharded:
		return "SPUBLISH"
	}
	return "PUBLISH"
}

// Close ends the Listener. The subscription stays for a moment after the last
// Listener, so that the next caller for the channel finds it confirmed.
func (l *Listener) Close() {
	if l.closed.Swap(true) {
		return
	}

	// closed is atomic, because deliver reads it without mu.
	l.sub.mu.Lock()
	defer l.sub.mu.Unlock()
	if l.ch != nil {
		l.ch.leftLocked()
	}
}

// Relisten replaces a connection on which messages do not arrive. When a subscription is
// confirmed again, its Listeners are called with again set to true. Relisten does nothing
// if the connection is younger than a second.
func (l *Listener) Relisten() {
	l.sub.mu.Lock()
	defer l.sub.mu.Unlock()
	if l.ch == nil || l.ch.node == nil {
		return
	}
	if c := l.ch.node.link; c != nil && time.Since(c.born) > youngFor {
		// The writer closes the connection. To close it here could block with mu
		// held, because PubSub locks itself for Close as for a write.
		c.dropped = true
		c.node.wakeWriter()
	}
}

// Close ends all subscriptions. It waits a moment for the goroutines. A client that
// the caller passed may not end a call with its context, so some may run on.
func (b *Subscriber) Close() {
	b.mu.Lock()
	b.closed = true
	b.end()
	for _, ch := range b.channels {
		ch.failLocked(redis.ErrClosed)
	}
	b.mu.Unlock()

	done := make(chan struct{})
	go func() {
		b.wg.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(writeTimeout):
	}
}

// join adds l to the channel of a name.
func (b *Subscriber) join(ctx context.Context, l *Listener, name, slotKey string) error {
	b.mu.Lock()
	defer b.mu.Unlock()

	err := b.addChannelLocked(ctx, name, slotKey, l.stays)
	ch := b.channels[name]
	switch {
	case b.closed:
		return redis.ErrClosed
	case ch == nil:
		return err
	}

	l.ch = ch
	ch.listeners = append(ch.listeners, l) // after the elements that a reader may use
	switch {
	case err != nil:
		l.settleLocked(err)
	case ch.state == isConfirmed:
		l.settleLocked(nil)
	case ch.state == isRefused: // the user's rights may have changed
		ch.node.addLocked(ch)
	}
	return err
}

// addChannelLocked adds the channel of a name, if it is not there. It unlocks mu for a
// while. If the server of the channel is not found, addChannelLocked returns an error.
// If stays is true, it then adds the channel nevertheless, and searches on.
func (b *Subscriber) addChannelLocked(ctx context.Context, name, slotKey string, stays bool) error {
	if b.channels[name] != nil || b.closed {
		return nil
	}

	// Finding the server may need a call, so not with mu held. Meanwhile another
	// caller may have added the channel, or closed the Subscriber: then an error of
	// this search does not matter.
	b.mu.Unlock()
	client, err := b.server(ctx, slotKey)
	b.mu.Lock()
	if b.channels[name] != nil || b.closed {
		return nil
	}

	ch := &channel{name: name, slotKey: slotKey}
	switch {
	case err == nil:
		b.channels[name] = ch
		b.placeLocked(ch, client)
	case stays:
		b.channels[name] = ch
		b.wg.Go(func() { b.findServers([]*channel{ch}, 0) })
	}
	return err
}

// placeLocked has the node of client subscribe to ch.
func (b *Subscriber) placeLocked(ch *channel, client redis.UniversalClient) {
	n := b.nodes[client]
	if n == nil {
		n = &node{b: b, client: client, wake: make(chan struct{}, 1)}
		b.nodes[client] = n
		b.wg.Go(n.run)
	}

	ch.node = n
	n.addLocked(ch)
}

// settleLocked decides the result of Listen.
func (l *Listener) settleLocked(err error) {
	l.err, l.up = err, err == nil
	close(l.settled)
}

// isOpenLocked reports whether the result of Listen is not decided yet.
func (l *Listener) isOpenLocked() bool { return !l.up && l.err == nil }

// leftLocked counts a Listener that was closed. It removes closed Listeners when they
// may be half of all, so thousands that come and go cost little each. Until then deliver
// passes over them.
func (ch *channel) leftLocked() {
	ch.left++
	if 2*ch.left < len(ch.listeners) {
		return
	}

	// The reader may use the old slice. Another Close may have set closed and wait for
	// mu. Its Listener is removed here and still counted later, so the next copy may come
	// a little early.
	var rest []*Listener
	for _, l := range ch.listeners {
		if !l.closed.Load() {
			rest = append(rest, l)
		}
	}
	ch.listeners, ch.left = rest, 0
	if len(rest) == 0 {
		ch.idle = time.Now()
	}
}

// failLocked ends the calls of Listen that wait for ch. They return err.
func (ch *channel) failLocked(err error) {
	// leftLocked replaces the slice instead of changing it, so the loop may call it.
	for _, l := range ch.listeners {
		if l.isOpenLocked() {
			l.settleLocked(err)
			if !l.stays && !l.closed.Swap(true) {
				ch.leftLocked()
			}
		}
	}
}

// confirmLocked ends the calls of Listen that wait for ch. It returns the other
// Listeners, which may have missed messages.
func (ch *channel) confirmLocked() (again []*Listener) {
	ch.state, ch.alone, ch.moves = isConfirmed, false, 0

	for _, l := range ch.listeners {
		if l.isOpenLocked() {
			l.settleLocked(nil)
		} else {
			again = append(again, l)
		}
	}
	return again
}

// deliver calls the functions of listeners. The caller does not hold mu.
func deliver(listeners []*Listener, payload string, again bool) {
	for _, l := range listeners {
		// A Listener may have been closed since listeners was read.
		if !l.closed.Load() {
			l.receive(payload, again)
		}
	}
}
