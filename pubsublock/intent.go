package pubsublock

import (
	"context"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

// If readers refuse a caller that waits, it leaves an intent, which keeps new readers away.
// The driver sends the intent's key only after readers have refused it at that key. So a key
// without readers costs no more than before.

// intentTTL is the term of an intent. A caller that waits repeats it once a second.
const intentTTL = 3 * time.Second

// intends reports whether this driver may have left an intent at key.
func (d *Driver) intends(key string) bool {
	_, ok := d.intents.get(key, intentTTL+time.Second)
	return ok
}

// ask sends one attempt of a claim that is not shared. After readers have refused the
// driver, the script also gets the intent's key.
func (d *Driver) ask(ctx context.Context, c backend.Claim, refused bool) (backend.Grant, error) {
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
		var term int64
		if c.Waiting {
			term = redisstore.Millis(intentTTL)
		}
		call.Args = append(call.Args, c.Token, term)
	}

	reply, err := d.store.Run(ctx, acquireScript, call)
	if err != nil {
		return backend.Grant{}, err
	}
	return d.store.Granted(reply, c)
}
