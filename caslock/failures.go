package caslock

import (
	"maps"
	"sync"
	"time"
)

const (
	maxFailures  = 1000             // tokens that failures remembers
	keepFailures = 10 * time.Minute // how long it remembers them, if there are so many
)

// failures knows what the failed attempts of a token have sent. An attempt that has failed before
// its Put left nothing, so the releases that the engine makes afterwards need no call. With calls,
// the releases of many attempts would keep a store busy that has just recovered.
type failures struct {
	mu      sync.Mutex
	byToken map[string]failure // no entry if it is not known what was sent
}

type failure struct {
	sent bool // an attempt has sent a Put
	at   time.Time
}

// note records that an attempt has failed.
func (fs *failures) note(token string, sent bool) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	now := time.Now()
	if len(fs.byToken) >= maxFailures {
		maps.DeleteFunc(fs.byToken, func(_ string, f failure) bool { return now.Sub(f.at) > keepFailures })
	}
	earlier, isKnown := fs.byToken[token]
	if isKnown || len(fs.byToken) < maxFailures {
		fs.byToken[token] = failure{earlier.sent || sent, now}
	}
}

// forget forgets a token whose attempt has succeeded.
func (fs *failures) forget(token string) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	delete(fs.byToken, token)
}

// holdNothing reports whether the token certainly holds nothing, because its attempts have failed,
// and none of them has sent a Put.
func (fs *failures) holdNothing(token string) bool {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	f, isKnown := fs.byToken[token]
	return isKnown && !f.sent
}
