package fairlock

import (
	"context"
	_ "embed"
	"strconv"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

// The scripts. The header of each describes its arguments and replies.
var (
	//go:embed record.lua
	recordSrc string
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

	handingOver   = recordSrc + grantSrc + offerSrc + handOverSrc // the beginning of each script that may hand a key over
	acquireScript = redisstore.NewHold(handingOver + acquireSrc)
	enqueueScript = redisstore.NewHold(handingOver + reportSrc + enqueueSrc)
	pollScript    = redisstore.NewScript(handingOver + reportSrc + pollSrc)
	releaseScript = redisstore.NewScript(handingOver + releaseSrc)
	breakScript   = redisstore.NewScript(handingOver + breakSrc)
	renewScript   = redisstore.NewHold(renewSrc)
	inspectScript = redisstore.NewScript(inspectSrc)
)

// call returns the call of a script that may hand the key over.
func (d *Driver) call(key string, args ...any) redisstore.Call {
	return redisstore.Call{
		Keys: []string{
			redisstore.LockKey(key),
			redisstore.DerivedKey("fence", key),
			redisstore.DerivedKey("queue", key),
			redisstore.DerivedKey("entries", key),
			redisstore.DerivedKey("alive", key),
		},
		Args: append([]any{redisstore.Millis(d.fenceTTL)}, args...),
	}
}

// Acquire takes c.Key if nothing is stored under it and no caller waits for it.
func (d *Driver) Acquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	reply, err := d.store.Run(ctx, acquireScript, d.call(c.Key, c.Token, c.Owner, redisstore.Millis(c.TTL), flag(c.Fenced)))
	if err != nil {
		return backend.Grant{}, noQueue(c.Key, err)
	}

	switch r := fieldsOf(reply); {
	case r.int(0) == 1 && len(r) == 2:
		// A reply that the script cannot give for this claim is no grant.
		if n, err := strconv.ParseUint(r.text(1), 10, 64); err == nil && (n > 0) == c.Fenced {
			return backend.Grant{Fence: n}, nil
		}
	case r.int(0) == 0 && r.int(1) >= -2 && r.isText(2):
		d.continueHandOver(c.Key, r[3:])
		return backend.Grant{}, held(r.int(1), r.text(2))
	case r.int(0) == -1 && len(r) == 1:
		return backend.Grant{}, noFence(c.Key)
	}
	return backend.Grant{}, d.store.Unexpected(reply)
}

// Renew raises the term of each hold to at least its claim's TTL.
func (d *Driver) Renew(ctx context.Context, cs []backend.Claim, done func(i int, g backend.Grant, err error)) {
	d.store.Renew(ctx, renewScript, cs, "", done)
}

// Release hands c.Key to the next waiter if c.Token holds it. If c.Token has a
// place in the queue, Release gives up that place.
func (d *Driver) Release(ctx context.Context, c backend.Claim) error {
	// With turns, c.Token may have a place although no Wait runs.
	if w := d.unpark(c); w != nil {
		d.leave(w)
		if w.unanswered {
			// The enqueue may arrive after the script below, and take a place again.
			d.expectLateEnqueue(c)
		}
	}

	// Note the release before the script runs. If the reply came after the timer of
	// expectLateEnqueue, a later note would be too late for the repeat.
	d.mu.Lock()
	if _, ok := d.late[c.Token]; ok {
		d.late[c.Token] = true
	}
	d.mu.Unlock()

	return d.release(ctx, c)
}

// release runs the script, which also removes c.Token from the queue.
func (d *Driver) release(ctx context.Context, c backend.Claim) error {
	reply, err := d.store.Run(ctx, releaseScript, d.call(c.Key, c.Token))
	if err != nil {
		return err
	}

	switch r := fieldsOf(reply); {
	case r.int(0) == 1 && (len(r) == 1 || len(r) == 4 && r.int(1) == 2):
		// The key is released, whether or not the script has reached a waiter.
		d.continueHandOver(c.Key, r[1:])
		return nil
	case r.int(0) == 0 && len(r) == 1:
		// The script has removed a place of the token, if there was one.
		return backend.ErrLost
	}
	return d.store.Unexpected(reply)
}

// expectLateEnqueue prepares for an enqueue of c.Token that was not answered. It
// arrives within c.Timeout, if at all. While c.Token holds the key, the enqueue
// changes nothing. After the release it would take a new place. So if c.Token is
// released by then, the release is repeated after c.Timeout.
func (d *Driver) expectLateEnqueue(c backend.Claim) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.late[c.Token] = false

	time.AfterFunc(c.Timeout, func() {
		// mu decides the race with Release. Either Release has noted itself, and is
		// repeated, or it sends its script when the enqueue can no longer arrive.
		d.mu.Lock()
		repeat := d.late[c.Token] && d.beginLocked()
		delete(d.late, c.Token)
		d.mu.Unlock()
		if !repeat {
			return
		}

		// The context is the Driver's, because the caller of Release has left.
		defer d.background.Done()
		ctx, cancel := context.WithTimeout(d.calls, c.Timeout)
		defer cancel()
		_ = d.release(ctx, c) // if this fails, the entry expires
	})
}
