package spinlock

import (
	"context"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

// Inspect tells who holds key. The record has no room for Since; a holder
// that is not of hasp has no Owner.
func (d *Driver) Inspect(ctx context.Context, key string) (backend.Status, error) {
	reply, err := d.store.Run(ctx, inspectScript, redisstore.Call{
		Keys: []string{redisstore.LockKey(key), redisstore.DerivedKey("fence", key)},
	})
	if err != nil {
		return backend.Status{}, err
	}
	f, ok := redisstore.Decode(reply)
	if !ok {
		return backend.Status{}, d.store.Unexpected(reply)
	}
	return f.Status(), nil
}

// Break removes whatever is stored under key.
func (d *Driver) Break(ctx context.Context, key string) error {
	_, err := d.store.Do(ctx, "unlink", redisstore.LockKey(key))
	return err
}
