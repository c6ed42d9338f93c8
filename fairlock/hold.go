package fairlock

import (
	"context"
	_ "embed"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

// The scripts. The header of each describes its arguments and replies.
var (
	//go:embed record.lua
	recordSrc string
	//go:embed prolong.lua
	prolongSrc string
	//go:embed queue.lua
	queueSrc string
	//go:embed grant.lua
	grantSrc string
	//go:embed offer.lua
	offerSrc string
	//go:embed handover.lua
	handOverSrc string
	//go:embed report.lua
	reportSrc string
	//go:embed acquire.lua
	acquireSrc string
	//go:embed enqueue.lua
	enqueueSrc string
	//go:embed poll.lua
	pollSrc string
	//go:embed release.lua
	releaseSrc string
	//go:embed break.lua
	breakSrc string
	//go:embed renew.lua
	renewSrc string
	//go:embed inspect.lua
	inspectSrc string

	// readingSrc begins each script, and handingOver begins each that may hand a key over.
	readingSrc  = redisstore.SharedSrc + recordSrc
	handingOver = redisstore.FenceSrc + readingSrc + queueSrc + grantSrc + offerSrc + handOverSrc

	acquireScript = redisstore.NewHold(handingOver + acquireSrc)
	enqueueScript = redisstore.NewHold(handingOver + prolongSrc + reportSrc + enqueueSrc)
	pollScript    = redisstore.NewScript(handingOver + reportSrc + pollSrc)
	releaseScript = redisstore.NewScript(handingOver + releaseSrc)
	breakScript   = redisstore.NewScript(handingOver + breakSrc)
	renewScript   = redisstore.NewHold(readingSrc + prolongSrc + renewSrc)
	inspectScript = redisstore.NewScript(readingSrc + inspectSrc)
)

// keysOf returns the Redis keys of a lock, as the scripts expect them.
func keysOf(key string) []string {
	return []string{
		redisstore.LockKey(key),
		redisstore.DerivedKey("fence", key),
		redisstore.DerivedKey("queue", key),
		redisstore.DerivedKey("timeouts", key),
	}
}

// call returns the arguments of a script that may hand the key over.
func (d *driver) call(key string, args ...any) redisstore.Call { return d.callOn(keysOf(key), args...) }

// callOn is call for keys that the caller has already.
func (d *driver) callOn(keys []string, args ...any) redisstore.Call {
	return redisstore.Call{Keys: keys, Args: append([]any{redisstore.Millis(d.fenceTTL)}, args...)}
}

// Acquire takes c.Key if nothing is stored under it and no caller waits for it. A
// shared claim may also join a shared hold.
func (d *driver) Acquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	reply, err := d.store.Run(ctx, acquireScript, d.call(c.Key, c.Token, c.Owner, redisstore.Millis(c.TTL), flags(c)))
	if err != nil {
		return backend.Grant{}, noQueue(c.Key, err)
	}
	return d.store.Granted(ctx, reply, c)
}

// Renew raises the term of each hold to at least its claim's TTL.
func (d *driver) Renew(ctx context.Context, cs []backend.Claim, done func(i int, g backend.Grant, err error)) {
	d.store.Renew(ctx, renewScript, cs, "", done)
}

// Recalls is that of [backend.Recaller].
func (d *driver) Recalls(ctx context.Context, id string, f func(key string)) error {
	return d.store.Recalls(ctx, id, f)
}

// Release hands c.Key to the next waiter if c.Token holds it. If c.Token has a
// place in the queue, Release gives up that place. With c.KeepUntil, the next waiter
// gets the key at that time.
func (d *driver) Release(ctx context.Context, c backend.Claim) error {
	// An enqueue of the token may still arrive: see Wait. While the token holds the key, such an
	// enqueue changes nothing. After the release it would take a new place, so repeat the release.
	if late, ok := c.Handle.(time.Time); ok && time.Until(late) > 0 {
		time.AfterFunc(time.Until(late), func() {
			if !d.begin() {
				return
			}
			defer d.background.Done()

			// The context is the driver's, because the caller has left.
			ctx, cancel := context.WithTimeout(d.calls, c.Timeout)
			defer cancel()
			_ = d.Release(ctx, c) // if this fails, the place ends with its window
		})
	}

	token := c.Token
	if c.Shared {
		token += redisstore.Mark + c.Owner
	}
	return d.store.Owned(d.store.Run(ctx, releaseScript, d.call(c.Key, token, redisstore.Rest(c.KeepUntil))))
}
