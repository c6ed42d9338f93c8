package pubsublock

import (
	"context"
	"strconv"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

// found is what inspect.lua returns.
type found struct {
	pttl         int64
	field, fence string
}

func decode(reply any) (found, bool) {
	parts, _ := reply.([]any)
	if len(parts) != 3 {
		return found{}, false
	}
	pttl, ok1 := parts[0].(int64)
	field, ok2 := parts[1].(string)
	fence, ok3 := parts[2].(string)
	return found{pttl, field, fence}, ok1 && ok2 && ok3
}

// held is the error of a key that is held as f says.
func (f found) held() error {
	e := &backend.HeldError{Owner: owner(f.field)}
	if f.pttl >= 0 {
		e.RetryAfter = time.Duration(max(f.pttl, 1)) * time.Millisecond
	}
	return e
}

// Inspect tells who holds key. The record has no room for Since, and nothing
// says who waits; a holder that is not of hasp has no Owner.
func (d *Driver) Inspect(ctx context.Context, key string) (backend.Status, error) {
	reply, err := d.store.Run(ctx, inspectScript, redisstore.Call{
		Keys: []string{redisstore.LockKey(key), redisstore.DerivedKey("fence", key)},
	})
	if err != nil {
		return backend.Status{}, err
	}
	f, ok := decode(reply)
	if !ok {
		return backend.Status{}, d.store.Unexpected(reply)
	}
	var s backend.Status
	if f.pttl != -2 {
		s.Held, s.Owner, s.TTL = true, owner(f.field), time.Duration(f.pttl)*time.Millisecond
	}
	if n, err := strconv.ParseUint(f.fence, 10, 64); err == nil {
		s.Fence = n
	}
	return s, nil
}

// Break removes whatever is stored under key, and wakes those who wait for it.
func (d *Driver) Break(ctx context.Context, key string) error {
	_, err := d.store.Run(ctx, breakScript, redisstore.Call{
		Keys: []string{redisstore.LockKey(key)},
		Args: []any{d.channelOf(key), d.publish()},
	})
	return err
}
