package pubsub

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/redisstore/resp"
)

const (
	pingEvery      = time.Second      // how often the server must answer something
	deadAfter      = 3 * time.Second  // a connection is dead if the server answers nothing for that long
	writeTimeout   = time.Second      // or if a write takes longer
	connectTimeout = 5 * time.Second  // the most that it takes to connect
	lingering      = time.Second      // how long a channel without listeners is kept
	idleAfter      = 10 * time.Second // how long a node without channels and connection is kept
	youngFor       = time.Second      // a connection that ends earlier counts as a failed one
)

// backoff returns how long to wait before the next try, after n failed ones.
func backoff(n int) time.Duration {
	d := min(10*time.Millisecond<<min(n, 10), time.Second)
	return d/2 + rand.N(d/2)
}

// node is a server that has channels.
type node struct {
	b      *Subscriber
	client redis.UniversalClient
	wake   chan struct{} // the writer has something to do

	// b.mu guards these.
	pending []*channel // to subscribe to; some may be removed or elsewhere by now
	link    *link      // nil while there is no connection
}

// addLocked has the node subscribe to ch.
func (n *node) addLocked(ch *channel) {
	ch.state = isPending
	n.pending = append(n.pending, ch)
	n.wakeWriter()
}

// takeLocked returns some channels to subscribe to now, not more than most.
func (n *node) takeLocked(most int) (chs []*channel) {
	for len(n.pending) > 0 && len(chs) < most {
		ch := n.pending[0]
		n.pending = n.pending[1:]
		// Since it was added, the channel may have been removed, moved, or added
		// again.
		if n.b.channels[ch.name] == ch && ch.node == n && ch.state == isPending {
			ch.state = isSent
			chs = append(chs, ch)
		}
	}
	return chs
}

// wakeWriter wakes the goroutine that writes, if there is one.
func (n *node) wakeWriter() {
	select {
	case n.wake <- struct{}{}:
	// A signal waits already. The writer takes everything at once.
	default:
	}
}

// run keeps the node connected as long as it has channels. It is the goroutine that
// reads the connection and calls the Listeners' functions.
func (n *node) run() {
	for try := 0; ; try++ {
		c, err := n.connectAndRead()
		if c != nil && time.Since(c.born) > youngFor {
			try = 0
		}
		n.lost(c, err)

		select {
		case <-time.After(backoff(try)):
		case <-n.b.open.Done():
		}

		if !n.waitForChannels() {
			return
		}
	}
}

// connectAndRead makes a connection, and reads it until it ends.
func (n *node) connectAndRead() (*link, error) {
	ps := n.client.Subscribe(n.b.open)
	defer ps.Close()

	ctx, cancel := context.WithTimeout(n.b.open, connectTimeout)
	within, end := n.b.store.Begin(ctx)
	err := resp.Survive(func() error { return ps.Ping(within) }) // makes the connection
	end()
	cancel()
	if err != nil {
		return nil, err
	}

	// The reply to the Ping is not read yet, so it is the first that read expects.
	c := &link{node: n, ps: ps, born: time.Now(), expect: []command{{name: "ping"}}, over: make(chan struct{})}
	n.b.mu.Lock()
	n.link = c
	n.wakeWriter()
	n.b.mu.Unlock()

	written := make(chan struct{})
	go func() {
		c.write()
		close(written)
	}()

	err = c.read()

	// The writer ends at over, or when its write fails on the closed connection.
	close(c.over)
	ps.Close()
	<-written
	return c, err
}

// lost queues the channels of n for the next connection, after c has ended, and removes
// those without listeners. c is nil if there was no connection.
//
// A call of Listen that is in progress goes on with the next connection. It fails if the
// server has answered nothing on c, unless the store has closed n's client. The store
// closes the client if another server has taken n's place. Then rehome finds that server.
func (n *node) lost(c *link, err error) {
	b := n.b
	b.mu.Lock()
	defer b.mu.Unlock()

	// The pending channels are among those of the node, which are added again below.
	n.link, n.pending = nil, nil
	fails := (c == nil || !c.useful) && !(b.store.Reload != nil && errors.Is(err, redis.ErrClosed))
	for _, ch := range n.channelsLocked() {
		if fails {
			ch.failLocked(n.wrap(err))
		}
		if len(ch.listeners) == 0 {
			delete(b.channels, ch.name)
			continue
		}
		n.addLocked(ch)
		b.lost = time.Now()
	}
}

// waitForChannels waits until the node has channels. If it has none for idleAfter,
// waitForChannels removes the node and reports false.
func (n *node) waitForChannels() bool {
	b := n.b
	// Another server may have taken over the slots, or be the master now.
	b.rehome(n)
	for idle := false; ; {
		b.mu.Lock()
		// Check and remove with mu held: placeLocked either finds the node, and
		// this check finds its channel, or it makes a new node.
		some := len(n.channelsLocked()) > 0
		over := b.closed || idle && !some
		if over {
			delete(b.nodes, n.client)
		}
		b.mu.Unlock()
		if over || some {
			return !over
		}

		select {
		case <-n.wake:
		case <-time.After(idleAfter):
			idle = true
		case <-b.open.Done():
		}
	}
}

// channelsLocked returns the channels of the node.
func (n *node) channelsLocked() (chs []*channel) {
	for _, ch := range n.b.channels {
		if ch.node == n {
			chs = append(chs, ch)
		}
	}
	return chs
}

// wrap adds the address of the node to an error, if the store has several servers.
func (n *node) wrap(err error) error {
	if client, ok := n.client.(*redis.Client); ok && n.b.store.Reload != nil {
		return fmt.Errorf("%s: %w", client.Options().Addr, err)
	}
	return err
}
