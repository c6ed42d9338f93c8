package fairlock

import (
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

// statusOf decodes the reply of inspect.lua. The result own says whether the record is fairlock's
// or shared, and ok whether the reply is valid.
func statusOf(reply any) (s backend.Status, own, ok bool) {
	var pttl int64   // -2 if the key is free, and -1 if the record has no end
	var shared int64 // how many of names hold the key together; -1 if the record is kept
	var since, fence string
	names, ok := decode(reply, &pttl, &s.Owner, &since, &fence, &shared)
	isCount := shared >= -1 && shared <= int64(len(names))
	if !ok || pttl < -2 || !isCount {
		return backend.Status{}, false, false
	}

	s.Kept = shared == -1
	if pttl != -2 {
		s.Held = true
		s.TTL = redisstore.Term(pttl)
		// Only a record of fairlock contains a start, and it always has an end.
		if ms, err := strconv.ParseInt(since, 10, 64); err == nil {
			s.Since = time.UnixMilli(ms)
			own = pttl >= 0
		}
	}

	// Ignore the error of a counter that hasp did not write.
	s.Fence, _ = strconv.ParseUint(fence, 10, 64)
	// The shared holders come before the waiters.
	for i, name := range names {
		owner, _ := name.(string)
		if int64(i) < shared {
			s.Shared = append(s.Shared, owner)
		} else {
			s.Waiters = append(s.Waiters, owner)
		}
	}

	return s, own || shared > 0, true
}

// records says how List finds the holds and the queues: by the values that begin like a record, and
// by the sorted sets of timeouts.
var records = redisstore.Listing{
	Type:  "string",
	Peek:  []string{"getrange", "0", "9"},
	Ours:  func(begin any) bool { return begin == "fairlock- " || begin == "fairlock+ " },
	Queue: "timeouts",
}
