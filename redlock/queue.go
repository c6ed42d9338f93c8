package redlock

import (
	"cmp"
	"context"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
	"github.com/hasplock/hasp/internal/redisstore/resp"
)

// The waiters of a key stand in a queue on the lead, the node that contended attempts ask first.
// The lead refuses a free key to a caller if another caller has waited longer. A release wakes the
// first waiter of the queue, and all readers, which do not stand in the queue.
//
// The order is not guaranteed, because the queue can only let the lead refuse a caller. Some
// callers do not stand in the queue, and may acquire the key first: callers that chose another
// lead, callers that have met no contention, and redsync. When the lead changes, waiters keep their
// order, because each waiter tells the new lead how long it has waited.
//
// Other designs were worse. Without a queue, a release woke all waiters, which cost 100 to 180
// commands for each hold with 64 Clients. Queues on several nodes could disagree on the first
// waiter. A single channel for all waiters halved the rate of holds.

// lookEvery is the longest time between two looks of a waiter. A look is an attempt that asks the
// lead, and keeps the waiter's place. If a waiter has not looked for a second, it loses its place
// (see window in turns.lua).
const lookEvery = 300 * time.Millisecond

// queueKeys returns the keys of the waiters' arrivals, of their last looks, and of the sign that
// callers wait. The sign is a string, so that a release can read it together with the record.
func queueKeys(key string) []string {
	return []string{redisstore.DerivedKey("turns", key), redisstore.DerivedKey("looks", key), redisstore.DerivedKey("waits", key)}
}

// queueState contains what the lead learns about the caller, and the lead's answer.
type queueState struct {
	waiter string    // the name in the queue; empty for a caller that does not queue
	since  time.Time // when the waiter arrived

	answer atomic.Int32 // the lead's answer
	intent atomic.Int64 // what is left, in ms, of the intent that made a node refuse this reader; or 0
}

// These are the answers of the lead. queue.lua returns the number of a refusal minus one.
const (
	unanswered  int32 = iota
	behind            // the lead votes no, and another caller has waited longer
	next              // the lead votes no, and no other caller has waited longer
	behindFree        // like behind, but the key is free on the lead
	nextReaders       // like next, and readers hold the key on the lead
	leadYes           // the lead votes yes, and the waiter has left the queue
)

// sendPlain asks for a vote by plain commands, which cost the server less than a script. The
// commands are sent together over one connection, so one run of one server executes them in order.
// If the node loses its data after the SET, the GET does not find the mark that the driver knows.
func (n *node) sendPlain(ctx context.Context, a *attempt) (v vote, id identity, err error) {
	commands := a.commands
	if n.store.NamesRun() {
		commands = commands[:2] // without INFO
	}
	replies := n.store.DoAll(ctx, commands...)
	set, get, last := replies[0], replies[1], replies[len(replies)-1]
	id.mark, _ = get.Value.(string)
	id.run = cmp.Or(last.Run, runOf(last.Value))

	switch {
	case set.Err != nil:
		return voteAfter(set.Err), id, set.Err
	case set.Value == nil:
		return no, id, nil // the vote no counts whatever the mark is, because it gives the key to nobody
	case set.Value != "OK":
		return unknown, id, n.store.Unexpected(set.Value)
	case get.Err != nil || last.Err != nil:
		return unknown, id, cmp.Or(get.Err, last.Err) // the record is there, but the vote cannot be checked
	}
	return yes, id, nil
}

// sendAcquire sends the commands or the script that take the key. It returns the vote, the proposed
// fence if the claim is fenced, and the identity of the server that voted. The script for the lead
// also maintains the queue. A reader has no lead.
func (n *node) sendAcquire(ctx context.Context, a *attempt) (v vote, fence uint64, id identity, err error) {
	if !a.c.Fenced && !a.c.Shared && n.i != a.lead {
		v, id, err = n.sendPlain(ctx, a)
		// A server that cannot write, for example because it has no memory left, refuses SET even
		// if the key is held. Only the script finds out whether the key is held.
		if v != failed || !resp.IsReply(err) {
			return v, 0, id, err
		}
	}
	counterTTL := ""
	if a.c.Fenced {
		counterTTL = redisstore.Millis(n.d.opts.FenceTTL)
	}
	script, call := acquireScript, redisstore.Call{
		Keys: []string{a.lockKey, redisstore.DerivedKey("fence", a.c.Key), markKey},
		Args: []string{a.record, redisstore.Millis(a.c.TTL), counterTTL},
	}
	switch {
	case a.c.Shared:
		script = joinScript
		call.Keys = append(call.Keys, redisstore.IntentKey(a.c.Key), queueKeys(a.c.Key)[2])
		call.Args = append(call.Args, a.place.waiter)
	case n.i == a.lead:
		script = leadScript
		call.Keys = append(call.Keys, queueKeys(a.c.Key)...)
		waited := "0"
		if a.place.waiter != "" {
			waited = strconv.FormatInt(time.Since(a.place.since).Milliseconds(), 10)
		}
		call.Args = append(call.Args, a.place.waiter, waited)
	}
	reply, err := n.store.Run(ctx, script, call)
	if err != nil {
		v = voteAfter(err)
		if n.i == a.lead && v == failed {
			n.d.shun(a.c.Key, n.i) // this node cannot keep the queue, so no waiter would be woken
		}
		return v, 0, id, err
	}

	parts, _ := reply.([]any)
	switch {
	case len(parts) == 4 && parts[0] == int64(1):
		text, _ := parts[1].(string)
		mark, ok := parts[2].(string)
		fence, err = strconv.ParseUint(text, 10, 64)
		if ok && err == nil && (fence > 0) == a.c.Fenced && fence <= maxFence {
			if n.i == a.lead {
				a.place.answer.Store(leadYes)
			}
			return yes, fence, identity{run: runOf(parts[3]), mark: mark}, nil
		}
	case len(parts) >= 2 && parts[0] == int64(0):
		mark, ok := parts[1].(string)
		if ok && n.refuses(a, parts[2:]) {
			return no, 0, identity{mark: mark}, nil
		}
	case len(parts) == 1 && parts[0] == int64(-1):
		if n.i == a.lead {
			n.d.shun(a.c.Key, n.i)
		}
		return failed, 0, id, n.noFence(a.c.Key)
	}
	// The outcome is unknown, because a script with an unexpected reply may have taken the key.
	return unknown, 0, id, n.store.Unexpected(reply)
}

// refuses stores in a.place what a node has answered to a caller that it refused. The result is
// false if the script never answers this.
func (n *node) refuses(a *attempt, says []any) bool {
	p := a.place
	if n.i != a.lead {
		if len(says) == 0 {
			return true
		}
		rest, _ := says[0].(int64)
		if len(says) != 1 || !a.c.Shared || rest <= 0 {
			return false
		}
		// Several nodes may set p.intent at once. Any of their values will do, because a writer
		// repeats all of its intents.
		p.intent.Store(rest)
		return true
	}

	if len(says) != 1 {
		return false
	}
	answer, ok := says[0].(int64)
	if !ok || answer < 0 || answer >= int64(leadYes)-1 {
		return false
	}
	p.answer.Store(int32(answer) + 1)
	return true
}

// leave starts a goroutine that removes a waiter from the queue on node i. If the key is free, the
// node wakes the next waiter. If the removal fails, or a vote in flight queues the waiter again,
// the waiter's place ends a second after its last look.
func (d *driver) leave(i int, c backend.Claim, waiter string) {
	d.spawn(func() {
		_, _ = d.nodes[i].ask(c.Timeout, leaveScript, redisstore.Call{
			Keys: append([]string{redisstore.LockKey(c.Key)}, queueKeys(c.Key)...),
			Args: []string{waiter, redisstore.DerivedKey("channel", c.Key)},
		})
	})
}
