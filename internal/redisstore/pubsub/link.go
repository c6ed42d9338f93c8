package pubsub

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/redisstore/resp"
)

const (
	tickEvery      = time.Second     // the time between two pings, and between two runs of keep
	deadAfter      = 3 * time.Second // a connection without an answer for so long is dead
	writeTimeout   = time.Second     // a connection is dead if a write takes longer
	connectTimeout = 5 * time.Second // the most that connecting, or finding the servers, may take
)

// link is one connection to a server. If it ends, keep gives its channels another link.
type link struct {
	b      *Subscriber
	server Server
	conn   conn
	ctx    context.Context         // ends with the link
	drop   context.CancelCauseFunc // ends ctx
	wake   chan struct{}           // signals that queue has commands for the writer; has room for one

	// b.mu guards these.
	queue  []command // not sent yet
	sent   []command // not answered yet, in this order
	silent int       // ticks in a row without an answer
}

// command is a command on a link.
type command struct {
	name string // ping, subscribe or unsubscribe
	ch   *channel
}

// ping is a command without a channel.
var ping = command{"ping", &channel{}}

var (
	errEnded     = errors.New("the connection of the subscriptions has ended")
	errSilent    = fmt.Errorf("no answer for %v on the connection of the subscriptions", deadAfter)
	errOutOfStep = errors.New("unexpected reply on the connection of the subscriptions")
)

// addLocked queues a command for the writer, and wakes the writer.
func (k *link) addLocked(cmd command) {
	k.queue = append(k.queue, cmd)
	select {
	case k.wake <- struct{}{}:
	// A signal waits already: the writer will take this command as well.
	default:
	}
}

// run connects and reads the connection. It calls the Listeners' functions on its goroutine.
func (k *link) run() {
	b, err := k.b, k.connectAndRead()
	k.drop(err)

	b.mu.Lock()
	defer b.mu.Unlock()
	// If the store has closed the client because another server has replaced this one, calls of
	// Listen go on.
	replaced := b.store.Reload != nil && errors.Is(err, redis.ErrClosed)
	for _, ch := range b.channels {
		if ch.link == k {
			b.movedLocked(ch)
			if !replaced {
				ch.failLocked(k.wrap(err))
			}
		}
	}
}

// wrap adds the address of the server to an error, if the store has several servers.
func (k *link) wrap(err error) error {
	if addr := k.server.addr(); addr != "" && k.b.store.Reload != nil {
		return fmt.Errorf("%s: %w", addr, err)
	}
	return err
}

// connectAndRead makes a connection, and reads it until it ends. It returns why it ended.
func (k *link) connectAndRead() error {
	ctx, cancel := context.WithTimeout(k.ctx, connectTimeout)
	c, err := k.server.connect(ctx)
	cancel()
	if err != nil {
		return err
	}
	k.conn = c

	// The reply to the ping of connect is the first that read expects.
	k.b.mu.Lock()
	k.sent = []command{ping}
	k.b.mu.Unlock()

	written := make(chan struct{})
	go func() {
		k.write()
		close(written)
	}()

	k.drop(k.read())
	<-written
	return context.Cause(k.ctx) // the first reason why the link ended
}

// write sends commands until the link ends, and then closes the connection, which ends the read in
// progress. Only the writer may close it: Close of a PubSub takes the same lock as a write, and
// could block.
func (k *link) write() {
	defer k.conn.close()
	ticker := time.NewTicker(tickEvery)
	defer ticker.Stop()
	for {
		select {
		case <-k.ctx.Done():
			return
		case <-ticker.C:
			k.tick()
		case <-k.wake:
		}

		for _, cmd := range k.take() {
			if err := k.send(cmd); err != nil {
				k.drop(err)
				return
			}
		}
	}
}

// tick makes sure that the server has a command to answer, and drops a dead link. Messages do not
// count as answers, because they may still arrive on a dead connection.
func (k *link) tick() {
	k.b.mu.Lock()
	defer k.b.mu.Unlock()
	if k.silent++; k.silent == int(deadAfter/tickEvery) {
		k.drop(errSilent)
	}
	if len(k.sent)+len(k.queue) == 0 {
		k.addLocked(ping)
	}
}

// take returns the commands to send now.
func (k *link) take() []command {
	k.b.mu.Lock()
	defer k.b.mu.Unlock()
	cmds := k.queue
	k.queue = nil
	k.sent = append(k.sent, cmds...) // before they are sent, because replies may arrive at once
	return cmds
}

// send sends a command. If channels are in slots, it sends the sharded form.
func (k *link) send(cmd command) error {
	name := cmd.name
	if name != "ping" && k.b.isSharded() {
		name = "s" + name
	}
	return k.conn.send(name, cmd.ch.name)
}

// read processes what arrives until the connection fails.
func (k *link) read() error {
	for {
		// Use no timeout: the writer makes the server answer each second, and closes a dead
		// connection.
		kind, channel, payload, err := k.conn.receive()
		inStep := true
		switch {
		case resp.IsReply(err):
			inStep = k.refused(err)
		case err != nil:
			return err
		case kind == "message" || kind == "smessage":
			k.message(channel, payload)
		case kind == "pong":
			inStep = k.answered("ping", "")
		default:
			inStep = k.answered(kind, channel)
		}

		// Replies come in the order of the commands, so after one that does not fit, later ones
		// cannot be assigned either.
		if !inStep {
			return errOutOfStep
		}
	}
}

// message delivers a message.
func (k *link) message(name, payload string) {
	k.b.mu.Lock()
	var listeners []*Listener
	if ch := k.b.channels[name]; ch != nil {
		listeners = slices.Clone(ch.listeners)
	}
	k.b.mu.Unlock()

	// Not under mu, because receive may call the Subscriber.
	deliver(listeners, payload, false)
}

// answered processes the answer to a command, or, on a cluster, the end of a subscription whose
// slot has moved. It reports false if the answer is unexpected.
func (k *link) answered(kind, name string) bool {
	b := k.b
	b.mu.Lock()
	var again []*Listener
	// Deliver again before the next read, so that a Listener learns that messages may be missing
	// before it receives the first message of the new subscription.
	defer func() {
		b.mu.Unlock()
		deliver(again, "", true)
	}()

	if kind == "ssubscribe" || kind == "sunsubscribe" {
		kind = kind[1:]
	}
	if len(k.sent) > 0 && k.sent[0].name == kind && k.sent[0].ch.name == name {
		ch := k.sent[0].ch
		k.sent, k.silent = k.sent[1:], 0
		// Ignore the confirmation if the channel has moved to another link meanwhile.
		if kind == "subscribe" && ch.link == k {
			again = ch.confirmLocked()
		}
		return true
	}

	if kind != "unsubscribe" || !b.store.Cluster {
		return false
	}
	if ch := b.channels[name]; ch != nil && ch.link == k {
		b.movedLocked(ch)
	}
	return true
}

// refused processes an error that the server has replied to a command. It reports
// false if no command was sent.
func (k *link) refused(err error) bool {
	b := k.b
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(k.sent) == 0 {
		return false
	}

	cmd := k.sent[0]
	k.sent, k.silent = k.sent[1:], 0
	switch {
	// Ignore an error for a ping or an unsubscription, because it shows that the server answers,
	// and a refusal if the channel has moved to another link meanwhile.
	case cmd.name != "subscribe" || cmd.ch.link != k:
	case b.store.Cluster && redis.HasErrorPrefix(err, "MOVED"):
		b.movedLocked(cmd.ch)
	default:
		cmd.ch.state = isRefused // keep tries again
		cmd.ch.failLocked(k.wrap(err))
	}
	return true
}
