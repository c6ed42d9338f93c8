package strategytest

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redistest"
)

// Rig is a driver on a Redis, and a client of the same Redis.
type Rig[D backend.Inspector] struct {
	Server *redistest.Server // nil if the Redis is a VirtualServer
	Redis  *redis.Client
	Driver D
}

// Setup starts a Redis and returns a Rig. The function open makes the driver. If o is nil, no other
// test uses the Redis.
func Setup[D backend.Inspector](
	t *testing.T, o *redistest.Options, open func(rdb redis.UniversalClient) D,
) Rig[D] {
	t.Helper()
	if o == nil {
		o = redistest.Own
	}
	srv := redistest.Start(t, o)
	rdb := srv.Client()
	return Rig[D]{srv, rdb, open(rdb)}
}

// Term is the TTL of claims. It is so long that at least half of it is left when a test reads what
// is left, even on a slow machine.
const Term = time.Minute

var serial atomic.Int64

// Claim returns the claim of a new attempt.
func Claim(key string) backend.Claim {
	n := serial.Add(1)
	// The token is as long as a token of the engine. A shorter one would make no record.
	return backend.Claim{
		Key:     key,
		Token:   fmt.Sprintf("token-%016d", n),
		Owner:   fmt.Sprintf("owner %d", n),
		TTL:     Term,
		Timeout: 3 * time.Second,
	}
}

// Fenced is Claim with a fence.
func Fenced(key string) backend.Claim { c := Claim(key); c.Fenced = true; return c }

// Acquire acquires c, or fails the test.
func (r Rig[D]) Acquire(t *testing.T, c backend.Claim) backend.Grant {
	t.Helper()
	g, err := r.Driver.Acquire(t.Context(), c)
	await.Must(t, err)
	return g
}

// Renew renews c and returns the error.
func (r Rig[D]) Renew(t *testing.T, c backend.Claim) error {
	t.Helper()
	err := errors.New("not answered")
	r.Driver.Renew(t.Context(), []backend.Claim{c}, func(_ int, _ backend.Grant, e error) {
		err = e
	})
	return err
}

// Release releases c, or fails the test.
func (r Rig[D]) Release(t *testing.T, c backend.Claim) {
	t.Helper()
	await.Must(t, r.Driver.Release(t.Context(), c))
}

// Left returns how long the term of key still runs.
func (r Rig[D]) Left(t *testing.T, key string) time.Duration {
	return await.Value(r.Redis.PTTL(t.Context(), key).Result())
}

// Do sends a command to the Redis.
func (r Rig[D]) Do(t *testing.T, args ...any) {
	t.Helper()
	await.Must(t, r.Redis.Do(t.Context(), args...).Err())
}

// Forbid changes the rights of the user that all connections use.
func (r Rig[D]) Forbid(t *testing.T, rights ...any) {
	t.Helper()
	r.Do(t, append([]any{"acl", "setuser", "default"}, rights...)...)
}

// Outage fails the test unless err is an outage that names the server.
func Outage(t *testing.T, what string, err error) {
	t.Helper()
	if !IsOutage(err) {
		t.Errorf("%s: got %v, want an outage", what, err)
	} else if !strings.Contains(err.Error(), "redis ") {
		t.Errorf("%s: %q does not name the server", what, err)
	}
}

// IsOutage reports whether err is an error of unknown outcome.
func IsOutage(err error) bool {
	return !slices.ContainsFunc([]error{
		nil, backend.ErrHeld, backend.ErrLost, backend.ErrInvalid, errors.ErrUnsupported,
	}, func(definite error) bool { return errors.Is(err, definite) })
}

// Want fails the test unless err matches target, or is nil if target is nil.
var Want = await.ErrorIs

// ErrOf returns the error of a call that has another result.
func ErrOf[T any](_ T, err error) error { return err }

// Lost fails the test unless err is a loss.
func Lost(t *testing.T, what string, err error) { t.Helper(); Want(t, what, err, backend.ErrLost) }

// Lock locks the key k.
func Lock(t *testing.T, c *hasp.Client, opts ...hasp.Option) *hasp.Lease {
	t.Helper()
	lease, err := c.Lock(t.Context(), "k", opts...)
	await.Must(t, err)
	return lease
}

// Unlock unlocks lease, or fails the test.
func Unlock(t *testing.T, lease *hasp.Lease) {
	t.Helper()
	Want(t, "unlock", lease.Unlock(t.Context()), nil)
}

// Outages contains functions that make a Proxy fail. The function mend makes the Proxy work again.
var Outages = map[string]func(p *faultproxy.Proxy) (mend func()){
	"down":    func(p *faultproxy.Proxy) func() { p.Down(); return p.Up },
	"stalled": func(p *faultproxy.Proxy) func() { p.Stall(); return p.Flow },
}
