package fairlock

import (
	"context"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

// waiters holds the waiters of a driver, for all keys. They share its channels and its polls.
type waiters struct {
	scripts *runner
	store   *redisstore.Store
	life    *life
	window  time.Duration // Options.Window
	subs    *subscriptions

	// mu guards the fields below, and the fields of group, subscription and waiter whose comments
	// say so. It is not held during a call to Redis.
	mu      sync.Mutex
	groups  map[string]*group  // by key
	byToken map[string]*waiter // by token
}

// newWaiters returns an empty set of waiters, whose places last for window without a poll.
func newWaiters(r *runner, l *life, window time.Duration) *waiters {
	ws := &waiters{
		scripts: r, store: r.store, life: l, window: window,
		groups: map[string]*group{}, byToken: map[string]*waiter{},
	}
	ws.subs = newSubscriptions(r.store, ws.receive, ws.noteGap)
	return ws
}

// newWaiter returns a waiter that is not in the queue yet. The key is handed to it for Window at
// most, so that a waiter that has died does not block the queue for a long TTL.
func (ws *waiters) newWaiter(c backend.Claim) *waiter {
	return &waiter{
		ws: ws, c: c, term: min(c.TTL, ws.window), wake: make(chan struct{}, 1), round: 1,
	}
}

// join subscribes to the channel of w's key, which may take a while (see subscriptions.add). Then
// it adds w to the group of the key.
func (ws *waiters) join(ctx context.Context, w *waiter) {
	s := ws.subs.add(ctx, w.c) // may call the server, so mu must not be held

	ws.mu.Lock()
	defer ws.mu.Unlock()
	g := ws.groups[w.c.Key]

	// If there is a group, it has the subscription s as well. The method leave removes a group
	// before it removes the group's subscription. So the subscription of a group is in ws.subs, and
	// add returns it.
	if g == nil {
		g = &group{
			ws: ws, key: w.c.Key, keys: keysOf(w.c.Key), sub: s, waiters: map[string]*waiter{},
		}
		ws.groups[g.key] = g
	}

	w.group = g
	g.waiters[w.c.Token] = w
	ws.byToken[w.c.Token] = w
}

// leave removes w from its group, and ends its use of the subscription. If w was the group's last
// waiter, the group ends. If w has not joined a group, leave does nothing.
func (ws *waiters) leave(w *waiter) {
	g := w.group
	if g == nil {
		return
	}

	ws.mu.Lock()
	delete(ws.byToken, w.c.Token)
	delete(g.waiters, w.c.Token)
	if len(g.waiters) == 0 {
		delete(ws.groups, g.key)
		g.stopLocked()
	}

	ws.mu.Unlock()

	// End the subscription after the group, so that every group in ws.groups has a subscription.
	ws.subs.remove(g.sub)
}

// stop stops the polls of all groups.
func (ws *waiters) stop() {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	for _, g := range ws.groups {
		g.stopLocked()
	}
}

// receive handles a message. A message about a grant contains a token, a round, and a fence, which
// is - if no fence could be granted. A message with a token and "look" asks the client to poll. A
// script may publish an empty message, to count the subscribers.
func (ws *waiters) receive(payload string) {
	f := strings.Fields(payload)
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if len(f) == 0 || ws.byToken[f[0]] == nil {
		// Ignore the message, because it is empty, or no waiter has its token. If it is a grant,
		// its wait has ended. Then the release of the token frees the key, or another Wait with the
		// token finds the token in the record.
		return
	}

	w := ws.byToken[f[0]]
	switch {
	case w.handed != nil: // w has the key already
	case len(f) != 3 || f[1] != strconv.Itoa(w.round) || w.unsure:
		// The message asks for a poll, or it is no certain grant: it is about another round, or it
		// may be about a hold that has ended, because an enqueue of this round was not answered. So
		// poll. The poll finds the hold, if there is one. Its reply schedules another poll for the
		// end of the holder's term.
		w.group.pollByLocked(time.Now())
		// The poll leaves out a waiter whose enqueue is in flight. That enqueue may have run before
		// this message. Raise sub.gaps, so that (*waiter).noteEnqueue polls when the reply arrives.
		w.group.sub.gaps++
	case f[2] == "-":
		// There is no fence for w. The script has removed its place, and offered the key to the
		// next waiter. So end the wait.
		w.failure = redisstore.NoFence(w.group.keys[1])
		w.wakeUpLocked()
	default:
		w.handed = w.holdOf(f[2])
		if w.handed != nil { // otherwise the message is not from hasp
			w.wakeUpLocked()
		}
	}
}

// deliver handles the grants in the argument handed, which the script's function handOver returned:
// four elements for each grant. The argument sent is the time at which the call of the script was
// sent.
func (ws *waiters) deliver(handed []any, sent time.Time) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	for grant := range slices.Chunk(handed, 4) {
		ws.deliverLocked(grant, sent)
	}
}

// deliverLocked handles one grant: it gives its waiter the hold, or ends the wait.
func (ws *waiters) deliverLocked(grant []any, sent time.Time) {
	var kind int64
	var token, round, fence string
	_, ok := decode(grant, &kind, &token, &round, &fence)
	w := ws.byToken[token]
	if w == nil || strconv.Itoa(w.round) != round || w.handed != nil {
		return // the wait has ended, w is in another round, or w has the key already
	}

	hold := w.holdOf(fence)
	switch {
	case kind == -1: // there is no fence for w
		w.failure = redisstore.NoFence(w.group.keys[1])
	case !ok || hold == nil:
		w.failure = ws.store.Unexpected(grant)
	default:
		// The script has handed the key over in this call, so the hold began after the call was
		// sent.
		if sent.After(w.notBefore) {
			w.notBefore = sent
		}
		w.handed = hold
	}

	w.wakeUpLocked()
}

// noteGap makes all groups of the subscription s poll, because s was interrupted, so that messages
// may have been missed.
func (ws *waiters) noteGap(s *subscription) {
	ws.mu.Lock()
	defer ws.mu.Unlock()

	// The poll leaves out waiters whose enqueue is in flight. Raise s.gaps, so that
	// (*waiter).noteEnqueue polls for these waiters when the reply arrives.
	s.gaps++
	now := time.Now()
	for _, g := range ws.groups {
		if g.sub == s {
			g.pollByLocked(now)
		}
	}
}
