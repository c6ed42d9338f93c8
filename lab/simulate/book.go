package main

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/hasplock/hasp"
)

// book records what callers observe, and reports each broken promise of a lock. All times are times
// of the bubble, so every comparison is exact.
type book struct {
	t     *testing.T
	seed  string
	found func(string) // if not nil, this function receives the errors instead of t
	same  bool         // two shared holds may have the same fence

	// A min hold may end too early by this duration, because the store's clock is fast.
	early time.Duration

	mu      sync.Mutex // guards all fields below
	keys    map[string]*page
	events  map[string]*tally // by the Client's name
	granted int
	forgot  time.Time // the store may have lost holds that it granted before this time
	woke    time.Time // when the Clients' host last slept
}

// page is what is known about one key.
type page struct {
	groups []group           // group n is groups[n-1]
	live   []entry           // leases that were trusted at the last check
	fence  uint64            // the largest fence
	fenced time.Time         // when the largest fence was noted
	alone  uint64            // the largest fence of an exclusive hold
	drawn  map[uint64]bool   // all fences
	broke  time.Time         // a Break may have ended holds granted before this time
	users  map[string]*usage // by the Client's name

	kept      time.Time // the latest end of a min hold
	keptSince time.Time // when the Lock with that min hold began
}

// group describes leases that share one hold by re-entry. The time since is before the grant.
type group struct {
	since  time.Time
	shared bool // WithShared
}

// entry is one lease, and the number of its group.
type entry struct {
	lease *hasp.Lease
	n     int
	group
}

// usage is what is known about the use of one key by one Client.
type usage struct {
	calls  int           // calls in flight
	leases []*hasp.Lease // leases that were trusted at the last check
	ended  time.Time     // when a check last found that one of the leases had ended
}

// tally counts the calls of one Client, and the events EventRequested of that Client.
type tally struct {
	calls, requested int

	// the kind of the last event of each call or lease that has not ended, under its Event.ID
	open map[uint64]hasp.EventKind
}

// follows notes the event e, and reports whether e may follow the last event with the same ID.
func (t *tally) follows(e hasp.Event) bool {
	before := t.open[e.ID]
	switch e.Kind {
	case hasp.EventRequested:
		t.requested++
		t.open[e.ID] = e.Kind
		return before == ""
	case hasp.EventAcquired:
		t.open[e.ID] = e.Kind
		return before == hasp.EventRequested
	case hasp.EventRefused:
		delete(t.open, e.ID)
		return before == hasp.EventRequested
	case hasp.EventReleased, hasp.EventDetached, hasp.EventLost:
		delete(t.open, e.ID)
		return before == hasp.EventAcquired
	}

	return true // a renewal that failed may be reported late
}

func newBook(t *testing.T, seed string) *book {
	return &book{t: t, seed: seed, keys: map[string]*page{}, events: map[string]*tally{}}
}

func (b *book) errorf(format string, args ...any) {
	b.t.Helper()
	text := fmt.Sprintf(format, args...)
	if b.found != nil {
		b.found(text)
		return
	}
	b.t.Errorf("%s at %v: %s", b.seed, time.Now().Format("05.000"), text)
}

// entryOf returns m[k]. If m[k] is nil, entryOf first sets it to a new V.
func entryOf[K comparable, V any](m map[K]*V, k K) *V {
	if m[k] == nil {
		m[k] = new(V)
	}
	return m[k]
}

// usageLocked returns the usage of a key by a Client.
func (b *book) usageLocked(client, key string) *usage {
	p := entryOf(b.keys, key)
	if p.users == nil {
		p.users = map[string]*usage{}
	}
	return entryOf(p.users, client)
}

// noteLease notes that a Client has a lease, before the caller receives the lease.
func (b *book) noteLease(client string, l *hasp.Lease) {
	b.mu.Lock()
	defer b.mu.Unlock()
	u := b.usageLocked(client, l.Key())
	u.leases = append(u.leases, l)
}

// took notes a lease from a Lock that began at the time since. If n is 0, the lease has a new hold;
// otherwise the lease re-entered the hold of group n. took returns the number of its group.
func (b *book) took(l *hasp.Lease, n int, since time.Time) int {
	return b.take(l, n, group{since: since})
}

// take does the same as took, for a hold that may be shared.
func (b *book) take(l *hasp.Lease, n int, g group) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	key := l.Key()
	if key == slotted {
		key = fmt.Sprintf("%s#%d", key, l.Slot())
	}
	p := entryOf(b.keys, key)
	if n == 0 {
		b.granted++
		p.groups = append(p.groups, g)
		n = len(p.groups)
		b.checkFenceLocked(p, l, g)
		b.checkKeptLocked(p, l, g)
	}

	if l.Err() == nil {
		p.live = append(p.live, entry{l, n, p.groups[n-1]})
	}
	b.checkLocked(key, p)
	return n
}

// checkFenceLocked reports a fence that is not larger than earlier fences, or belongs to two holds.
func (b *book) checkFenceLocked(p *page, l *hasp.Lease, g group) {
	fence := l.Fence()
	if fence == 0 {
		return
	}
	// A smaller fence is no error if the grant was in flight when the store lost its data, or if
	// the hold was broken and the next holder was noted first.
	late := g.since.Before(b.forgot) || g.since.Before(p.broke) && !g.since.After(p.fenced)
	before := p.fence
	if g.shared && !g.since.After(p.fenced) {
		before = p.alone // two shared holds that overlap may be noted in either order
	}
	// A lease may end before its Lock returns. Then later holds may be noted first.
	if fence <= before && !late && l.Err() == nil && !b.wakingLocked() {
		b.errorf("key %s: fence %d after %d (shared: %v)", l.Key(), fence, before, g.shared)
	}
	if p.drawn[fence] && !late && !(g.shared && b.same) {
		b.errorf("key %s: two holds have fence %d", l.Key(), fence)
	}

	if fence > p.fence {
		p.fence = fence
		p.fenced = time.Now()
	}

	if !g.shared {
		p.alone = max(p.alone, fence)
	}
	if p.drawn == nil {
		p.drawn = map[uint64]bool{}
	}
	p.drawn[fence] = true
}

// grant contains the times of a call and of its grant. The caller may receive the lease later.
type grant struct{ asked, at time.Time }

// grantKey is the key of a *grant in the context of a call.
type grantKey struct{}

// note sets the times in g from the events of a call.
func (g *grant) note(e hasp.Event) {
	switch e.Kind {
	case hasp.EventRequested:
		g.asked = time.Now()
	case hasp.EventAcquired:
		// If the host slept meanwhile, e.Wait includes the sleep. Then it is only known that the
		// grant came after the call began.
		if g.at = g.asked.Add(e.Wait); g.at.After(time.Now()) {
			g.at = g.asked
		}
	}
}

// keep notes that group n has released a key, and that the group's min hold ends at the time end.
func (b *book) keep(key string, n int, end time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	p := entryOf(b.keys, key)
	if since := p.groups[n-1].since; end.After(p.kept) {
		p.kept = end
		p.keptSince = since
	}

	b.checkLocked(key, p)
	for _, e := range p.live {
		if e.n != n {
			b.checkKeptLocked(p, e.lease, e.group)
		}
	}
}

// checkKeptLocked reports a hold that began during the min hold of another hold.
func (b *book) checkKeptLocked(p *page, l *hasp.Lease, g group) {
	// The store may have forgotten a hold that began before one of b.forgot, p.broke and b.woke. A
	// hold may be noted long after its grant, because a caller of LockAll notes its first lease
	// only when it has its last lease.
	known := !b.wakingLocked()
	for _, since := range []time.Time{p.keptSince, g.since} {
		known = known && !since.Before(b.forgot) && !since.Before(p.broke) && !since.Before(b.woke)
	}
	if early := time.Until(p.kept); known && early > b.early && l.Err() == nil {
		b.errorf("key %s: granted %v before the end of a min hold", l.Key(), early)
	}
}

func (b *book) checkAll() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for key, p := range b.keys {
		b.checkLocked(key, p)
	}
}

// checkLocked reports two holds of one key that are both trusted, unless both are shared.
func (b *book) checkLocked(key string, p *page) {
	if b.wakingLocked() {
		return
	}
	// The store may have forgotten a hold that it granted before b.forgot or p.broke.
	known := func(e entry) bool { return !e.since.Before(b.forgot) && !e.since.Before(p.broke) }
	kept := p.live[:0]
	for _, e := range p.live {
		if e.lease.Err() != nil {
			continue
		}
		for _, o := range kept {
			if o.n != e.n && !(o.shared && e.shared) && known(o) && known(e) {
				b.errorf("key %s: two holders, since %v (shared: %v) and %v (shared: %v)", key,
					o.since.Format("05.000"), o.shared, e.since.Format("05.000"), e.shared)
			}
		}
		kept = append(kept, e)
	}

	clear(p.live[len(kept):])
	p.live = kept

	for _, u := range p.users {
		u.leases = slices.DeleteFunc(u.leases, func(l *hasp.Lease) bool {
			if l.Err() == nil {
				return false
			}
			u.ended = time.Now()
			return true
		})
	}
}

// forget notes that the store has lost its data now.
func (b *book) forget() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.forgot = time.Now().Add(1) // what was granted at this very instant is lost as well
}

// slept notes that the host of the Clients has begun to sleep.
func (b *book) slept() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.woke = time.Now()
}

// wakingLocked reports whether the Clients' host has just slept. The Clients may notice the sleep
// up to a millisecond later. Until then they may trust leases that have ended.
func (b *book) wakingLocked() bool {
	return !b.woke.IsZero() && time.Since(b.woke) <= time.Millisecond
}

// broke notes that a Break of a key may happen at any time before the time until.
func (b *book) broke(key string, until time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if p := entryOf(b.keys, key); until.After(p.broke) {
		p.broke = until
	}
}

// used reports what a Client does with a key: whether it has a trusted lease of the key, or had one
// less than d ago, and whether one of its calls for the key is in flight.
func (b *book) used(client, key string, d time.Duration) (here, asked bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.checkLocked(key, entryOf(b.keys, key))
	u := b.usageLocked(client, key)
	return len(u.leases) > 0 || time.Since(u.ended) < d, u.calls > 0
}

// observe returns an Options.Observe for a Client.
func (b *book) observe(client string) func(context.Context, hasp.Event) {
	return func(ctx context.Context, e hasp.Event) {
		b.mu.Lock()
		defer b.mu.Unlock()
		if g, ok := ctx.Value(grantKey{}).(*grant); ok {
			g.note(e)
		}
		t := entryOf(b.events, client)
		if ctx.Value(directKey{}) != nil && e.Kind == hasp.EventRequested {
			t.calls++
		}
		if t.open == nil {
			t.open = map[uint64]hasp.EventKind{}
		}
		if before := t.open[e.ID]; !t.follows(e) {
			b.errorf("%s: %+v came after %q", client, e, before)
		}
	}
}

// called counts a call of Lock or TryLock, which lasts until the function done is called.
func (b *book) called(client, key string) (done func()) {
	b.mu.Lock()
	entryOf(b.events, client).calls++
	b.mu.Unlock()
	return b.wants(client, key)
}

// directKey marks the context of a DoAll that uses a Client directly. The method observe counts the
// calls of Lock that such a DoAll makes.
type directKey struct{}

// wants notes that a call for a key is in flight until the function done is called.
func (b *book) wants(client, key string) (done func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	u := b.usageLocked(client, key)
	u.calls++
	return func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		u.calls--
	}
}

// audit checks that the events of each Client add up. Before audit, all Clients must be closed, and
// all callers must have returned.
func (b *book) audit() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for client, t := range b.events {
		// If no ID is open, the method follows has found that each call and each lease ended once.
		if t.calls != t.requested || len(t.open) > 0 {
			b.errorf("events of %s do not add up: %+v", client, *t)
		}
	}
}
