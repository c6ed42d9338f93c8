package redlock

import (
	"strconv"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

// hold is what this driver knows about one record on the nodes, from the attempt to take the key
// until the record is gone.
//
// Each attempt has a record of its own, token#owner or token~n#owner, so that the clean-up of
// one attempt never removes a vote for another attempt with the same token.
type hold struct {
	c      backend.Claim
	record string
	prefix string    // the start of the record; no record of another attempt begins with it
	again  bool      // earlier attempts may have had the same token
	lead   int       // the node that the attempt asked first, or noLead
	began  time.Time // when the attempt began, by members.now

	// The mutex of holds guards the fields below.
	on       []copyOn  // one element for each node
	fence    uint64    // the fence of the hold; 0 if the hold has none
	failed   bool      // the token holds nothing, so each node must release the record
	released bool      // release was called, so no command may write the record again
	expiry   time.Time // when every node's record has expired, and all commands for it have ended
}

// copyOn is what this driver knows about the record on one node, and about its release there.
//
// The record counts for a renewal if the node's vote counted, and the node has had the record ever
// since. Not every record that a node has counts. Suppose that the record expired, the node voted
// for another caller, and then lost that vote with its data. If a late command stored the record
// again, both callers would count the node (see RENEW_ANYWHERE in lab/model/redlock.pml).
//
// A record that does not count is repaired after a renewal. Then it counts, if at least attemptTime
// of a term that a quorum has granted was left. This is safe even if the node has voted for another
// caller before. That caller's attempt wins only with answers that are at most attemptTime old. So
// it must win before the term ends, and until then the other nodes of the quorum vote no.
type copyOn struct {
	mayHold   bool          // the node may have the record
	mayArrive bool          // a command of unknown outcome may still write the record
	inFlight  chan struct{} // closed when the command that writes the record has ended; or nil
	proposal  uint64        // the fence that the node has proposed

	countsUntil time.Time // until when the record counts for renewals, if the node keeps its data
	lost        time.Time // when the last renewal that did not find the record began
}

// removal is the release of a record on one node.
type removal struct {
	n       *node
	claim   backend.Claim
	prefix  string    // the start of the record
	channel string    // where the release is published; empty if it is not
	until   time.Time // when the record will have expired on the node

	// A command of unknown outcome may write the record after the first release. So the node must
	// also answer a second release, which is sent a Timeout later. At that time, the connection of
	// that command is dead, so the record cannot return.
	answers int // how many releases must still be answered
}

// newHold returns the hold of an attempt that begins now. The first attempt with c's token has
// number 0.
func newHold(c backend.Claim, number, lead int, m *members) *hold {
	h := &hold{c: c, again: number > 0, lead: lead, began: m.now()}
	h.on = make([]copyOn, len(m.nodes))
	h.prefix = c.Token + redisstore.Mark
	if h.again {
		h.prefix = c.Token + "~" + strconv.Itoa(number) + redisstore.Mark
	}
	h.record = h.prefix + c.Owner

	// The record lasts for the TTL from when it is written. That may be three Timeouts late: one
	// for the lead's vote, one for the votes of the other nodes, and one for a command of unknown
	// outcome to arrive.
	h.expiry = h.began.Add(c.TTL + 3*c.Timeout)
	return h
}

// foundHold returns a hold of c that this driver does not know, such as one of an earlier process.
// Its records begin with prefix. The hold does not have the full record.
func foundHold(c backend.Claim, prefix string, m *members) *hold {
	h := newHold(c, 1, noLead, m) // not 0, because other attempts may have had the token
	h.prefix = prefix
	for i := range h.on {
		h.on[i].mayHold = true // because any node may have the record
	}
	return h
}

// counting returns how many nodes have a record of h that counts at the given time.
func (h *hold) counting(at time.Time) (n int) {
	for _, on := range h.on {
		if at.Before(on.countsUntil) {
			n++
		}
	}

	return n
}

// channelOf returns the start of the names of the channels to which a release of key publishes.
func channelOf(key string) string { return redisstore.DerivedKey("channel", key) }

// keysOf returns the Redis keys of the lock on key and of its queue: the waiters' arrivals, their
// last looks, and the sign that callers wait. The sign is a string, so that a release can read it
// together with the record.
func keysOf(key string) []string {
	return []string{
		redisstore.LockKey(key),
		redisstore.DerivedKey("turns", key),
		redisstore.DerivedKey("looks", key),
		redisstore.DerivedKey("waits", key),
	}
}
