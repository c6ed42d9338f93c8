package pubsublock

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

// If readers refuse a caller that waits, it leaves an intent, which keeps new readers away.
// The driver sends the intent's key only after readers have refused it at that key. So a key
// without readers costs no more than before.

// waitIntentTTL is the term of the intent that a Wait leaves. A Wait sleeps for maxSleep at
// most.
const waitIntentTTL = 3 * maxSleep

// maxIntents is how many keys are remembered. An intent at a key that is forgotten lasts
// until its term ends.
const maxIntents = 256

// intents is the keys at which a driver may have left an intent, with the time.
type intents struct {
	mu   sync.Mutex // guards left
	left map[string]time.Time
}

// has reports whether the driver may have an intent at key.
func (in *intents) has(key string) bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	at, ok := in.left[key]
	if ok && time.Since(at) >= waitIntentTTL+maxSleep {
		delete(in.left, key) // no timer removes old ones
		ok = false
	}
	return ok
}

func (in *intents) note(key string) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.left == nil || len(in.left) >= maxIntents {
		in.left = map[string]time.Time{} // each that is in use is soon noted again
	}
	in.left[key] = time.Now()
}

func (in *intents) forget(key string) {
	in.mu.Lock()
	defer in.mu.Unlock()
	delete(in.left, key)
}

// acquire makes an attempt. If readers refuse a claim that is not shared, it leaves an
// intent for intentTTL, or none if that is zero. The first time, that takes a command more.
func (d *Driver) acquire(ctx context.Context, c backend.Claim, intentTTL time.Duration) (backend.Grant, error) {
	if c.Shared {
		return d.store.AcquireShared(ctx, c, d.fenceTTL)
	}

	noted := d.intents.has(c.Key)
	g, err := d.ask(ctx, c, noted, intentTTL)
	var held *backend.HeldError
	if errors.As(err, &held) && held.Shared && intentTTL > 0 {
		// Note the key before the intent is sent, so that a release finds the intent even if
		// the reply is lost.
		d.intents.note(c.Key)
		if !noted {
			noted = true
			g, err = d.ask(ctx, c, true, intentTTL) // the refusal was definite, so the token may be sent again
		}
	}
	if noted && redis.HasErrorPrefix(err, "NOPERM") {
		// This user may not leave intents, so readers may come before it.
		d.intents.forget(c.Key)
		noted = false
		g, err = d.ask(ctx, c, false, 0)
	}
	if err == nil && noted {
		d.intents.forget(c.Key) // the script has removed it
	}
	return g, err
}

// ask sends one attempt of a claim that is not shared. After readers have refused the
// driver, the script also gets the intent's key.
func (d *Driver) ask(ctx context.Context, c backend.Claim, refused bool, intentTTL time.Duration) (backend.Grant, error) {
	call := redisstore.Call{
		Keys: []string{redisstore.LockKey(c.Key)},
		Args: []any{c.Token + mark + c.Owner, redisstore.Millis(c.TTL)},
	}
	if c.Fenced {
		// The script draws a fence only if it gets the counter's key.
		call.Keys = append(call.Keys, redisstore.DerivedKey("fence", c.Key))
		call.Args = append(call.Args, redisstore.Millis(d.fenceTTL))
	}
	if refused {
		if !c.Fenced {
			call.Args = append(call.Args, "")
		}
		call.Keys = append(call.Keys, redisstore.IntentKey(c.Key))
		call.Args = append(call.Args, c.Token, redisstore.Millis(intentTTL))
	}

	reply, err := d.store.Run(ctx, acquireScript, call)
	if err != nil {
		return backend.Grant{}, err
	}
	return d.store.Granted(reply, c)
}
