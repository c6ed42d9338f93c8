package redisstore

import "github.com/hasplock/hasp/backend"

// IntentTTL is how long an intent keeps out new readers, unless the writer repeats the intent. It
// is three times as long as the sleep between two attempts of the writer.
const IntentTTL = 3 * backend.SharedRetryEvery

var (
	sharedAcquireScript = NewHold(Source(parts, "sharedacquire"))
	sharedReleaseScript = NewScript(Source(parts, "sharedrelease"))
)

// IntentKey returns the Redis key of the intent on key. A writer that waits for readers stores its
// token under this key.
func IntentKey(key string) string { return DerivedKey("intent", key) }
