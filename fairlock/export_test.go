package fairlock

import "github.com/hasplock/hasp/backend"

// Left returns how many groups, waiters and subscriptions d has.
func Left(d backend.Driver) (groups, tokens, channels int) {
	ws := d.(*driver).waiters
	ws.mu.Lock()
	defer ws.mu.Unlock()
	ws.subs.mu.Lock()
	defer ws.subs.mu.Unlock()
	return len(ws.groups), len(ws.byToken), len(ws.subs.byChannel)
}
