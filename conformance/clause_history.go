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
// exclusive claims, and one for shared claims; see kindOf.
type ledger struct {
	mu      sync.Mutex // guards the fields below
	claims  [2]int     // claims that may be in the store: not yet refused, and not yet released
	begun   [2]int     // attempts so far
	holders [2]int     // callers that hold the key
	largest uint64     // the largest fence so far
}

// kindOf returns the index of exclusive or of shared claims in the arrays of a ledger.
func kindOf(shared bool) int {
	if shared {
		return 1
	}
	return 0
}

// visit is one attempt at the key of a ledger, and the hold that follows. The last three fields
// say what the ledger contained when the attempt began.
type visit struct {
	*ledger
	kind           int    // see kindOf
	rivalsAtBegin  int    // the claims that could refuse the attempt
	begunAtBegin   int    // the attempts of such claims so far, and this attempt if it is exclusive
	largestAtBegin uint64 // the largest fence
}

// rivals returns how many claims exclude the claim of v. counts[k] is the number of claims of kind
// k. A shared claim excludes only exclusive claims. An exclusive claim excludes all others.
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
	v := &visit{ledger: l, kind: kindOf(shared), largestAtBegin: l.largest}
	v.rivalsAtBegin = v.rivals(l.claims)
	l.claims[v.kind]++

	// Count this attempt first. Then, if rivals(l.begun) exceeds begunAtBegin later, another attempt
	// has begun since.
	l.begun[v.kind]++
	v.begunAtBegin = v.rivals(l.begun)
	return v
}

// got checks a grant. It counts the caller as a holder until the caller calls the method left.
func (v *visit) got(fence uint64) {
	v.mu.Lock()
	defer v.mu.Unlock()
	n := v.rivals(v.holders)
	isShared := v.kind == kindOf(true)
	require(n == 0, "a grant (shared: %v) while %d others have the key", isShared, n)
	v.holders[v.kind]++

	// The fence of an exclusive hold must exceed all fences so far. The fence of a shared hold need
	// only exceed the fences noted before its attempt, because callers note simultaneous shared
	// grants in any order. A fence of zero means that the caller has not asked for a fence.
	previous := v.largest
	if isShared {
		previous = v.largestAtBegin
	}
	require(fence == 0 || fence > previous,
		"fence %d (shared: %v) after %d", fence, isShared, previous)
	v.largest = max(v.largest, fence)
}

// left no longer counts the caller as a holder. The caller calls left before it releases its hold,
// because the next caller may be granted the key before the release returns.
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

// refused ends the try unless another claim, which excludes the claim of v, may have been in the
// store during the attempt. Such a claim was there when the attempt began, or began later.
func (v *visit) refused() {
	v.mu.Lock()
	defer v.mu.Unlock()
	laterRivals := v.rivals(v.begun) - v.begunAtBegin
	require(v.rivalsAtBegin > 0 || laterRivals > 0,
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
	ledger [2]*ledger // the ledger of each key
}

// users returns users of two new keys.
func (e *env) users(shared bool) *users {
	u := &users{e: e, shared: shared, fenced: e.traits.Fenced, keys: [2]string{e.key(), e.key()},
		ledger: [2]*ledger{{}, {}}}
	if shared {
		u.keep = 4 * time.Millisecond // so that shared holds overlap
	}
	return u
}

// draw returns a random key, its ledger, and whether the next attempt must be shared.
func (u *users) draw() (key string, l *ledger, shared bool) {
	k := rand.N(len(u.keys))
	return u.keys[k], u.ledger[k], u.shared && rand.N(2) == 0
}

// byDrivers lets six callers use the keys by direct calls of the drivers.
func (u *users) byDrivers(drivers []*driver) {
	must(u.e.each(6, func(i int) {
		for range 25 {
			u.useDriver(drivers[i%len(drivers)])
		}
	}))
}

// useDriver makes one attempt. If it is granted, useDriver sometimes renews the hold, and releases
// it.
func (u *users) useDriver(d *driver) {
	key, l, shared := u.draw()
	claim := u.e.claimOf(key, u.e.long)
	claim.Fenced = u.fenced && rand.N(2) == 0
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

// byClients lets nine callers use the keys through Clients, for about three seconds at most.
func (u *users) byClients(clients []*hasp.Client) {
	began := time.Now()
	must(u.e.each(9, func(i int) {
		for n := 0; n < 20 && time.Since(began) < 3*time.Second; n++ {
			u.useClient(clients[i%len(clients)])
		}
	}))
}

// useClient calls TryLock or, less often, Lock. After a grant it keeps the hold for up to the time
// in the field keep.
func (u *users) useClient(client *hasp.Client) {
	key, l, shared := u.draw()
	var opts []hasp.Option
	if u.fenced && rand.N(2) == 0 {
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
	lease, err := lock(u.e.ctx, key, opts...)
	if errors.Is(err, hasp.ErrHeld) {
		v.refused()
		return
	}

	mustf(err, "Lock or TryLock by one of many callers")
	v.got(lease.Fence())
	if u.keep > 0 {
		u.e.sleep(rand.N(u.keep))
	}

	v.left()
	mustf(lease.Unlock(u.e.ctx), "Unlock by one of many callers")
}
