package pubsub

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/redisstore/resp"
)

// link is one connection of a node.
type link struct {
	node *node
	ps   *redis.PubSub
	born time.Time
	over chan struct{} // closed when the reader has ended

	// b.mu guards these.
	expect  []command  // sent and not answered yet, in this order
	gone    []*channel // to unsubscribe from
	silent  int        // how many ticks have passed since the server has answered something
	useful  bool       // the server has answered something
	single  bool       // each command has one channel, because the server has refused one with several
	dropped bool       // the writer closes the connection, as soon as it is not young any more
}

// The writer sends again when all that it sent is answered. PubSub holds a lock while it
// writes, and needs that lock before and after each read. So nothing is read while a write
// blocks. If the server blocked in a write at the same time, neither would go on. Channels
// that are added meanwhile travel together in the next command. If each channel has a
// command of its own, a few travel at a time, which are too small to fill the connection.
const (
	together = 1000
	singly   = 64
)

// command is a command on a link.
type command struct {
	name string // ping, subscribe or unsubscribe
	chs  []*channel
}

// ended is a context that has ended. If the connection fails, PubSub makes a new one by
// itself, without a report. With such a context it cannot. It uses the deadline of the
// context nevertheless.
var ended = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

var errOutOfStep = errors.New("unexpected reply on the connection of the subscriptions")

// read processes what arrives until the connection fails.
func (c *link) read() error {
	for {
		// This has no timeout: the writer demands an answer each second, and closes a
		// connection that is dead. ReceiveTimeout panics if a reply does not have the
		// form of a message.
		var msg any
		err := resp.Survive(func() (err error) { msg, err = c.ps.ReceiveTimeout(ended, 0); return err })
		inStep := true
		switch m := msg.(type) {
		case *redis.Message:
			c.message(m.Channel, m.Payload)
		case *redis.Pong:
			inStep = c.pong()
		case *redis.Subscription:
			inStep = c.subscription(m.Kind, m.Channel)
		default:
			if !resp.IsReply(err) {
				return err
			}
			inStep = c.refused(err)
		}

		// Replies come in the order of the commands. After one that does not fit,
		// no later reply can be assigned to its command.
		if !inStep {
			return errOutOfStep
		}
	}
}

// message delivers a message.
func (c *link) message(name, payload string) {
	c.node.b.mu.Lock()
	var listeners []*Listener
	if ch := c.node.b.channels[name]; ch != nil {
		listeners = slices.Clone(ch.listeners)
	}
	c.node.b.mu.Unlock()

	// mu is not held, because receive may call the Subscriber.
	deliver(listeners, payload, false)
}

// pong processes the reply to a ping. It reports false if no ping was sent.
func (c *link) pong() bool {
	c.node.b.mu.Lock()
	defer c.node.b.mu.Unlock()

	if len(c.expect) == 0 || c.expect[0].name != "ping" {
		return false
	}
	c.answeredLocked()
	return true
}

// subscription processes the confirmation of a subscription or of its end. On a
// cluster, the server also ends a subscription by itself if the slot has moved.
// subscription reports false if the confirmation is unexpected.
func (c *link) subscription(kind, name string) bool {
	b := c.node.b
	b.mu.Lock()
	var again []*Listener
	// The reader delivers before it reads on. So a Listener learns that messages may be
	// missing before it gets the first message of the new subscription.
	defer func() {
		b.mu.Unlock()
		deliver(again, "", true)
	}()

	if kind == "ssubscribe" || kind == "sunsubscribe" {
		kind = kind[1:]
	}
	if len(c.expect) > 0 && c.expect[0].name == kind && c.expect[0].chs[0].name == name {
		head := &c.expect[0]
		ch := head.chs[0]
		if head.chs = head.chs[1:]; len(head.chs) == 0 {
			c.answeredLocked()
		}
		// While the command was in flight, the channel may have moved or been
		// removed.
		if kind == "subscribe" && ch.node == c.node && ch.state == isSent {
			again = ch.confirmLocked()
		}
		return true
	}

	if kind != "unsubscribe" || !b.store.Cluster {
		return false
	}
	if ch := b.channels[name]; ch != nil {
		b.moveLocked(c.node, []*channel{ch})
	}
	return true
}

// refused processes an error that the server has replied to a command. It reports
// false if no command was sent.
func (c *link) refused(err error) bool {
	b := c.node.b
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(c.expect) == 0 {
		return false
	}

	cmd := c.expect[0]
	defer c.answeredLocked()
	// While the command was in flight, channels may have moved or been removed.
	cmd.chs = slices.DeleteFunc(cmd.chs, func(ch *channel) bool { return ch.node != c.node || ch.state != isSent })

	switch {
	// An error reply to a ping or an unsubscription also shows that the server answers.
	case cmd.name != "subscribe", len(cmd.chs) == 0:
	case b.store.Cluster && redis.HasErrorPrefix(err, "MOVED"):
		b.moveLocked(c.node, cmd.chs)
	case len(cmd.chs) > 1:
		// The error does not say which channel is refused.
		c.single = true
		for _, ch := range cmd.chs {
			c.node.addLocked(ch)
		}
	default:
		ch := cmd.chs[0]
		ch.state = isRefused
		ch.failLocked(c.node.wrap(err))
	}
	return true
}

// write sends commands until the connection ends.
func (c *link) write() {
	ticker := time.NewTicker(pingEvery)
	defer ticker.Stop()
	for {
		tick := false
		select {
		case <-c.over:
			return
		case <-c.node.b.open.Done():
			c.ps.Close()
			return
		case <-ticker.C:
			tick = true
		case <-c.node.wake:
			runtime.Gosched() // other callers may be about to add channels
		}

		cmds, ok := c.takeCommands(tick)
		for _, cmd := range cmds {
			ok = ok && c.send(cmd) == nil
		}

		// The close ends the read in progress, and then the node connects again.
		if !ok {
			c.ps.Close()
			return
		}
	}
}

// takeCommands returns the commands to send now. It reports false if the writer has
// to close the connection after them. At a tick it also removes what is idle, and
// demands an answer of the server.
func (c *link) takeCommands(tick bool) (cmds []command, ok bool) {
	n := c.node
	var moved []*channel
	if tick {
		moved = n.b.rehome(n) // may call the server, so before mu is locked
	}

	n.b.mu.Lock()
	defer n.b.mu.Unlock()
	if tick {
		c.gone = append(append(c.gone, moved...), c.sweepLocked()...)
		// Nothing is demanded of a connection without channels, so it ends as well.
		// Messages may still arrive on a dead connection: they are no answer.
		if c.silent++; c.silent == int(deadAfter/pingEvery) {
			return nil, false
		}
	}

	if len(c.expect) == 0 {
		cmds = c.nextLocked(tick)
		// Before the commands are sent: the reader may get the replies at once.
		c.expect = slices.Clone(cmds)
	}
	return cmds, !c.dropped || time.Since(c.born) <= youngFor
}

// nextLocked returns the commands to send next.
func (c *link) nextLocked(tick bool) (cmds []command) {
	single := c.single || c.node.b.isSharded()
	most := together
	if single {
		most = singly
	}

	// A channel may have come back, so the end of its old subscription comes first.
	name, chs := "unsubscribe", c.gone[:min(len(c.gone), most)]
	c.gone = c.gone[len(chs):]
	if len(chs) == 0 {
		name, chs = "subscribe", c.node.takeLocked(most)
	}

	switch {
	case len(chs) == 0 && tick && len(c.node.channelsLocked()) > 0:
		return []command{{name: "ping"}}
	case len(chs) == 0:
		return nil
	case !single:
		return []command{{name, chs}}
	}
	for i := range chs {
		cmds = append(cmds, command{name, chs[i : i+1]})
	}
	return cmds
}

// answeredLocked removes the first command of expect, which has its reply.
func (c *link) answeredLocked() {
	c.expect, c.useful, c.silent = c.expect[1:], true, 0
	if len(c.expect) == 0 && (len(c.gone) > 0 || len(c.node.pending) > 0) {
		c.node.wakeWriter()
	}
}

// sweepLocked removes the channels that have had no listeners for a while, and
// returns those to unsubscribe from. It also tries refused channels again.
func (c *link) sweepLocked() (idle []*channel) {
	for _, ch := range c.node.channelsLocked() {
		switch {
		case ch.state == isRefused && len(ch.listeners) > 0:
			c.node.addLocked(ch)
		case ch.state == isRefused:
			delete(c.node.b.channels, ch.name)
		case ch.state == isConfirmed && len(ch.listeners) == 0 && time.Since(ch.idle) >= lingering:
			delete(c.node.b.channels, ch.name)
			idle = append(idle, ch)
		}
	}
	return idle
}

// send sends a command.
func (c *link) send(cmd command) error {
	names := make([]string, len(cmd.chs))
	for i, ch := range cmd.chs {
		names[i] = ch.name
	}

	ctx, cancel := context.WithTimeout(ended, writeTimeout)
	defer cancel()
	sharded := c.node.b.isSharded()
	switch {
	case cmd.name == "ping":
		return c.ps.Ping(ctx)
	case cmd.name == "subscribe" && sharded:
		return c.ps.SSubscribe(ctx, names...)
	case cmd.name == "subscribe":
		return c.ps.Subscribe(ctx, names...)
	case sharded:
		return c.ps.SUnsubscribe(ctx, names...)
	}
	return c.ps.Unsubscribe(ctx, names...)
}
