package fairlock

import (
	"context"
	"embed"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

// scripts contains the Lua scripts. The header of each script describes its arguments and replies.
//
//go:embed *.lua
var scripts embed.FS

var (
	acquireScript = redisstore.NewHold(redisstore.Source(scripts, "acquire"))
	enqueueScript = redisstore.NewHold(redisstore.Source(scripts, "enqueue"))
	pollScript    = redisstore.NewScript(redisstore.Source(scripts, "poll"))
	releaseScript = redisstore.NewScript(redisstore.Source(scripts, "release"))
	breakScript   = redisstore.NewScript(redisstore.Source(scripts, "break"))
	renewScript   = redisstore.NewHold(redisstore.Source(scripts, "renew"))
	inspectScript = redisstore.NewScript(redisstore.Source(scripts, "inspect"))
)

// keysOf returns the Redis keys of a lock, as the scripts expect them.
func keysOf(key string) [4]string {
	return [...]string{
		redisstore.LockKey(key),
		redisstore.DerivedKey("fence", key),
		redisstore.DerivedKey("queue", key),
		redisstore.DerivedKey("timeouts", key),
	}
}

// call returns the redisstore.Call for a script that may hand the key over.
func (d *driver) call(keys []string, args ...string) redisstore.Call {
	return redisstore.Call{Keys: keys, Args: append([]string{d.fenceTTL}, args...)}
}

// run runs a script that may hand the key over. It keeps the arguments on the stack.
func (d *driver) run(ctx context.Context, sc *redisstore.Script, key string, args ...string) (any, error) {
	keys, room := keysOf(key), [8]string{d.fenceTTL}
	return d.store.Run(ctx, sc, redisstore.Call{Keys: keys[:], Args: append(room[:1], args...)})
}

// Acquire takes c.Key if nothing is stored under it and no caller waits for it. A
// shared claim may also join a shared hold.
func (d *driver) Acquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	reply, err := d.run(ctx, acquireScript, c.Key, c.Token, c.Owner, redisstore.Millis(c.TTL), flags(c))
	if err != nil {
		return backend.Grant{}, noQueue(c.Key, err)
	}
	return d.store.Granted(reply, c)
}

// Renew raises the term of each hold to at least its claim's TTL.
func (d *driver) Renew(ctx context.Context, cs []backend.Claim, done func(i int, g backend.Grant, err error)) {
	d.store.Renew(ctx, renewScript, cs, "", done)
}

// Release hands c.Key to the next waiter if c.Token holds it. If c.Token has a place in the queue,
// Release gives up that place. A c.KeepUntil delays the hand-over until that time.
func (d *driver) Release(ctx context.Context, c backend.Claim) error {
	// An enqueue of the token may arrive after this release, and take a new place (see Wait). So
	// repeat the release when no enqueue can arrive any more.
	if late, ok := c.Handle.(time.Time); ok && time.Until(late) > 0 {
		time.AfterFunc(time.Until(late), func() {
			if !d.begin() {
				return
			}
			defer d.background.Done()

			// Use the driver's context, because the caller's context may have ended.
			ctx, cancel := context.WithTimeout(d.calls, c.Timeout)
			defer cancel()
			_ = d.Release(ctx, c) // if this fails, the place ends with its window
		})
	}

	token := c.Token
	if c.Shared {
		token += redisstore.Mark + c.Owner
	}
	return d.store.Owned(d.run(ctx, releaseScript, c.Key, token, redisstore.Rest(c.KeepUntil)))
}
