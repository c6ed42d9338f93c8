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
	over chan struct{} // closed when reading has ended

	// The rest is guarded by b.mu.
	queue   []command // what is to be sent
	expect  []command // what was sent and not answered yet
	asked   time.Time // when the last of it was
	useful  bool      // something was answered
	dropped bool      // for a new connection
	demoted bool      // dropped as soon as it is not young
}

// How many commands may be unanswered. PubSub reads and writes under one
// lock: were a write to wait for a server that waits to be read, neither would
// go on. What comes meanwhile is sent together by the next. On a cluster,
// where each slot wants a command of its own, they are too small for that.
const (
	inFlight        = 1
	inFlightSharded = 64
)

// perCommand is how many channels one command is for, at most.
const perCommand = 1000

// command is one that was sent, or is to be sent, on a link.
type command struct {
	name string // ping, subscribe or unsubscribe
	chs  []*channel
}

// spent is the context of reads and writes on a connection. PubSub asks it
// for the deadline; only when the connection fails does it use it to make a
// new one by itself, unseen, and that cannot succeed with a context that has
// ended.
type spent struct{ until time.Time }

var spentDone = func() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()

func (s spent) Deadline() (time.Time, bool) { return s.until, true }
func (spent) Done() <-chan struct{}         { return spentDone }
func (spent) Err() error                    { return context.Canceled }
func (spent) Value(any) any                 { return nil }

func spentIn(d time.Duration) context.Context { return spent{time.Now().Add(d)} }

var errOutOfStep = errors.New("unexpected reply on the connection of the subscriptions")

// read hears what arrives until the connection fails.
func (c *link) read() error {
	for {
		msg, err := resp.Receive(c.ps, spentIn(deadAfter), 0)
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
			inStep = c.failed(err)
		}
		if !inStep {
			return errOutOfStep
		}
	}
}

func (c *link) message(name, payload string) {
	c.node.b.mu.Lock()
	var who []*Listener
	if ch := c.node.b.channels[name]; ch != nil {
		who = ch.listeners
	}
	c.node.b.mu.Unlock()
	tell(who, payload, false)
}

func (c *link) pong() bool {
	c.node.b.mu.Lock()
	defer c.node.b.mu.Unlock()
	if len(c.expect) == 0 || c.expect[0].name != "ping" {
		return false
	}
	c.answered()
	return true
}

// subscription takes in that a subscription was made, ended by us or, on a
// cluster, ended by the server because the slot has moved.
func (c *link) subscription(kind, name string) bool {
	b := c.node.b
	b.mu.Lock()
	var again []*Listener
	defer func() {
		b.mu.Unlock()
		tell(again, "", true)
	}()
	kind = unsharded(kind)
	if len(c.expect) > 0 && c.expect[0].name == kind && c.expect[0].chs[0].name == name {
		head := &c.expect[0]
		ch := head.chs[0]
		if head.chs = head.chs[1:]; len(head.chs) == 0 {
			c.answered()
		}
		if kind == "subscribe" && ch.node == c.node && ch.state == isSent {
			again = ch.confirm()
		}
		return true
	}
	if kind != "unsubscribe" || !b.cluster() {
		return false
	}
	if ch := b.channels[name]; ch != nil {
		b.move(c.node, []*channel{ch})
	}
	return true
}

func unsharded(kind string) string {
	if kind == "ssubscribe" || kind == "sunsubscribe" {
		return kind[1:]
	}
	return kind
}

// failed takes in that the server refused a command.
func (c *link) failed(err error) bool {
	b := c.node.b
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(c.expect) == 0 {
		return false
	}
	cmd := c.expect[0]
	defer c.answered()
	switch {
	case cmd.name != "subscribe":
	case b.cluster() && redis.HasErrorPrefix(err, "MOVED"):
		b.move(c.node, cmd.chs)
	case len(cmd.chs) > 1:
		for _, ch := range cmd.chs {
			ch.alone = true
			c.node.add(ch)
		}
	default:
		ch := cmd.chs[0]
		ch.state = isRefused
		ch.fail(c.node.says(err))
	}
	return true
}

// write sends what there is to send until the connection ends.
func (c *link) write() {
	tick := time.NewTicker(pingEvery)
	defer tick.Stop()
	for {
		demand := false
		select {
		case <-c.over:
			return
		case <-c.node.b.life.Done():
			c.ps.Close()
			return
		case <-tick.C:
			demand = true
		case <-c.node.wake:
			runtime.Gosched() // others may be about to listen, too
		}
		cmds, ok := c.take(demand)
		for _, cmd := range cmds {
			ok = ok && c.send(cmd) == nil
		}
		if !ok {
			c.ps.Close()
			return
		}
	}
}

// take returns what is to be sent now, and false if the connection is to end.
func (c *link) take(demand bool) (cmds []command, ok bool) {
	n := c.node
	b := n.b
	var gone []*channel
	if demand {
		gone = b.rehome(n)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if demand {
		c.queue = append(c.queue, c.bundle("unsubscribe", append(gone, c.sweep()...))...)
		if b.nodes[n.client] != n || len(c.expect) > 0 && time.Since(c.asked) > deadAfter {
			return nil, false
		}
		if len(c.expect) == 0 && len(c.queue) == 0 {
			c.queue = append(c.queue, command{name: "ping"})
		}
	}
	if len(c.queue) == 0 {
		c.queue = c.bundle("subscribe", n.take())
	}
	k := min(len(c.queue), c.window()-len(c.expect))
	cmds, c.queue = c.queue[:k:k], c.queue[k:]
	if k > 0 {
		c.expect, c.asked = append(c.expect, cmds...), time.Now()
	}
	return cmds, !c.dropped && !(c.demoted && time.Since(c.born) > youngFor)
}

func (c *link) window() int {
	if c.sharded() {
		return inFlightSharded
	}
	return inFlight
}

// answered forgets the command that was answered first. mu is held.
func (c *link) answered() {
	c.expect, c.useful = c.expect[1:], true
	if len(c.queue) > 0 || len(c.node.pending) > 0 {
		c.node.kick()
	}
}

// sweep returns the channels that nobody has listened to for a while, and
// forgets them; after some time without any, the node too.
func (c *link) sweep() (idle []*channel) {
	n := c.node
	b := n.b
	now := time.Now()
	left := 0
	for _, ch := range n.channels() {
		switch {
		case len(ch.listeners) > 0:
			if ch.state == isRefused {
				n.add(ch)
			}
		case ch.state == isSent: // its reply is awaited
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
		delete(b.nodes, n.client)
	}
	return idle
}

// bundle makes one command for channels that may share it: on a cluster only
// those of one slot.
func (c *link) bundle(name string, chs []*channel) (cmds []command) {
	together := map[int][]*channel{}
	for _, ch := range chs {
		if ch.alone {
			cmds = append(cmds, command{name, []*channel{ch}})
			continue
		}
		of := 0
		if c.sharded() {
			of = slot.Of(ch.name)
		}
		together[of] = append(together[of], ch)
	}
	for _, chs := range together {
		for chs := range slices.Chunk(chs, perCommand) {
			cmds = append(cmds, command{name, chs})
		}
	}
	return cmds
}

func (c *link) sharded() bool { return c.node.b.kind.Load() == kindSharded }

func (c *link) send(cmd command) error {
	names := make([]string, len(cmd.chs))
	for i, ch := range cmd.chs {
		names[i] = ch.name
	}
	ctx := spentIn(writeTimeout)
	switch {
	case cmd.name == "ping":
		return c.ps.Ping(ctx)
	case cmd.name == "subscribe" && c.sharded():
		return c.ps.SSubscribe(ctx, names...)
	case cmd.name == "subscribe":
		return c.ps.Subscribe(ctx, names...)
	case c.sharded():
		return c.ps.SUnsubscribe(ctx, names...)
	}
	return c.ps.Unsubscribe(ctx, names...)
}
