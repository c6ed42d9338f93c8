package pubsublock

import (
	"sync"
	"time"
)

// crowds is the keys for which several Clients waited lately. A driver learns it
// when another Client takes a key after a message, and when its own message reaches
// several Clients.
type crowds struct {
	mu    sync.Mutex // guards noted
	noted map[string]time.Time
}

const (
	crowdFor  = time.Second
	maxCrowds = 256 // keys; if one is forgotten, one Client may come first more often
	maxAlone  = 2   // connections that a message reaches if one Client waits: its own, and perhaps this Client's
)

func (c *crowds) note(key string) {
	c.mu.Lock()
	defer c.mu.Unlock()

	// Forget all keys at once: that needs no order among them, and each is soon noted
	// again.
	if c.noted == nil || len(c.noted) >= maxCrowds {
		c.noted = map[string]time.Time{}
	}
	c.noted[key] = time.Now()
}

func (c *crowds) lately(key string, now time.Time) bool {
	c.mu.Lock()
	defer c.mu.Unlock()

	at, ok := c.noted[key]
	if ok && now.Sub(at) >= crowdFor {
		// No timer removes old entries.
		delete(c.noted, key)
		ok = false
	}
	return ok
}
