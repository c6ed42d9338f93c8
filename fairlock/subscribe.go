package fairlock

import (
	"context"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
	"github.com/hasplock/hasp/internal/redisstore/pubsub"
)

// noCommand replaces the publishing command in the calls of a client that has no subscription,
// because its user may not subscribe, or the server accepts no more connections. The client's
// waiters keep their places, and the client polls.
const noCommand = "-"

// subscribeWithin is the longest time that a waiter without a place waits for a subscription.
const subscribeWithin = time.Second

// subscription is this driver's use of a channel. Scripts publish on the channel for all keys that
// have this channel.
type subscription struct {
	channel  string
	command  string // the command that publishes on channel
	listener *pubsub.Listener

	// The driver's mu guards these.
	waiters int // how many waiters use the subscription
	gaps    int // how often a message may have been missed, or may have overtaken a reply
}

// receives returns the command that publishes on s, or noCommand if the Client receives no
// messages.
func (s *subscription) receives() string {
	if s.listener.Command() == s.command {
		return s.command
	}
	return noCommand
}

// subscribe returns the subscription to the channel of c.Key, and counts one more waiter
// for it. It blocks until the server confirms the subscription, but no longer than a third
// of c.Timeout, and no longer than subscribeWithin.
func (d *driver) subscribe(ctx context.Context, c backend.Claim) *subscription {
	channel := d.store.Channel("grant:"+d.id, c.Key)
	if s := d.shareSubscription(channel, nil); s != nil {
		return s
	}

	// Leave most of the time for the enqueue.
	ctx, cancel := context.WithTimeout(ctx, min(c.Timeout/3, subscribeWithin))
	defer cancel()

	// Ignore the error, because the listener retries. Until it succeeds, s.receives() returns
	// noCommand, so the waiters poll.
	s := &subscription{channel: channel, command: "PUBLISH"}
	s.listener, _ = d.store.Subscribe(ctx, channel, redisstore.LockKey(c.Key), func(payload string, gap bool) {
		if gap {
			d.messagesMissed(s)
		} else {
			d.received(payload)
		}
	})

	if d.store.Sharded(ctx, redisstore.LockKey(c.Key)) {
		s.command = "SPUBLISH"
	}

	// Another waiter may have subscribed meanwhile.
	shared := d.shareSubscription(channel, s)
	if shared != s {
		s.listener.Close()
	}
	return shared
}

// shareSubscription returns the subscription to channel, and counts one more waiter for it. If
// there is no subscription, shareSubscription stores and returns s, which may be nil.
func (d *driver) shareSubscription(channel string, s *subscription) *subscription {
	d.mu.Lock()
	defer d.mu.Unlock()

	// Find and count in one step, so that unsubscribe cannot close the subscription in between.
	if first := d.subscriptions[channel]; first != nil {
		s = first
	}
	if s != nil {
		d.subscriptions[channel] = s
		s.waiters++
	}

	return s
}

// unsubscribe ends one waiter's use of the subscription s.
func (d *driver) unsubscribe(s *subscription) {
	d.mu.Lock()
	s.waiters--
	last := s.waiters == 0
	if last {
		delete(d.subscriptions, s.channel)
	}
	d.mu.Unlock()

	// mu need not be held here, because no waiter can find s any more.
	if last {
		s.listener.Close()
	}
}

// messagesMissed makes all groups of the subscription s poll, because s was interrupted.
func (d *driver) messagesMissed(s *subscription) {
	d.mu.Lock()
	defer d.mu.Unlock()

	// The poll leaves out waiters whose enqueue is in flight. Raise s.gaps, so that
	// (*waiter).enqueued polls for these waiters when the reply arrives.
	s.gaps++
	now := time.Now()
	for _, g := range d.groups {
		if g.sub == s {
			g.pollByLocked(now)
		}
	}
}
