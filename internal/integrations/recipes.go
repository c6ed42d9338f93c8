package integrations

import (
	"context"
	"errors"
	"net/http"

	"github.com/hasplock/hasp"
)

// inOrder handles one message at a time for each customer, in all processes together.
func inOrder(ctx context.Context, l hasp.Locker, customer string, handle func(context.Context) error) error {
	return hasp.Do(ctx, l, "customer/"+customer, func(ctx context.Context, _ *hasp.Lease) error {
		return handle(ctx)
	})
}

// limited serves n requests at a time, in all processes together, and answers 429 to the others.
func limited(l hasp.Locker, n int, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		lease, err := l.TryLock(r.Context(), "reports", hasp.WithSlots(n))
		switch {
		case errors.Is(err, hasp.ErrHeld):
			w.Header().Set("Retry-After", "1")
			http.Error(w, "too many requests", http.StatusTooManyRequests)
			return
		case err != nil:
			http.Error(w, "the lock service does not answer", http.StatusServiceUnavailable)
			return
		}
		defer lease.Unlock(context.WithoutCancel(r.Context()))
		next.ServeHTTP(w, r.WithContext(lease.Context()))
	})
}

// leader returns the address of the process that leads, or "" if no process does. The Options of
// each process that calls Lead have its address as Owner.
func leader(ctx context.Context, c *hasp.Client) (string, error) {
	s, err := c.Inspect(ctx, "leader")
	return s.Owner, err
}

// cache is shared by all processes.
type cache interface {
	Get(ctx context.Context, key string) (value string, ok bool)
	Set(ctx context.Context, key, value string)
}

// cached returns a value that is expensive to make. One process makes it, and the others wait.
func cached(ctx context.Context, l hasp.Locker, c cache, key string, create func(context.Context) (string, error)) (string, error) {
	value, ok := c.Get(ctx, key)
	if ok {
		return value, nil
	}
	err := hasp.Do(ctx, l, "cache/"+key, func(ctx context.Context, _ *hasp.Lease) (err error) {
		if value, ok = c.Get(ctx, key); ok {
			return nil // another process has made it meanwhile
		}
		if value, err = create(ctx); err == nil {
			c.Set(ctx, key, value)
		}
		return err
	})
	return value, err
}
