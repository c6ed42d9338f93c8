package spinlock

import (
	"context"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

// Inspect returns the holder of key. Since is not recorded. A holder that does not
// use hasp has no Owner.
func (d *Driver) Inspect(ctx context.Context, key string) (backend.Status, error) {
	return d.store.Inspect(ctx, inspectScript, key)
}

// Break removes whatever is stored under key.
func (d *Driver) Break(ctx context.Context, key string) error {
	key = redisstore.LockKey(key)
	if d.registry == "" {
		// UNLINK removes a value of any type.
		_, err := d.store.Do(ctx, "unlink", key)
		return err
	}

	// The script also publishes, to wake the threads of Spring that wait.
	_, err := d.store.Run(ctx, breakScript, redisstore.Call{Keys: []string{key}, Args: []any{d.channel(key)}})
	return err
}
