package fairlock

import (
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/hasplock/hasp/internal/redisstore"
)

// received handles a message. A message about a grant contains a token, a round, and a fence, which
// is - if no fence could be granted. A message with a token and "look" asks the Client to poll. A
// script may publish an empty message, to count the subscribers.
func (d *driver) received(payload string) {
	f := strings.Fields(payload)
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(f) == 0 || d.waiters[f[0]] == nil {
		// Ignore the message, because no waiter has its token. If it is a grant, the waiter's next
		// call finds the token in the record, or the release of the token frees the key.
		return
	}

	w := d.waiters[f[0]]
	switch {
	case w.handed != nil:
	case len(f) != 3 || f[1] != strconv.Itoa(w.round) || w.unsure:
		// Poll if the message asks for a poll, is about another round, or may be about an earlier
		// hold because an enqueue of this round was not answered. The reply to the poll schedules
		// another poll for the end of the term.
		w.group.pollByLocked(time.Now())
		// The poll leaves out a waiter whose enqueue is in flight. That enqueue may have run before
		// this message. Raise sub.gaps, so that (*waiter).enqueued polls when the reply arrives.
		w.group.sub.gaps++
	case f[2] == "-":
		// The script has removed the place, and has offered the key to the next waiter.
		w.failed = redisstore.NoFence(w.group.keys[1])
		w.wakeUpLocked()
	default:
		if w.handed = w.holdOf(f[2]); w.handed != nil { // otherwise the message is not from hasp
			w.wakeUpLocked()
		}
	}
}

// deliver handles the grants in the argument handed, which the script's function handOver returned.
// The argument sent is the time at which the call of the script was sent.
func (d *driver) deliver(handed []any, sent time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for grant := range slices.Chunk(handed, 4) {
		d.deliverLocked(grant, sent)
	}
}

// deliverLocked handles one grant.
func (d *driver) deliverLocked(grant []any, sent time.Time) {
	var kind int64
	var token, round, fence string
	_, ok := decode(grant, &kind, &token, &round, &fence)
	w := d.waiters[token]
	if w == nil || strconv.Itoa(w.round) != round || w.handed != nil {
		return // the wait has ended, w already has the grant, or w is in another round
	}

	hold := w.holdOf(fence)
	switch {
	case kind == -1:
		w.failed = redisstore.NoFence(w.group.keys[1])
	case !ok || hold == nil:
		w.failed = d.store.Unexpected(grant)
	default:
		// This call itself has handed the key over, so the hold began after the call was sent.
		if sent.After(w.notBefore) {
			w.notBefore = sent
		}
		w.handed = hold
	}
	w.wakeUpLocked()
}

// holdOf returns a hold with the given fence, or nil if no hold of w can have that fence.
func (w *waiter) holdOf(fence string) *handedOver {
	n, err := strconv.ParseUint(fence, 10, 64)
	if err != nil || w.c.Fenced && n == 0 {
		return nil
	}
	return &handedOver{fence: n}
}
