package fairlock

import (
	"context"
	"embed"

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
func keysOf(key string) [5]string {
	return [...]string{
		redisstore.LockKey(key),
		redisstore.DerivedKey("fence", key),
		redisstore.DerivedKey("queue", key),
		redisstore.DerivedKey("timeouts", key),
		redisstore.DerivedKey("mixed", key),
	}
}

// runner runs the scripts that may hand a key over. Their first argument is the term of the fence
// counter.
type runner struct {
	store    *redisstore.Store
	fenceTTL string // Options.FenceTTL in ms
}

// call returns the redisstore.Call of such a script. The arguments args follow the first one.
func (r *runner) call(keys []string, args ...string) redisstore.Call {
	return redisstore.Call{Keys: keys, Args: append([]string{r.fenceTTL}, args...)}
}

// run runs such a script for key. The arguments args follow the first one. Unlike with call, the
// arguments stay on the stack, because most calls are made by run.
func (r *runner) run(ctx context.Context, sc *redisstore.Script, key string,
	args ...string) (any, error) {
	keys := keysOf(key)
	room := [8]string{r.fenceTTL}
	return r.store.Run(ctx, sc, redisstore.Call{Keys: keys[:], Args: append(room[:1], args...)})
}
