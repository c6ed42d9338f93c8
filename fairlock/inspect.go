package fairlock

import (
	"context"
	"iter"
	"strconv"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

// maxWaiters is how many entries of a queue a report reads, so that a long queue does not block the
// server.
const maxWaiters = "1000"

// reportOn returns the call of inspectScript for key.
func reportOn(key string) redisstore.Call {
	keys := keysOf(key)
	return redisstore.Call{Keys: keys[:], Args: []string{maxWaiters}}
}

// Inspect returns the holder or the shared holders of key, the start of the hold, and the first
// waiters in order. If the holder uses another strategy, Owner and Since are zero.
func (d *driver) Inspect(ctx context.Context, key string) (backend.Status, error) {
	reply, err := d.store.Run(ctx, inspectScript, reportOn(key))
	if err != nil {
		return backend.Status{}, err
	}

	s, _, err := d.status(reply)
	return s, err
}

// status decodes the reply of inspect.lua, and reports whether the record is fairlock's or shared.
func (d *driver) status(reply any) (s backend.Status, own bool, err error) {
	var pttl, shared int64
	var since, fence string
	names, ok := decode(reply, &pttl, &s.Owner, &since, &fence, &shared)
	s.Kept = shared == -1
	if !ok || pttl < -2 || shared < -1 || shared > int64(len(names)) {
		return backend.Status{}, false, d.store.Unexpected(reply)
	}

	if pttl != -2 {
		s.Held, s.TTL = true, redisstore.Term(pttl)
		// Only a record of fairlock contains a start.
		if ms, err := strconv.ParseInt(since, 10, 64); err == nil {
			s.Since, own = time.UnixMilli(ms), pttl >= 0
		}
	}
	// Ignore a counter that hasp did not write.
	s.Fence, _ = strconv.ParseUint(fence, 10, 64)
	for i, name := range names {
		owner, _ := name.(string)
		if int64(i) < shared {
			s.Shared = append(s.Shared, owner)
		} else {
			s.Waiters = append(s.Waiters, owner)
		}
	}

	return s, own || shared > 0, nil
}

// records says how List finds the holds and the queues.
var records = redisstore.Listing{
	Type:  "string",
	Peek:  []string{"getrange", "0", "9"},
	Ours:  func(begin any) bool { return begin == "fairlock- " || begin == "fairlock+ " },
	Queue: "timeouts",
}

// List returns the keys with a record of fairlock, with shared holds, or with waiters. If another
// strategy or program holds a key with waiters, the entry has no Owner.
func (d *driver) List(ctx context.Context, prefix string,
	timeout time.Duration) iter.Seq2[backend.Entry, error] {
	return d.store.ListBy(ctx, prefix, timeout, redisstore.Reading{
		Listing: records,
		Script:  inspectScript,
		Call:    func(c redisstore.Candidate) redisstore.Call { return reportOn(c.Key) },
		Status: func(c redisstore.Candidate, reply any) (backend.Status, bool, error) {
			s, own, err := d.status(reply)
			// A key with both a record and a queue is found twice, but is listed once.
			return s, own != c.Queued && (own || len(s.Waiters) > 0), err
		},
	})
}

// Break removes whatever is stored under key, and hands the key to the next waiter.
func (d *driver) Break(ctx context.Context, key string) error {
	// Ignore the reply, because the hold is gone in any case.
	_, err := d.run(ctx, breakScript, key)
	return err
}
