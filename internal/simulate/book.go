package main

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/hasplock/hasp"
)

// book records what callers observe, and reports what a lock must not do. All
// times are the bubble's, so that every comparison is exact.
type book struct {
	t    *testing.T
	seed string

	mu     sync.Mutex
	keys   map[string]*page
	events map[string]*tally // by the Client's name
	granted,
	refused int
	forgot time.Time // when the store last lost what it may lose
}

// page is what is known of one key.
type page struct {
	calls  map[string]int           // under way, by the Client's name
	had    map[string][]*hasp.Lease // that were trusted at the last look, by the Client's name
	ended  map[string]time.Time     // when one of them was last found to have ended
	began  []time.Time              // of each group: when the Lock of its first lease began
	live   []entry                  // leases that were held at the last look
	fence  uint64                   // the largest granted
	fenced time.Time                // when that fence was noted
	broke  time.Time                // no hold that began before is exclusive, since a Break may have ended it
}

// entry is one lease. Leases of one group share a hold, by re-entry. The store
// granted that hold after since.
type entry struct {
	lease *hasp.Lease
	group int
	since time.Time
}

// tally counts the calls and the events of one Client.
type tally struct{ calls, acquired, refused, released, lost int }

func newBook(t *testing.T, seed string) *book {
	return &book{t: t, seed: seed, keys: map[string]*page{}, events: map[string]*tally{}}
}

func (b *book) errorf(format string, args ...any) {
	b.t.Helper()
	b.t.Errorf("%s at %v: %s", b.seed, time.Now().Format("05.000"), fmt.Sprintf(format, args...))
}

// has notes that a Client has a lease. Its caller may not have it yet.
func (b *book) has(client string, l *hasp.Lease) {
	b.mu.Lock()
	defer b.mu.Unlock()
	p := b.page(l.Key())
	p.had[client] = append(p.had[client], l)
}

// took notes a new lease, whose Lock began at since, and returns its group.
// Group is 0 for a new hold, or that of the lease which was re-entered.
func (b *book) took(l *hasp.Lease, group int, since time.Time) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	p := b.page(l.Key())
	if group == 0 {
		b.granted++
		p.began = append(p.began, since)
		group = len(p.began)
		if fence := l.Fence(); fence > 0 {
			// A grant on its way while the store lost its data comes too late.
			// So does a grant on its way when its hold is broken, if the next holder is
			// noted first.
			if fence <= p.fence && !since.Before(b.forgot) && !(since.Before(p.broke) && since.Before(p.fenced)) {
				b.errorf("key %s: fence %d after %d", l.Key(), fence, p.fence)
			}
			if fence > p.fence {
				p.fence, p.fenced = fence, time.Now()
			}
		}
	}
	if l.Err() == nil {
		p.live = append(p.live, entry{l, group, p.began[group-1]})
	}
	b.check(l.Key(), p)
	return group
}

// look checks all keys at this instant.
func (b *book) look() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for key, p := range b.keys {
		b.check(key, p)
	}
}

// check reports two holds of one key that are both trusted. The caller holds
// mu.
func (b *book) check(key string, p *page) {
	kept := p.live[:0]
	for _, e := range p.live {
		if e.lease.Err() != nil {
			continue
		}
		for _, o := range kept {
			// What was granted before the store lost its data is not known to it.
			known := !o.since.Before(b.forgot) && !e.since.Before(b.forgot) && !o.since.Before(p.broke) && !e.since.Before(p.broke)
			if o.group != e.group && known {
				b.errorf("key %s: two holders, since %v and %v", key, o.since.Format("05.000"), e.since.Format("05.000"))
			}
		}
		kept = append(kept, e)
	}
	clear(p.live[len(kept):])
	p.live = kept

	for client, leases := range p.had {
		p.had[client] = slices.DeleteFunc(leases, func(l *hasp.Lease) bool {
			if l.Err() == nil {
				return false
			}
			p.ended[client] = time.Now()
			return true
		})
	}
}

// forget notes that the store has lost its data now.
func (b *book) forget() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.forgot = time.Now().Add(1) // what was granted at this very instant is lost, too
}

// broke notes that a Break of key may be carried out at any time before until.
func (b *book) broke(key string, until time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if p := b.page(key); until.After(p.broke) {
		p.broke = until
	}
}

// held reports whether this Client has a lease of key that is trusted now, or had
// one within the last while.
func (b *book) held(client, key string, within time.Duration) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	p := b.page(key)
	b.check(key, p)
	return len(p.had[client]) > 0 || time.Since(p.ended[client]) < within
}

func (b *book) page(key string) *page {
	p := b.keys[key]
	if p == nil {
		p = &page{calls: map[string]int{}, had: map[string][]*hasp.Lease{}, ended: map[string]time.Time{}}
		b.keys[key] = p
	}
	return p
}

// tallyOf returns the counts of one Client, which are guarded by mu.
func (b *book) tallyOf(client string) *tally {
	t := b.events[client]
	if t == nil {
		t = &tally{}
		b.events[client] = t
	}
	return t
}

// observe returns an Options.Observe for a Client.
func (b *book) observe(client string) func(hasp.Event) {
	return func(e hasp.Event) {
		b.mu.Lock()
		defer b.mu.Unlock()
		t := b.tallyOf(client)
		switch e.Kind {
		case hasp.EventAcquired:
			t.acquired++
		case hasp.EventRefused:
			t.refused++
			b.refused++
		case hasp.EventReleased:
			t.released++
		case hasp.EventLost:
			t.lost++
		}
	}
}

// called counts a call of Lock or TryLock, until done is called.
func (b *book) called(client, key string) (done func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.tallyOf(client).calls++
	calls := b.page(key).calls
	calls[client]++
	return func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		calls[client]--
	}
}

// asked reports whether a call of this Client for key is under way.
func (b *book) asked(client, key string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.page(key).calls[client] > 0
}

// audit checks, once all Clients are closed and all callers have returned, that
// the events of each Client add up.
func (b *book) audit() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for client, t := range b.events {
		if t.calls != t.acquired+t.refused || t.acquired != t.released+t.lost {
			b.errorf("events of %s do not add up: %+v", client, *t)
		}
	}
}
