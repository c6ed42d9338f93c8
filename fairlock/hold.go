package fairlock

import (
	"context"
	_ "embed"
	"errors"
	"strconv"
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
	//go:embed keep.lua
	keepSrc string
	//go:embed inspect.lua
	inspectSrc string

	readingSrc    = redisstore.SharedSrc + recordSrc               // the beginning of each script
	handingOver   = readingSrc + grantSrc + offerSrc + handOverSrc // the beginning of each script that may hand a key over
	acquireScript = redisstore.NewHold(handingOver + acquireSrc)
	enqueueScript = redisstore.NewHold(handingOver + prolongSrc + reportSrc + enqueueSrc)
	pollScript    = redisstore.NewScript(handingOver + reportSrc + pollSrc)
	releaseScript = redisstore.NewScript(handingOver + releaseSrc)
	breakScript   = redisstore.NewScript(handingOver + breakSrc)
	renewScript   = redisstore.NewHold(readingSrc + prolongSrc + renewSrc)
	keepScript    = redisstore.NewScript(readingSrc + keepSrc)
	inspectScript = redisstore.NewScript(readingSrc + inspectSrc)
)

// keysOf returns the Redis keys of a lock, as the scripts expect them.
func keysOf(key string) []string {
	return []string{
		redisstore.LockKey(key),
		redisstore.DerivedKey("fence", key),
		redisstore.DerivedKey("places", key),
		redisstore.DerivedKey("clients", key),
	}
}

// call returns the call of a script that may hand the key over.
func (d *Driver) call(key string, args ...any) redisstore.Call { return d.callOn(keysOf(key), args...) }

// callOn is call for keys that the caller has already.
func (d *Driver) callOn(keys []string, args ...any) redisstore.Call {
	return redisstore.Call{Keys: keys, Args: append([]any{redisstore.Millis(d.fenceTTL)}, args...)}
}

// Acquire takes c.Key if nothing is stored under it and no caller waits for it. A
// shared claim may also join a shared hold.
func (d *Driver) Acquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	reply, err := d.store.Run(ctx, acquireScript, d.call(c.Key, c.Token, c.Owner, redisstore.Millis(c.TTL), flags(c)))
	if err != nil {
		return backend.Grant{}, noQueue(c.Key, err)
	}

	switch r := fieldsOf(reply); {
	case r.int(0) == 1 && len(r) == 2:
		// A reply that the script cannot give for this claim is no grant.
		if n, err := strconv.ParseUint(r.text(1), 10, 64); err == nil && (n > 0) == c.Fenced {
			return backend.Grant{Fence: n}, nil
		}
	case r.int(0) == 0 && r.int(1) >= -2 && r.isText(2) && r.int(3) >= 0:
		d.continueHandOver(c.Key, r[4:])
		return backend.Grant{}, held(r.int(1), r.text(2), r.int(3) == 1)
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
// place in the queue, Release gives up that place. With c.KeepUntil, the next waiter
// gets the key then.
func (d *Driver) Release(ctx context.Context, c backend.Claim) error {
	// Note the release before the script runs. If the reply came after the timer of
	// remember, a later note would be too late for the repeat.
	var entries []string
	d.mu.Lock()
	if r := d.left[c.Token]; r != nil {
		r.released, r.keepUntil, entries = true, c.KeepUntil, r.entries
	}
	d.mu.Unlock()

	return d.release(ctx, c, entries)
}

// release runs the script, which also removes c.Token from the queue. Without
// entries, the script searches the queue for the token, unless it holds the key.
func (d *Driver) release(ctx context.Context, c backend.Claim, entries []string) error {
	if left := redisstore.Rest(c.KeepUntil); left > 0 && !c.Shared {
		// If c.Token does not hold the key, it may have a place, which the other script
		// removes.
		if err := d.keep(ctx, c, left, entries); !errors.Is(err, backend.ErrLost) {
			return err
		}
	}

	token := c.Token
	if c.Shared {
		token += redisstore.Mark + c.Owner
	}
	args := []any{token}
	for _, e := range entries {
		args = append(args, e)
	}
	reply, err := d.store.Run(ctx, releaseScript, d.call(c.Key, args...))
	if err != nil {
		return err
	}

	switch r := fieldsOf(reply); {
	case r.int(0) == 1 && (len(r) == 1 || len(r) == 4 && r.int(1) == 2):
		// The key is released, whether or not the script has reached a waiter.
		d.continueHandOver(c.Key, r[1:])
		return nil
	case r.int(0) == 0 && (len(r) == 1 || len(r) == 4 && r.int(1) == 2):
		// The script has removed a place of the token, if there was one.
		d.continueHandOver(c.Key, r[1:])
		return backend.ErrLost
	}
	return d.store.Unexpected(reply)
}

// keep ends the hold of c.Token and leaves the key taken for so many milliseconds.
func (d *Driver) keep(ctx context.Context, c backend.Claim, left int64, entries []string) error {
	args := []any{c.Token, left}
	for _, e := range entries {
		args = append(args, e)
	}
	return d.store.Owned(d.store.Run(ctx, keepScript, redisstore.Call{Keys: keysOf(c.Key), Args: args}))
}

// leftover is what a Wait may have left in the queue.
type leftover struct {
	entries   []string  // of the token
	released  bool      // a release of the token was sent since
	keepUntil time.Time // KeepUntil of that release
}

// remember notes the entries of w, whose Wait has ended, so that releases of its token
// need no search.
//
// If late is true, an enqueue was not answered. It arrives within Timeout, if at all. While
// the token holds the key, the enqueue changes nothing. After the release it would take
// a new place. So if the token is released by then, the release is repeated after
// Timeout. If not, only the entries are removed: the enqueue may have arrived before
// the key was handed over on another entry.
func (d *Driver) remember(w *waiter, late bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	r := &leftover{entries: w.entriesLocked()}
	if len(r.entries) == 0 {
		return
	}
	c := w.c
	d.left[c.Token] = r

	// The engine repeats the release of a token whose Wait failed until the term has ended
	// and the calls before have.
	after := c.TTL + 2*c.Timeout
	if late {
		after = c.Timeout
	}
	time.AfterFunc(after, func() {
		// mu decides the race with Release. Either Release has noted itself, and is
		// repeated, or it sends its script when the enqueue can no longer arrive.
		d.mu.Lock()
		if d.left[c.Token] == r {
			delete(d.left, c.Token)
		}
		// The release may not have arrived. So the repeat must not free the key sooner.
		c.KeepUntil = r.keepUntil
		if !r.released {
			c.Token = "" // holds nothing, so the script only removes the entries
		}
		repeat := late && d.beginLocked()
		d.mu.Unlock()
		if !repeat {
			return
		}

		// The context is the Driver's, because the caller of Release has left.
		defer d.background.Done()
		ctx, cancel := context.WithTimeout(d.calls, c.Timeout)
		defer cancel()
		_ = d.release(ctx, c, r.entries) // if this fails, the entry expires
	})
}
