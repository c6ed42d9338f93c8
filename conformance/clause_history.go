package conformance

import (
	"errors"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

// historyClauses let many callers use two keys at the same time. From the return of its attempt to
// the call of its release, a caller knows that it holds a key. A ledger compares what the callers
// know.
var historyClauses = []clause{
	{name: "history-driver", says: saysOneHolder,
		check: func(e *env) { e.users(false).byDrivers(e.drivers()) },
		why: "Of simultaneous attempts, no two get the key together. A renewal succeeds until " +
			"the release, and not after it. A refusal has a reason. Fences grow."},
	{name: "history-locker", says: saysHasp,
		check: func(e *env) { e.users(false).byClients(e.clients()) },
		why: "The callers of several Clients hold a key one at a time. A TryLock is refused " +
			"only if another wants the key. Fences grow."},
	{name: "history-shared", need: shares, says: saysTogether, check: historyShared,
		why: "Of simultaneous attempts, shared and others, none that is not shared gets the key beside another."},
}

func historyShared(e *env) {
	for range 3 { // several rounds, because a writer rarely finds the key free
		e.users(true).byDrivers(e.drivers())
	}
	e.users(true).byClients(e.clients())
}

// ledger records what the callers of one key know. Each of its arrays contains one number for
// shared claims, and one for exclusive claims; see kindOf.
type ledger struct {
	mu      sync.Mutex // guards the fields below
	claims  [2]int     // claims that may be in the store: not yet refused, and not yet released
	begun   [2]int     // attempts so far
	holders [2]int     // callers that hold the key
	fence   uint64     // the largest fence so far
}

func kindOf(shared bool) int {
	if shared {
		return 1
	}
	return 0
}

// visit is one attempt at the key of a ledger, and the hold that follows.
type visit struct {
	*ledger
	kind   int    // see kindOf
	others int    // when the attempt began: the claims that could refuse it
	begun  int    // when the attempt began: the attempts so far that could refuse it
	least  uint64 // the largest fence when the attempt began
}

// rivals returns how many claims exclude that of v. counts[k] is the number of claims of kind k.
func (v *visit) rivals(counts [2]int) int {
	if v.kind == kindOf(true) {
		return counts[kindOf(false)]
	}
	return counts[0] + counts[1]
}

// begin notes that an attempt begins.
func (l *ledger) begin(shared bool) *visit {
	l.mu.Lock()
	defer l.mu.Unlock()
	v := &visit{ledger: l, kind: kindOf(shared), least: l.fence}
	v.others = v.rivals(l.claims)
	l.claims[v.kind]++
	l.begun[v.kind]++
	v.begun = v.rivals(l.begun)
	return v
}

// got checks a grant. It counts the caller as a holder until the caller calls the method left.
func (v *visit) got(fence uint64) {
	v.mu.Lock()
	defer v.mu.Unlock()
	n := v.rivals(v.holders)
	require(n == 0, "a grant (shared: %v) while %d others have the key", v.kind == kindOf(true), n)
	v.holders[v.kind]++

	// An exclusive hold must have the largest fence so far. Shared holds may be noted in any order.
	least := v.fence
	if v.kind == kindOf(true) {
		least = v.least
	}
	require(fence == 0 || fence > least,
		"fence %d (shared: %v) after %d", fence, v.kind == kindOf(true), least)
	v.fence = max(v.fence, fence)
}

// left no longer counts the caller as a holder, because the caller is about to release its hold.
func (v *visit) left() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.holders[v.kind]--
}

// over no longer counts the claim: the attempt was refused, or the release of its hold has ended.
func (v *visit) over() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.claims[v.kind]--
}

// refused ends the try unless another claim may have been in the store during the attempt.
func (v *visit) refused() {
	v.mu.Lock()
	defer v.mu.Unlock()
	require(v.others > 0 || v.rivals(v.ledger.begun) != v.begun,
		"an attempt (shared: %v) was refused, although no other caller had asked for the key",
		v.kind == kindOf(true))
}

// users describes many callers, all of which use the same two keys.
type users struct {
	e      *env
	shared bool          // half of the attempts are shared
	fenced bool          // half of the attempts ask for a fence
	keep   time.Duration // the longest time between Lock and Unlock
	keys   [2]string
	ledger [2]*ledger
}

func (e *env) users(shared bool) *users {
	c := &users{e: e, shared: shared, fenced: e.traits.Fenced, keys: [2]string{e.key(), e.key()},
		ledger: [2]*ledger{{}, {}}}
	if shared {
		c.keep = 4 * time.Millisecond
	}
	return c
}

// draw returns a random key, its ledger, and whether the next attempt must be shared.
func (c *users) draw() (key string, l *ledger, shared bool) {
	k := rand.N(len(c.keys))
	return c.keys[k], c.ledger[k], c.shared && rand.N(2) == 0
}

func (c *users) byDrivers(drivers []*driver) {
	must(c.e.each(6, func(i int) {
		for range 25 {
			c.useDriver(drivers[i%len(drivers)])
		}
	}))
}

func (c *users) useDriver(d *driver) {
	key, l, shared := c.draw()
	claim := c.e.claimOf(key, c.e.long)
	claim.Fenced = c.fenced && rand.N(2) == 0
	claim.Shared = shared
	v := l.begin(shared)
	defer v.over()
	g, err := d.acquire(claim)
	if errors.Is(err, backend.ErrHeld) {
		v.refused()
		d.lost(claim, "an attempt that was refused")
		return
	}

	mustf(err, "one of many attempts")
	v.got(g.Fence)
	if rand.N(2) == 0 {
		mustf(d.renews(claim), "renewal by one of many callers")
	}

	v.left()
	mustf(d.release(claim), "release by one of many callers")
	d.lost(claim, "a hold that was released")
}

func (c *users) byClients(clients []*hasp.Client) {
	began := time.Now()
	must(c.e.each(9, func(i int) {
		for n := 0; n < 20 && time.Since(began) < 3*time.Second; n++ {
			c.useClient(clients[i%len(clients)])
		}
	}))
}

func (c *users) useClient(client *hasp.Client) {
	key, l, shared := c.draw()
	var opts []hasp.Option
	if c.fenced && rand.N(2) == 0 {
		opts = append(opts, hasp.WithFence())
	}

	if shared {
		opts = append(opts, hasp.WithShared())
	}

	lock := client.TryLock
	if rand.N(3) == 0 {
		lock = client.Lock
	}

	v := l.begin(shared)
	defer v.over()
	lease, err := lock(c.e.ctx, key, opts...)
	if errors.Is(err, hasp.ErrHeld) {
		v.refused()
		return
	}

	mustf(err, "Lock or TryLock by one of many callers")
	v.got(lease.Fence())
	if c.keep > 0 {
		c.e.sleep(rand.N(c.keep))
	}

	v.left()
	mustf(lease.Unlock(c.e.ctx), "Unlock by one of many callers")
}
