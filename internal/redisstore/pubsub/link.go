package pubsub

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/redisstore/resp"
	"github.com/hasplock/hasp/internal/redisstore/slot"
)

// link is one connection of a node.
type link struct {
	node *node
	ps   *redis.PubSub
	born time.Time
	over chan struct{} // closed when the reader has ended

	// b.mu guards these.
	queue   []command // to send
	expect  []command // sent and not answered yet, in this order
	asked   time.Time // when the last of expect was sent
	useful  bool      // the server has answered something
	dropped bool      // the writer closes the connection, as soon as it is not young any more
}

// inFlight is how many commands may be unanswered. PubSub holds a lock while it writes,
// and needs that lock before and after each read. So nothing is read while a write
// blocks. If the server blocked in a write at the same time, neither would go on. Channels
// that are added while a command is unanswered travel together in the next one. If the
// channels are sharded, each slot needs a command of its own. These commands are too small
// to fill the connection.
const (
	inFlight        = 1
	inFlightSharded = 64
)

// perCommand is the most channels in one command.
const perCommand = 1000

// command is a command on a link.
type command struct {
	name string // ping, subscribe or unsubscribe
	chs  []*channel
}

// ended is the context of a read or a write: it has a deadline, and has ended.
// PubSub uses the deadline. If the connection fails, PubSub makes a new one by
// itself, without a report. With a context that has ended it cannot.
type ended struct{ until time.Time }

var closedChan = func() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()

func (e ended) Deadline() (time.Time, bool) { return e.until, true }
func (ended) Done() <-chan struct{}         { return closedChan }
func (ended) Err() error                    { return context.Canceled }
func (ended) Value(any) any                 { return nil }

// timeout returns the context of a read or a write that takes d at most.
func timeout(d time.Duration) context.Context { return ended{time.Now().Add(d)} }

var errOutOfStep = errors.New("unexpected reply on the connection of the subscriptions")

// read processes what arrives until the connection fails.
func (c *link) read() error {
	for {
		// The writer demands an answer each second, so silence for deadAfter means
		// that the connection is dead. ReceiveTimeout panics if a reply does not have
		// the form of a message.
		var msg any
		err := resp.Survive(func() (err error) { msg, err = c.ps.ReceiveTimeout(timeout(deadAfter), 0); return err })
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
		listeners = ch.listeners
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
		// The error does not say which channel is refused. Try them one by one.
		for _, ch := range cmd.chs {
			ch.alone = true
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
	b := n.b
	var gone []*channel
	if tick {
		gone = b.rehome(n) // may call the server, so before mu is locked
	}

	b.mu.Lock()
	defer b.mu.Unlock()
	if tick {
		c.queue = append(c.queue, c.bundleLocked("unsubscribe", append(gone, c.sweepLocked()...))...)
		// If the node was removed, or the server has owed a reply for deadAfter, the
		// connection ends. Messages may still arrive on it, so the reader does not notice.
		if b.nodes[n.client] != n || len(c.expect) > 0 && time.Since(c.asked) > deadAfter {
			return nil, false
		}
		if len(c.expect) == 0 && len(c.queue) == 0 {
			c.queue = append(c.queue, command{name: "ping"})
		}
	}

	if len(c.queue) == 0 {
		c.queue = c.bundleLocked("subscribe", n.takeLocked())
	}

	window := inFlight
	if c.isSharded() {
		window = inFlightSharded
	}
	k := min(len(c.queue), window-len(c.expect))
	cmds, c.queue = c.queue[:k:k], c.queue[k:]
	if k > 0 {
		// Before the commands are sent: the reader may get the replies at once.
		c.expect, c.asked = append(c.expect, cmds...), time.Now()
	}
	return cmds, !c.dropped || time.Since(c.born) <= youngFor
}

// answeredLocked removes the first command of expect, which has its reply.
func (c *link) answeredLocked() {
	c.expect, c.useful = c.expect[1:], true
	// The writer may have waited for room in the window.
	if len(c.queue) > 0 || len(c.node.pending) > 0 {
		c.node.wakeWriter()
	}
}

// sweepLocked removes the channels that have had no listeners for a while, and
// returns those to unsubscribe from. It also tries refused channels again. If the
// node has had no channels for idleAfter, it is removed.
func (c *link) sweepLocked() (idle []*channel) {
	n := c.node
	b := n.b
	now := time.Now()
	left := 0
	for _, ch := range n.channelsLocked() {
		switch {
		case len(ch.listeners) > 0:
			if ch.state == isRefused {
				n.addLocked(ch)
			}
		case ch.state == isSent: // the reply must find the channel
		case ch.state == isConfirmed && now.Sub(ch.idle) < lingering:
		default:
			delete(b.channels, ch.name)
			if ch.state == isConfirmed {
				idle = append(idle, ch)
			}
			continue
		}
		left++
	}

	if left > 0 || n.busy.IsZero() {
		n.busy = now
	}
	if now.Sub(n.busy) >= idleAfter {
		// takeCommands finds that at the same tick, and closes the connection.
		delete(b.nodes, n.client)
	}
	return idle
}

// bundleLocked returns the commands for channels. If the channels are sharded, those of a
// command are in one slot.
func (c *link) bundleLocked(name string, chs []*channel) (cmds []command) {
	bySlot := map[int][]*channel{}
	for _, ch := range chs {
		if ch.alone {
			cmds = append(cmds, command{name, []*channel{ch}})
			continue
		}
		of := 0
		if c.isSharded() {
			of = slot.Of(ch.name)
		}
		bySlot[of] = append(bySlot[of], ch)
	}

	for _, chs := range bySlot {
		for chs := range slices.Chunk(chs, perCommand) {
			cmds = append(cmds, command{name, chs})
		}
	}
	return cmds
}

func (c *link) isSharded() bool { return c.node.b.kind.Load() == kindSharded }

// send sends a command.
func (c *link) send(cmd command) error {
	names := make([]string, len(cmd.chs))
	for i, ch := range cmd.chs {
		names[i] = ch.name
	}
	ctx := timeout(writeTimeout)
	switch {
	case cmd.name == "ping":
		return c.ps.Ping(ctx)
	case cmd.name == "subscribe" && c.isSharded():
		return c.ps.SSubscribe(ctx, names...)
	case cmd.name == "subscribe":
		return c.ps.Subscribe(ctx, names...)
	case c.isSharded():
		return c.ps.SUnsubscribe(ctx, names...)
	}
	return c.ps.Unsubscribe(ctx, names...)
}
