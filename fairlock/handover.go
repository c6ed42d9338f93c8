package fairlock

import (
	"context"
	"strconv"
	"strings"
	"time"

	"github.com/hasplock/hasp/internal/redisstore"
)

// received handles a message. It is about a grant: token, round, and fence, or - if there
// can be no fence. Or it is a token and "look": the term of the holder has another end now.
func (d *Driver) received(payload string) {
	f := strings.Fields(payload)
	if len(f) == 2 && f[1] == "look" {
		d.look(f[0])
		return
	}
	if len(f) != 3 {
		return // not from hasp
	}

	d.mu.Lock()
	defer d.mu.Unlock()
	w := d.recipientLocked(f[0], f[1])
	if w == nil {
		// A grant is not lost by this. The waiter's next call finds its token in the record,
		// or the release of the token frees the key.
		return
	}

	if f[2] == "-" {
		// The script has removed the place, and has offered the key to the next waiter.
		w.failed = noFence(w.c.Key)
	} else if w.handed = w.holdOf(f[2]); w.handed == nil {
		return // not from hasp; the next poll asks the store
	}
	w.wakeUp()
}

// look makes the group of a waiter poll now. The reply schedules a poll for the end of the
// term.
func (d *Driver) look(token string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	w := d.waiters[token]
	if w == nil {
		return
	}
	w.group.pollByLocked(time.Now())
	// A poll does not ask for a waiter whose enqueue is in flight. That waiter compares gaps
	// when the reply comes, because the script may have run before the term was changed.
	w.group.sub.gaps++
}

// deliver handles the return values of handOver, from the reply to a call that was
// sent at the given time.
func (d *Driver) deliver(key string, handed fields, sent time.Time) {
	if len(handed) == 0 {
		return
	}

	// This takes mu, so it comes before the lock.
	grants, stopped := handed.split()
	d.continueHandOver(key, stopped)
	d.deliverGrants(key, grants, sent)
}

// deliverGrants is deliver for the grants alone.
func (d *Driver) deliverGrants(key string, grants fields, sent time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for len(grants) > 0 {
		n := min(4, len(grants))
		d.deliverLocked(key, grants[:n], sent)
		grants = grants[n:]
	}
}

// deliverLocked handles one grant.
func (d *Driver) deliverLocked(key string, handed fields, sent time.Time) {
	w := d.recipientLocked(handed.text(1), handed.text(2))
	if w == nil {
		return
	}

	hold := w.holdOf(handed.text(3))
	switch {
	case handed.int(0) == -1:
		w.failed = noFence(key)
	case handed.int(0) != 1 || hold == nil:
		w.failed = d.store.Unexpected(handed)
	default:
		// This call itself handed the key over, so the hold began after it was sent.
		if sent.After(w.notBefore) {
			w.notBefore = sent
		}
		w.handed = hold
	}
	w.wakeUp()
}

// recipientLocked returns the waiter to which the key was handed over in that
// round. It returns nil if the waiter is gone, knows already, or has begun another
// round since.
func (d *Driver) recipientLocked(token, round string) *waiter {
	w := d.waiters[token]
	if w == nil || strconv.Itoa(w.round) != round || w.handed != nil {
		return nil
	}
	return w
}

// holdOf returns a hold with that fence, or nil if w cannot have such a hold.
func (w *waiter) holdOf(fence string) *handedOver {
	n, err := strconv.ParseUint(fence, 10, 64)
	if err != nil || w.c.Fenced && n == 0 {
		return nil
	}
	return &handedOver{fence: n}
}

// continueTimeout bounds a call that no caller waits for.
const continueTimeout = 3 * time.Second

// continueHandOver goes on with a hand-over that stopped within a long queue. If it
// fails, the polls of the waiters hand the key over.
func (d *Driver) continueHandOver(key string, handed fields) {
	if handed.int(0) == 2 && d.begin() {
		go d.goThroughQueue(key, handed)
	}
}

// goThroughQueue makes the calls of continueHandOver.
func (d *Driver) goThroughQueue(key string, handed fields) {
	defer d.background.Done()

	// After Close has begun, the polls of other Clients go on with a long queue. A
	// call in flight may still end, because it uses calls and not open.
	for handed.int(0) == 2 && d.open.Err() == nil {
		ctx, cancel := context.WithTimeout(d.calls, continueTimeout)
		sent := time.Now()

		// The poll has no entries, so it keeps no place alive. A grant for the channel
		// of this Driver comes with the reply.
		reply, err := d.store.Run(ctx, pollScript,
			d.call(key, noCommand, d.channelFor(key), redisstore.Millis(d.window), handed.int(1), handed.text(2)))
		cancel()

		r, ok := reportOf(reply)
		if err != nil || !ok {
			// The script may have run. Then the waiter finds the grant at its next poll.
			return
		}
		// deliver would begin a second loop.
		var grants fields
		grants, handed = r.handed.split()
		d.deliverGrants(key, grants, sent)
	}
}

// channelFor returns the channel of this Driver's waiters for key, or an empty
// string if there are none.
func (d *Driver) channelFor(key string) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	if g := d.groups[key]; g != nil {
		return g.sub.channel
	}
	return ""
}
