package fairlock_test

import (
	_ "embed"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/fairlock"
	"github.com/hasplock/hasp/internal/redistest"
)

// The scripts of a version that kept the record in a hash, and the queue in a list.
var (
	//go:embed testdata/hash/handingover.lua
	oldHandingOver string
	//go:embed testdata/hash/acquire.lua
	oldAcquire string
	//go:embed testdata/hash/enqueue.lua
	oldEnqueue string
	//go:embed testdata/hash/release.lua
	oldRelease string
)

// older is a client of that version. It has no subscription.
type older struct {
	*testing.T
	rdb *redis.Client
	id  string
}

func (o older) run(script string, args ...any) []any {
	o.Helper()
	keys := []string{"k", "hasp:{k}:fence:k", "hasp:{k}:queue:k", "hasp:{k}:entries:k", "hasp:{k}:alive:k"}
	reply, err := o.rdb.Eval(o.Context(), oldHandingOver+script, keys, append([]any{time.Hour.Milliseconds()}, args...)...).Slice()
	if err != nil {
		o.Error(err)
		return []any{int64(0), int64(0), int64(0), int64(0)}
	}
	return reply
}

// acquire returns the fence of the hold, or an empty string if the key is held.
func (o older) acquire(token string) string {
	reply := o.run(oldAcquire, token, "an older version", 60000, 1)
	if reply[0] != int64(1) {
		return ""
	}
	return reply[1].(string)
}

// enqueue takes a place for the token, or keeps it, and reports whether the token has
// the key, and whether the holder is of another kind.
func (o older) enqueue(token string) (got, foreign bool) {
	reply := o.run(oldEnqueue, token, "an older version", 5000, 0, "-", "hasp:grant:"+o.id, 1, 60000, 5000)
	return reply[0] == int64(1) || len(reply) > 9 && reply[8] == int64(1) && reply[9] == token, reply[2] == int64(1)
}

func (o older) release(token string) bool { return o.run(oldRelease, token)[0] == int64(1) }

// Versions with different records and queues exclude each other. None changes the other's
// record, and fences grow over both.
func TestAnOlderVersionIsExcluded(t *testing.T) {
	r := setup(t, &redistest.Options{Own: true, Real: true})
	o := older{t, r.Redis, "older"}
	c := fenced("k")
	last := r.Acquire(t, c).Fence
	if o.acquire("old") != "" {
		t.Error("the older version takes a held key")
	}
	if got, foreign := o.enqueue("old"); got || !foreign {
		t.Errorf("the older version waits: got the key: %v, foreign: %v", got, foreign)
	}
	if o.release("other") {
		t.Error("the older version releases the key")
	}
	want(t, "renew", r.Renew(t, c), nil)

	// Its place is in its own queue, so it notices the release when it polls.
	r.Release(t, c)
	if got, _ := o.enqueue("old"); !got {
		t.Error("the older version does not get a free key")
	}
	want(t, "acquire a key of the older version", errOf(r.Driver.Acquire(t.Context(), claim("k"))), backend.ErrHeld)
	want(t, "renew a hold of the older version", r.Renew(t, backend.Claim{Key: "k", Token: "old", TTL: time.Second}), backend.ErrLost)
	want(t, "release a hold of the older version", r.Driver.Release(t.Context(), backend.Claim{Key: "k", Token: "old"}), backend.ErrLost)
	if s, err := r.Driver.Inspect(t.Context(), "k"); err != nil || !s.Held || s.Owner != "" {
		t.Errorf("inspect: %+v, %v", s, err)
	}
	x := r.wait(t, r.another(t), fenced("k"), 1)
	if !o.release("old") {
		t.Error("the older version has lost the key")
	}
	f := x.got(t).Fence
	if f <= last {
		t.Errorf("fence %d after %d", f, last)
	}
	x.release(t)
	if old := o.acquire("old"); len(old) < len(fmt.Sprint(f)) || old <= fmt.Sprint(f) {
		t.Errorf("fence %s after %d", old, f)
	}

	// Break knows no versions.
	want(t, "break", r.Driver.Break(t.Context(), "k"), nil)
	r.Acquire(t, claim("k"))
}

// Callers of both versions contend for a key.
func TestContentionWithAnOlderVersion(t *testing.T) {
	t.Parallel()
	r := setup(t, &redistest.Options{Own: true, Real: true})
	const callers, rounds = 3, 8
	var holders atomic.Int32
	var wg sync.WaitGroup
	hold := func() {
		if n := holders.Add(1); n != 1 {
			t.Errorf("%d hold the key", n)
		}
		time.Sleep(time.Millisecond)
		holders.Add(-1)
	}
	for i := range callers {
		o := older{t, r.Redis, fmt.Sprint(i)}
		wg.Go(func() {
			for round := range rounds {
				token := fmt.Sprint("old-", i, "-", round)
				for {
					if got, _ := o.enqueue(token); got {
						break
					}
					time.Sleep(5 * time.Millisecond)
				}
				hold()
				if !o.release(token) {
					t.Errorf("%s has lost the key", token)
				}
				time.Sleep(20 * time.Millisecond)
			}
		})
		d := fairlock.New(r.Server.Client(), nil)
		c := hasp.New(d, nil)
		defer c.Close()
		wg.Go(func() {
			for range rounds {
				lease, err := c.Lock(t.Context(), "k")
				if err != nil {
					t.Error(err)
					return
				}
				hold()
				want(t, "unlock", lease.Unlock(t.Context()), nil)
				time.Sleep(20 * time.Millisecond)
			}
		})
	}
	wg.Wait()
}
