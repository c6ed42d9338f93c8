// Package pubsub subscribes to channels of a Redis, on one connection to each
// server.
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

// Config is what a Subscriber knows of its store.
type Config struct {
	Client redis.UniversalClient                                      // of all of it
	Begin  func(context.Context) (within context.Context, end func()) // a call of the client
	Reload func(context.Context)                                      // asks a cluster again, soon, who has which slot
	Wrap   func(error) error                                          // has an error name the store
}

// Listener hears the messages of one channel.
type Listener struct {
	heard func(payload string, again bool)
	stays bool // also if there is no subscription now
	sub   *Subscriber
	ch    *channel // nil if the subscriber was closed before

	settled chan struct{} // closed when err and up are decided
	err     error         // why there is no subscription; sub.mu
	up      bool          // the subscription was confirmed once; sub.mu
	closed  atomic.Bool
}

// Listen has heard called for every message on channel, which lies in the
// cluster slot of slotKey, until the Listener is closed. It returns when the
// server has confirmed the subscription, so that whatever is published
// afterwards is heard, and with an error when ctx has ended, the server cannot
// be reached or refuses the channel, as it does with NOPERM.
//
// heard(payload, false) is a message. heard("", true) says that messages may
// have been missed: the connection was lost, and the subscription has just
// been confirmed again. heard runs on the goroutine that reads the
// connection, and must not block; it may run before Listen has returned and,
// once more, while Close does.
//
// All channels of a Store share one connection to each server.
func (b *Subscriber) Listen(ctx context.Context, channel, slotKey string, heard func(payload string, again bool)) (*Listener, error) {
	l, err := b.listen(ctx, channel, slotKey, &Listener{heard: heard})
	if err != nil {
		l.Close()
		return nil, err
	}
	return l, nil
}

// Subscribe is Listen for a caller that can work without a subscription. If it
// returns an error, the Listener retries until it is closed, and heard("", true)
// reports each confirmation.
func (b *Subscriber) Subscribe(ctx context.Context, channel, slotKey string, heard func(payload string, again bool)) (*Listener, error) {
	return b.listen(ctx, channel, slotKey, &Listener{heard: heard, stays: true})
}

func (b *Subscriber) listen(ctx context.Context, channel, slotKey string, l *Listener) (*Listener, error) {
	l.sub, l.settled = b, make(chan struct{})
	err := l.sub.join(ctx, l, channel, slotKey)
	if err == nil {
		select {
		case <-l.settled:
			err = l.err
		case <-ctx.Done():
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
	if l.waits() {
		l.settle(err)
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

// Close ends the Listener. The subscription outlasts the last Listener by a
// moment, so that whoever comes back to the channel finds it confirmed.
func (l *Listener) Close() {
	if l.closed.Swap(true) {
		return
	}
	l.sub.mu.Lock()
	defer l.sub.mu.Unlock()
	if l.ch != nil {
		l.ch.remove(l)
	}
}

// Relisten replaces a connection on which messages do not arrive. Each Listener on
// it is called once its subscription is confirmed again. Relisten does nothing if
// the connection is younger than a second.
func (l *Listener) Relisten() {
	l.sub.mu.Lock()
	defer l.sub.mu.Unlock()
	if l.ch == nil || l.ch.node == nil {
		return
	}
	if c := l.ch.node.link; c != nil && time.Since(c.born) > youngFor {
		c.dropped = true
		c.node.kick()
	}
}

// Subscriber keeps the subscriptions of a Store, on one connection to each
// node.
type Subscriber struct {
	store Config
	life  context.Context // ends with the Store
	end   context.CancelFunc
	wg    sync.WaitGroup
	kind  atomic.Int32 // what learn has found out

	// mu guards all below, and what is in channels, nodes and links. It is
	// not held while heard runs.
	mu       sync.Mutex
	channels map[string]*channel
	nodes    map[redis.UniversalClient]*node
	lost     time.Time // when a connection was lost, or a slot, the last time
	closed   bool
}

// channel is a channel that somebody listens to, or did a moment ago.
type channel struct {
	name, slotKey string
	listeners     []*Listener // never changed in place: the reader goes through it without the lock
	state         state
	node          *node     // nil while it is looked for
	idle          time.Time // since when there are no listeners
	alone         bool      // is subscribed to by a command of its own, to see which one is refused
	moves         int       // how often it was looked for since it was last confirmed
}

type state int

const (
	isPending   state = iota // SUBSCRIBE is to be sent
	isSent                   // and was
	isConfirmed              // and was confirmed
	isRefused                // or not
)

// New returns a Subscriber that has no connection yet.
func New(c Config) *Subscriber {
	b := &Subscriber{store: c, channels: map[string]*channel{}, nodes: map[redis.UniversalClient]*node{}}
	b.life, b.end = context.WithCancel(context.Background())
	return b
}

// Close ends all listening. What it leaves is what a client that was handed
// in does not interrupt.
func (b *Subscriber) Close() {
	b.mu.Lock()
	b.closed = true
	b.end()
	for _, ch := range b.channels {
		ch.fail(redis.ErrClosed)
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

// join adds l to the channel of that name.
func (b *Subscriber) join(ctx context.Context, l *Listener, name, slotKey string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	var err error
	if b.channels[name] == nil && !b.closed {
		b.mu.Unlock()
		var client redis.UniversalClient
		client, err = b.home(ctx, slotKey)
		b.mu.Lock()
		switch {
		case b.channels[name] != nil || b.closed:
			err = nil // another one was quicker
		case err == nil:
			ch := &channel{name: name, slotKey: slotKey}
			b.channels[name] = ch
			b.place(ch, client)
		case l.stays:
			ch := &channel{name: name, slotKey: slotKey}
			b.channels[name] = ch
			b.wg.Go(func() { b.look([]*channel{ch}, 0) })
		default:
			return err
		}
	}
	if b.closed {
		return redis.ErrClosed
	}
	ch := b.channels[name]
	l.ch = ch
	ch.listeners = append(slices.Clip(ch.listeners), l)
	if err != nil {
		l.settle(err)
		return err
	}
	switch ch.state {
	case isConfirmed:
		l.settle(nil)
	case isRefused:
		ch.node.add(ch)
	}
	return nil
}

// place has the node of client subscribe to ch.
func (b *Subscriber) place(ch *channel, client redis.UniversalClient) {
	n := b.nodes[client]
	if n == nil {
		n = &node{b: b, client: client, wake: make(chan struct{}, 1)}
		b.nodes[client] = n
		b.wg.Go(n.run)
	}
	ch.node = n
	n.add(ch)
}

// settle tells Listen how it ended.
func (l *Listener) settle(err error) {
	l.err, l.up = err, err == nil
	close(l.settled)
}

// waits reports whether Listen has not returned yet.
func (l *Listener) waits() bool { return !l.up && l.err == nil }

func (ch *channel) remove(l *Listener) {
	i := slices.Index(ch.listeners, l)
	if i < 0 {
		return
	}
	ch.listeners = slices.Concat(ch.listeners[:i], ch.listeners[i+1:])
	if len(ch.listeners) == 0 {
		ch.idle = time.Now()
	}
}

// fail ends the Listens that wait for ch.
func (ch *channel) fail(err error) {
	for _, l := range ch.listeners {
		if l.waits() {
			l.settle(err)
			if !l.stays {
				ch.remove(l)
			}
		}
	}
}

// confirm ends the Listens that wait for ch, and returns who has to look
// again.
func (ch *channel) confirm() (again []*Listener) {
	ch.state, ch.alone, ch.moves = isConfirmed, false, 0
	for _, l := range ch.listeners {
		if l.waits() {
			l.settle(nil)
		} else {
			again = append(again, l)
		}
	}
	return again
}

// tell has listeners hear something.
func tell(listeners []*Listener, payload string, again bool) {
	for _, l := range listeners {
		if !l.closed.Load() {
			l.heard(payload, again)
		}
	}
}
