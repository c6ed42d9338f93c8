package spinlock

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

// A caller that polls finds the same hold several times. The first attempt that is
// refused takes two round trips and four commands, with those in scripts. An attempt
// within rememberFor takes one round trip, and two commands if the record is the same.

// rememberFor is how long a refusal is remembered. After that the rest of the term is
// read again, because the holder may have renewed.
const rememberFor = time.Second

// maxRefusals is how many refusals are remembered. An attempt at a key that is
// forgotten costs a round trip more.
const maxRefusals = 256

// refusal is what was found under a key that was held.
type refusal struct {
	record string
	at     time.Time
	held   backend.HeldError

	// When readers last refused this driver. Until IntentTTL later, an intent of this
	// driver may be there, also if another caller's exclusive hold came in between.
	readers time.Time
}

// after returns the error of the refusal for a later time. If the term has ended by
// then, the rest of it is not known.
func (r refusal) after(now time.Time) error {
	held := r.held
	held.RetryAfter = max(held.RetryAfter-now.Sub(r.at), 0)
	return &held
}

// refusals is the last refusals of a driver, by Redis key.
type refusals struct {
	mu    sync.Mutex // guards byKey
	byKey map[string]refusal
}

func (rs *refusals) get(key string) (refusal, bool) {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	r, ok := rs.byKey[key]
	if ok && time.Since(r.at) >= rememberFor {
		delete(rs.byKey, key) // no timer removes old ones
		ok = false
	}
	return r, ok
}

func (rs *refusals) put(key string, r refusal) {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	// Forget all keys at once: that needs no order among them, and each is soon put here
	// again.
	if rs.byKey == nil || len(rs.byKey) >= maxRefusals {
		rs.byKey = map[string]refusal{}
	}
	rs.byKey[key] = r
}

func (rs *refusals) forget(key string) {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	delete(rs.byKey, key)
}

// acquireAgain makes an attempt at a key that was refused with r.
func (d *Driver) acquireAgain(ctx context.Context, c backend.Claim, key string, r refusal) (backend.Grant, error) {
	reply, err := d.store.Run(ctx, againScript, redisstore.Call{
		Keys: []string{key},
		Args: []any{c.Token + mark + c.Owner, redisstore.Millis(c.TTL), r.record},
	})
	if err == nil && reply == int64(0) {
		return backend.Grant{}, r.after(time.Now())
	}
	return d.answered(reply, err, c, key)
}

// acquireAfterReaders makes an attempt at a key that readers held a moment ago. If they
// still hold it and the caller waits, it leaves an intent, which keeps new readers away.
// If the key is free, it takes the key and removes any intent, also another caller's.
func (d *Driver) acquireAfterReaders(ctx context.Context, c backend.Claim, key string) (backend.Grant, error) {
	keys := []string{key}
	counterTTL := any("")
	if c.Fenced {
		keys = append(keys, redisstore.DerivedKey("fence", c.Key))
		counterTTL = redisstore.Millis(d.fenceTTL)
	}
	intentTTL := time.Duration(0)
	if c.Waiting {
		intentTTL = redisstore.IntentTTL
	}
	reply, err := d.store.Run(ctx, acquireScript, redisstore.Call{
		Keys: append(keys, redisstore.IntentKey(c.Key)),
		Args: []any{c.Token + mark + c.Owner, redisstore.Millis(c.TTL), counterTTL, c.Token, redisstore.Millis(intentTTL)},
	})
	return d.answered(reply, err, c, key)
}

// answered returns the outcome of a script that takes key. It remembers a refusal.
func (d *Driver) answered(reply any, err error, c backend.Claim, key string) (backend.Grant, error) {
	if err != nil {
		return backend.Grant{}, err
	}
	if found, ok := redisstore.Refusal(reply); ok {
		return backend.Grant{}, d.refused(key, found)
	}
	d.refusals.forget(key)
	return d.store.Granted(reply, c)
}

// refused remembers what was found under a key that is held, and returns the error.
func (d *Driver) refused(key string, found redisstore.Found) error {
	err := found.Held()
	var held *backend.HeldError
	if errors.As(err, &held) && (held.Owner != "" || held.Shared) {
		r := refusal{record: found.Record(), at: time.Now(), held: *held}
		if before, ok := d.refusals.get(key); ok {
			r.readers = before.readers
		}
		if held.Shared {
			r.readers = r.at
		}
		d.refusals.put(key, r)
	} else {
		// A record without a token, or one that cannot be read, does not identify a
		// hold: Spring's registry writes the same one each time.
		d.refusals.forget(key)
	}
	return err
}
