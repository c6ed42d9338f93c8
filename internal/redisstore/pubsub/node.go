package pubsub

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/redisstore/resp"
)

const (
	pingEvery      = time.Second      // how often a PONG is demanded
	deadAfter      = 3 * time.Second  // a connection is dead if nothing arrives
	writeTimeout   = time.Second      // or nothing can be sent
	connectTimeout = 5 * time.Second  // bounds the making of one
	lingering      = time.Second      // a channel is kept subscribed without listeners
	idleAfter      = 10 * time.Second // a connection is kept without channels
	youngFor       = time.Second      // a connection that ended earlier counts as a failure
)

// backoff is how long to wait before try number n, from 0 on.
func backoff(n int) time.Duration {
	d := min(10*time.Millisecond<<min(n, 10), time.Second)
	return d/2 + rand.N(d/2)
}

// node is a server with channels.
type node struct {
	b      *Subscriber
	client redis.UniversalClient
	wake   chan struct{} // there is something for the writer to do

	// The rest is guarded by b.mu.
	pending []*channel // some of which may have been forgotten since
	link    *link      // nil without a connection
	busy    time.Time  // when it last had a channel
}

// add has ch subscribed to. mu is held.
func (n *node) add(ch *channel) {
	ch.state = isPending
	n.pending = append(n.pending, ch)
	n.kick()
}

// take returns the channels that are to be subscribed to. mu is held.
func (n *node) take() (chs []*channel) {
	for _, ch := range n.pending {
		if n.b.channels[ch.name] == ch && ch.node == n && ch.state == isPending {
			ch.state = isSent
			chs = append(chs, ch)
		}
	}
	n.pending = nil
	return chs
}

func (n *node) kick() {
	select {
	case n.wake <- struct{}{}:
	default:
	}
}

// run keeps the node connected for as long as there are channels. It is the
// goroutine that heard runs on.
func (n *node) run() {
	for try := 0; ; try++ {
		c, err := n.session()
		if c != nil && time.Since(c.born) > youngFor {
			try = 0
		}
		if n.lost(c, err) {
			return
		}
		select {
		case <-time.After(backoff(try)):
		case <-n.b.life.Done():
		}
		if !n.needed() {
			return
		}
	}
}

// session makes a connection and reads it until it ends.
func (n *node) session() (*link, error) {
	ps := n.client.Subscribe(n.b.life)
	defer ps.Close()
	ctx, cancel := context.WithTimeout(n.b.life, connectTimeout)
	within, end := n.b.store.Begin(ctx)
	err := resp.Survive(func() error { return ps.Ping(within) }) // which makes the connection
	end()
	cancel()
	if err != nil {
		return nil, err
	}
	c := &link{node: n, ps: ps, born: time.Now(), expect: []command{{name: "ping"}}, over: make(chan struct{})}
	c.asked = c.born
	n.attach(c)
	written := make(chan struct{})
	go func() {
		c.write()
		close(written)
	}()
	err = c.read()
	close(c.over)
	ps.Close()
	<-written
	return c, err
}

func (n *node) attach(c *link) {
	n.b.mu.Lock()
	defer n.b.mu.Unlock()
	n.link = c
	n.kick()
}

// lost has all channels subscribed to anew, now that c has ended, and reports
// whether the node is forgotten. Listens wait for the next connection, unless
// this one was never of any use, or not even made.
func (n *node) lost(c *link, err error) (over bool) {
	b := n.b
	b.mu.Lock()
	defer b.mu.Unlock()
	n.link, n.pending, b.lost = nil, nil, time.Now()
	for _, ch := range n.channels() {
		if c == nil || !c.useful {
			ch.fail(n.says(err))
		}
		if len(ch.listeners) == 0 {
			delete(b.channels, ch.name)
			continue
		}
		n.add(ch)
	}
	return b.closed || b.nodes[n.client] != n
}

// needed waits until the node has channels, and forgets it if that takes
// long. On a cluster they may have gone elsewhere.
func (n *node) needed() bool {
	b := n.b
	b.rehome(n)
	for idle := false; ; {
		b.mu.Lock()
		some := len(n.channels()) > 0
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
		case <-b.life.Done():
		}
	}
}

// channels are those of the node. mu is held.
func (n *node) channels() (chs []*channel) {
	for _, ch := range n.b.channels {
		if ch.node == n {
			chs = append(chs, ch)
		}
	}
	return chs
}

// says has err name the node, if there are several.
func (n *node) says(err error) error {
	if client, ok := n.client.(*redis.Client); ok && n.client != n.b.store.Client {
		return fmt.Errorf("%s: %w", client.Options().Addr, err)
	}
	return err
}
