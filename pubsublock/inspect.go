package pubsublock

import (
	"context"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

// Inspect returns the holder of key. Since and the waiters are not recorded. A
// holder that does not use hasp has no Owner.
func (d *Driver) Inspect(ctx context.Context, key string) (backend.Status, error) {
	return d.store.Inspect(ctx, inspectScript, key)
}

// Break removes whatever is stored under key, and wakes the waiters.
func (d *Driver) Break(ctx context.Context, key string) error {
	// The reply does not matter, because breaking a free key is no error.
	_, err := d.store.Run(ctx, breakScript, redisstore.Call{
		Keys: []string{redisstore.LockKey(key)},
		Args: d.channels(ctx, key),
	})
	return err
}
