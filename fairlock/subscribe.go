package fairlock

import (
	"cmp"
	"context"
	"crypto/rand"
	"sync"
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

// subscription is this driver's use of one channel, on which scripts publish messages for its
// waiters. On a cluster, keys of different slots have different channels.
type subscription struct {
	channel  string
	command  string // the command that publishes on channel
	listener *pubsub.Listener

	uses int // how many waiters use the subscription; the mu of subscriptions guards it
	// how often a message may have been missed, or may have come before the reply to an enqueue;
	// the mu of waiters guards it
	gaps int
}

// receives returns the command by which scripts must publish on s, or noCommand if this client
// receives no messages by that command.
func (s *subscription) receives() string {
	if s.listener.Command() == s.command {
		return s.command
	}
	return noCommand
}

// subscriptions holds the subscriptions of a driver.
type subscriptions struct {
	store    *redisstore.Store
	id       string               // part of the names of this driver's channels
	received func(payload string) // is called for each message of any subscription
	missed   func(*subscription)  // is called when messages may have been missed

	mu        sync.Mutex               // guards byChannel and the uses of the subscriptions
	byChannel map[string]*subscription // by channel
}

// newSubscriptions returns an empty set of subscriptions to channels of s. The functions received
// and missed are those of the fields.
func newSubscriptions(s *redisstore.Store, received func(string),
	missed func(*subscription)) *subscriptions {
	return &subscriptions{
		store: s, id: rand.Text(), received: received, missed: missed,
		byChannel: map[string]*subscription{},
	}
}

// add returns the subscription to the channel of c.Key, and counts one more waiter for it. If there
// is none, add subscribes, and blocks until the server confirms that, but no longer than a third of
// c.Timeout, and no longer than subscribeWithin.
func (ss *subscriptions) add(ctx context.Context, c backend.Claim) *subscription {
	channel := ss.store.Channel("grant:"+ss.id, c.Key)
	if s := ss.share(channel, nil); s != nil {
		return s
	}

	// Leave most of the Timeout for the enqueue that follows.
	ctx, cancel := context.WithTimeout(ctx, min(c.Timeout/3, subscribeWithin))
	defer cancel()

	// Ignore the error, because the listener retries. Until it succeeds, s.receives() returns
	// noCommand, so the waiters poll.
	s := &subscription{channel: channel, command: "PUBLISH"}
	s.listener, _ = ss.store.Subscribe(ctx, channel, redisstore.LockKey(c.Key),
		func(payload string, gap bool) {
			if gap {
				ss.missed(s)
			} else {
				ss.received(payload)
			}
		})

	if ss.store.Sharded(ctx, redisstore.LockKey(c.Key)) {
		s.command = "SPUBLISH" // for a cluster whose servers know sharded channels
	}

	// Another waiter may have subscribed meanwhile. Then use its subscription, and end this one.
	shared := ss.share(channel, s)
	if shared != s {
		s.listener.Close()
	}
	return shared
}

// share returns the subscription to channel, and counts one more waiter for it. If there is no such
// subscription, share stores the subscription fresh, and returns that. If fresh is nil as well,
// share returns nil.
func (ss *subscriptions) share(channel string, fresh *subscription) *subscription {
	ss.mu.Lock()
	defer ss.mu.Unlock()

	// Find and count in one step, so that remove cannot close the subscription in between.
	s := cmp.Or(ss.byChannel[channel], fresh)
	if s != nil {
		ss.byChannel[channel] = s
		s.uses++
	}

	return s
}

// remove ends one waiter's use of the subscription s. The last one closes the subscription.
func (ss *subscriptions) remove(s *subscription) {
	ss.mu.Lock()
	s.uses--
	isUnused := s.uses == 0
	if isUnused {
		delete(ss.byChannel, s.channel)
	}
	ss.mu.Unlock()

	// Close s without holding mu, because no waiter can find s any more.
	if isUnused {
		s.listener.Close()
	}
}
