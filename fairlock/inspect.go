package fairlock

import (
	"context"
	"strconv"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

// Inspect returns the holder of key, or its shared holders, the start of the hold, and the waiters in
// order. For a holder of another strategy, Owner and Since are zero.
func (d *Driver) Inspect(ctx context.Context, key string) (backend.Status, error) {
	call := d.call(key)
	reply, err := d.store.Run(ctx, inspectScript, redisstore.Call{Keys: call.Keys})
	if err != nil {
		return backend.Status{}, err
	}

	r := fieldsOf(reply)
	if len(r) < 5 || r.int(0) < -2 || !r.isText(3) || r.int(4) < 0 || r.int(4) > int64(len(r)-5) {
		return backend.Status{}, d.store.Unexpected(reply)
	}

	var s backend.Status
	if pttl := r.int(0); pttl != -2 {
		s.Held, s.Owner, s.TTL = true, r.text(1), redisstore.Term(pttl)
		// A record of another strategy has no start.
		if ms, err := strconv.ParseInt(r.text(2), 10, 64); err == nil {
			s.Since = time.UnixMilli(ms)
		}
	}
	// A counter that hasp did not write counts as none.
	s.Fence, _ = strconv.ParseUint(r.text(3), 10, 64)
	waiters := 5 + int(r.int(4))
	for i := 5; i < waiters; i++ {
		s.Shared = append(s.Shared, r.text(i))
	}
	for i := waiters; i < len(r); i++ {
		s.Waiters = append(s.Waiters, r.text(i))
	}

	return s, nil
}

// Break removes whatever is stored under key, and hands the key to the next
// waiter.
func (d *Driver) Break(ctx context.Context, key string) error {
	reply, err := d.store.Run(ctx, breakScript, d.call(key))
	if err != nil {
		return err
	}

	// The hold is gone, whatever the reply says of the hand-over.
	if r := fieldsOf(reply); len(r) > 0 {
		d.continueHandOver(key, r[1:])
	}
	return nil
}
