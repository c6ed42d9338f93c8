package pubsub

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/redisstore/resp"
)

const (
	// the time between two pings, and between two ticks of the method keep
	tickEvery = time.Second
	// after this time without an answer, a connection counts as dead
	deadAfter      = 3 * time.Second
	connectTimeout = 5 * time.Second // how long a connect, or a search for the servers, may take
)

// link is one connection to a server. If it ends, b.keep moves its channels to another link.
type link struct {
	b      *Subscriber
	server redis.UniversalClient
	conn   *redis.PubSub
	ctx    context.Context         // ends with the link
	drop   context.CancelCauseFunc // ends ctx
	// signals that queue has commands for the writer; has room for one signal
	wake chan struct{}

	// b.mu guards the fields below.
	queue  []command // not sent yet
	sent   []command // not answered yet; the replies come in this order
	silent int       // ticks since the last answer, or since the begin
}

// command is what a link can send: a ping, or the start or end of a subscription.
type command struct {
	name string // ping, subscribe or unsubscribe
	ch   *channel
}

// isAnsweredBy reports whether a message of the server answers the command.
func (c command) isAnsweredBy(kind, name string) bool { return c.name == kind && c.ch.name == name }

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
	// The channel wake already contains a signal, so the writer will send this command as well.
	default:
	}
}

// The method run connects, and reads until the connection ends. It calls the functions of the
// Listeners on its own goroutine. At the end, the link has no channels, and the method keep finds
// other links for them.
func (k *link) run() {
	ctx, cancel := context.WithTimeout(k.ctx, connectTimeout)
	c, err := subscribe(ctx, k.server)
	cancel()
	var writer sync.WaitGroup
	if err == nil {
		// The function subscribe has sent a PING, so read expects its reply first.
		k.conn = c
		k.sent = []command{ping}
		writer.Go(k.write)
		err = k.read()
	}

	k.drop(err)
	writer.Wait()
	err = context.Cause(k.ctx) // the first reason why the link ended

	b := k.b
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, ch := range b.channels {
		if ch.link == k {
			b.movedLocked(ch)
			ch.settleLocked(err)
		}
	}
}

// write sends commands until the link ends, and then closes the connection, which ends the read in
// progress. Only the writer closes the connection, because Close of a PubSub acquires the same lock
// as a write. In another goroutine, Close could block.
func (k *link) write() {
	defer k.conn.Close()
	ticker := time.NewTicker(tickEvery)
	defer ticker.Stop()
	for {
		ticked := false
		select {
		case <-k.ctx.Done():
			return
		case <-ticker.C:
			ticked = true
		case <-k.wake:
		}

		for _, cmd := range k.take(ticked) {
			// For channels in slots, the commands are SSUBSCRIBE and SUNSUBSCRIBE.
			name := cmd.name
			if name != "ping" && k.b.isSharded() {
				name = "s" + name
			}
			if err := send(k.conn, name, cmd.ch.name); err != nil {
				k.drop(err)
				return
			}
		}
	}
}

// take returns the commands to send now. At each tick, it adds a ping if the server has no command
// to answer, so that the server must always answer something. It drops the link if no answer has
// come for the time deadAfter. Messages do not count as answers, because they may still arrive when
// commands no longer reach the server.
func (k *link) take(ticked bool) []command {
	k.b.mu.Lock()
	defer k.b.mu.Unlock()
	cmds := k.queue
	if ticked {
		k.silent++
		if k.silent == int(deadAfter/tickEvery) {
			k.drop(errSilent)
		}
		if len(k.sent)+len(cmds) == 0 {
			cmds = []command{ping}
		}
	}

	// Record the commands before they are sent, because replies may arrive at once.
	k.queue = nil
	k.sent = append(k.sent, cmds...)
	return cmds
}

// read processes what arrives until the connection fails.
func (k *link) read() error {
	for {
		// Use no timeout, because the writer makes the server answer each second, and closes the
		// connection if no answer comes.
		kind, name, payload, err := receive(k.conn)
		if err != nil && !resp.IsReply(err) {
			return err
		}

		// Replies come in the order of the commands, so after a reply that does not match, later
		// replies cannot be matched either.
		if !k.handle(kind, name, payload, err) {
			return errOutOfStep
		}
	}
}

// handle processes what receive has returned. This is a message, the answer to the oldest command
// in k.sent, or, on a cluster, the end of a subscription whose slot has moved. For anything else,
// handle returns false. If the server has refused the command, refusal is the error that it
// replied, and kind and name are empty.
func (k *link) handle(kind, name, payload string, refusal error) bool {
	b := k.b
	b.mu.Lock()
	var to []*Listener // whose functions to call
	again := false     // what the functions receive with the payload

	// Do not hold mu during the delivery, because a Listener's function may call the Subscriber.
	// Deliver before the next read, so that a Listener learns that messages may be missing before
	// it receives the first message of the new subscription.
	defer func() {
		b.mu.Unlock()
		deliver(to, payload, again)
	}()

	// The answers about channels in slots have an s in front.
	if kind == "ssubscribe" || kind == "sunsubscribe" {
		kind = kind[1:]
	}
	ch := b.channels[name]
	switch {
	case kind == "message":
		if ch != nil {
			to = slices.Clone(ch.listeners)
		}
	case len(k.sent) > 0 && (refusal != nil || k.sent[0].isAnsweredBy(kind, name)):
		cmd := k.sent[0]
		k.sent = k.sent[1:]
		k.silent = 0
		switch {
		// An answer to a ping or an unsubscription shows only that the server answers. Also ignore
		// an answer about a channel that has moved to another link meanwhile.
		case cmd.name != "subscribe" || cmd.ch.link != k:
		case refusal == nil:
			// The Listeners whose Listen has returned before may have missed messages.
			cmd.ch.state = isConfirmed
			to = cmd.ch.settleLocked(nil)
			again = true
		case b.store.Cluster && redis.HasErrorPrefix(refusal, "MOVED"):
			b.movedLocked(cmd.ch) // Listen waits for the subscription at the other server
		default:
			cmd.ch.state = isRefused // b.keep tries again
			cmd.ch.settleLocked(refusal)
		}
	case kind == "unsubscribe" && b.store.Cluster: // the server has ended the subscription
		if ch != nil && ch.link == k {
			b.movedLocked(ch)
		}
	default:
		return false
	}

	return true
}

// writeTimeout is how long a write may take.
const writeTimeout = time.Second

// subscribe makes a connection for subscriptions, and sends a PING over it.
func subscribe(ctx context.Context, rdb redis.UniversalClient) (*redis.PubSub, error) {
	ps := rdb.Subscribe(ctx)
	err := resp.Survive(func() error { return ps.Ping(ctx) }) // makes the connection
	if err != nil {
		ps.Close()
		return nil, err
	}
	return ps, nil
}

// The variable ended is a context that has already ended. PubSub sends on its connection all the
// same, until the deadline of a context derived from ended. But if the connection fails, PubSub
// returns the error, and makes no new connection, because that needs a context that lasts.
var ended = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

// send sends a command about a channel, or else PING. It does not wait for the answer.
func send(ps *redis.PubSub, command, channel string) error {
	ctx, cancel := context.WithTimeout(ended, writeTimeout)
	defer cancel()
	switch command {
	case "subscribe":
		return ps.Subscribe(ctx, channel)
	case "unsubscribe":
		return ps.Unsubscribe(ctx, channel)
	case "ssubscribe":
		return ps.SSubscribe(ctx, channel)
	case "sunsubscribe":
		return ps.SUnsubscribe(ctx, channel)
	}

	return ps.Ping(ctx)
}

// receive waits for the next message or answer, without a timeout. The result kind is "message", or
// the name of the command that the server answers. If the result err is a reply, the server has
// refused a command.
func receive(ps *redis.PubSub) (kind, channel, payload string, err error) {
	// ReceiveTimeout panics if a reply does not have the form of a message.
	var msg any
	err = resp.Survive(func() (err error) {
		msg, err = ps.ReceiveTimeout(ended, 0)
		return err
	})
	switch m := msg.(type) {
	case *redis.Message:
		return "message", m.Channel, m.Payload, nil
	case *redis.Pong:
		return "ping", "", "", nil
	case *redis.Subscription:
		return m.Kind, m.Channel, "", nil
	}

	return "", "", "", err
}
