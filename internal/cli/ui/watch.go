package ui

import (
	"context"
	"strings"
	"sync"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/cli/text"
)

// These constants bound a watcher's memory. If the store has more keys, the page does not show
// them, and says so.
const (
	maxKeys  = 20_000
	maxBytes = 16 << 20 // the length of all keys, owners and waiters together
	maxNames = 100      // how many waiters and how many owners are kept for a key
	maxName  = 256      // bytes of a name of an owner or waiter; the rest is cut off
)

// After a list that took the time t, the watcher rests for at least restFactor·t.
const restFactor = 2

// watcher lists a store and compares the lists.
type watcher struct {
	src Source
	o   Options

	browserCame  chan struct{} // closed when the first browser has come
	firstBrowser sync.Once     // closes browserCame

	// listing is a semaphore with one place. A request takes the place to list the store, or to
	// wait until it may list. Only this request changes the fields known, history and next.
	listing chan struct{}

	// mu guards the fields below. It is not held during a call to the store.
	mu      sync.Mutex
	known   map[string]*lock // maps the keys of the last list to their locks
	more    int              // keys of the last list that are not in known
	lists   int              // how many lists have ended, also those that failed
	next    time.Time        // when the next list may begin
	listed  time.Time        // when the last list that succeeded began; zero before the first
	took    time.Duration    // the duration of that list
	rest    time.Duration    // the time from the last list to the next
	failure string           // why the last list failed; empty if it succeeded
	since   time.Time        // when lists began to fail; zero if the last list succeeded
	history history
}

// lock is a key that is held or waited for.
type lock struct {
	backend.Entry
	seen        time.Time     // when the entry arrived
	first       time.Time     // when a list first showed this hold
	maxTTL      time.Duration // the largest TTL that lists have shown for this hold
	size        int           // the length in bytes of the strings of the entry
	open        []span        // the spans that have not ended
	waiterCount int           // how many waiters there are; Waiters has only the first maxNames
	sharerCount int           // how many owners of shared holds there are; as with waiterCount
}

func newWatcher(src Source, o Options) *watcher {
	return &watcher{
		src:         src,
		o:           o,
		browserCame: make(chan struct{}),
		listing:     make(chan struct{}, 1),
		known:       map[string]*lock{},
	}
}

// A connected browser asks for each list. So if a list begins later than watcher.next +
// unwatchedAfter, no browser was connected meanwhile.
const unwatchedAfter = 2 * time.Second

// await waits until there is a list that the browser does not have. The argument has is the number
// of the browser's last list. Of all browsers' requests, one lists the store, when the next list
// may begin, and the others wait for it. await returns early if ctx ends.
func (w *watcher) await(ctx context.Context, has int) {
	w.firstBrowser.Do(func() { close(w.browserCame) })
	select {
	case w.listing <- struct{}{}:
		defer func() { <-w.listing }()
	case <-ctx.Done():
		return
	}

	w.mu.Lock()
	lists := w.lists
	next := w.next
	w.mu.Unlock()
	wasUnwatched := time.Since(next) > unwatchedAfter
	if lists != has && !wasUnwatched {
		return // another browser's request has listed the store, and that list is not old
	}

	select {
	case <-time.After(time.Until(next)):
	case <-ctx.Done():
		return
	}

	began := time.Now()
	w.listOnce(ctx, wasUnwatched)
	took := time.Since(began)

	// Rest even if the browser has left, because it may come back at once.
	w.mu.Lock()
	defer w.mu.Unlock()
	w.rest = max(w.o.Every-took, restFactor*took)
	w.next = time.Now().Add(w.rest)
}

// AwaitBrowser waits until the first browser has connected or ctx is done.
func (w *watcher) AwaitBrowser(ctx context.Context) error {
	select {
	case <-w.browserCame:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// listOnce lists the store, and records the list or the failure. If ctx ends, it records nothing.
// The argument wasUnwatched says that no browser has asked for a while.
func (w *watcher) listOnce(ctx context.Context, wasUnwatched bool) {
	began := time.Now()
	next, more, err := w.list(ctx)
	if ctx.Err() != nil {
		return
	}

	w.mu.Lock()
	defer w.mu.Unlock()
	now := time.Now()
	w.lists++
	if err != nil {
		if w.failure == "" {
			w.since = now
		}
		w.failure = text.Plain(w.o.Redact(err.Error()))
		return
	}

	// If the last list was long ago, holds may have begun and ended since then: record a gap.
	switch {
	case w.listed.IsZero(): // this is the first list, so there is nothing before it
	case w.failure != "":
		w.history.addGap("outage", w.listed, now)
	case wasUnwatched:
		w.history.addGap("unwatched", w.listed, now)
	}

	w.compare(next, now)
	w.listed = began
	w.took = now.Sub(began)
	w.more = more
	w.failure = ""
	w.since = time.Time{}
}

// list maps the keys of the store to their locks. The result more counts keys beyond the bounds.
func (w *watcher) list(ctx context.Context) (next map[string]*lock, more int, err error) {
	next = map[string]*lock{}
	bytes := 0
	for e, err := range w.src.List(ctx, w.o.Prefix) {
		if err != nil {
			return nil, 0, err
		}
		l := newLock(e)
		if len(next) == maxKeys || bytes+l.size > maxBytes {
			more++
			continue
		}
		next[e.Key] = l
		bytes += l.size
	}

	return next, more, nil
}

// newLock returns the lock of an entry that has just arrived. It cuts long names. It drops waiters
// and owners beyond maxNames.
func newLock(e backend.Entry) *lock {
	l := &lock{Entry: e, seen: time.Now(), waiterCount: len(e.Waiters), sharerCount: len(e.Shared)}
	cut := func(names []string) (short []string) {
		for _, s := range names[:min(len(names), maxNames)] {
			s = strings.Clone(s[:min(len(s), maxName)]) // a slice would keep the whole string in memory
			l.size += len(s)
			short = append(short, s)
		}

		return short
	}

	l.Owner = strings.Clone(e.Owner[:min(len(e.Owner), maxName)])
	l.Waiters = cut(e.Waiters)
	l.Shared = cut(e.Shared)
	l.size += len(l.Key) + len(l.Owner)
	return l
}

// until returns the time at which the term ends. This is the zero time if the key is free or its
// hold has no end.
func (l *lock) until() time.Time {
	if !l.Held || l.TTL < 0 {
		return time.Time{}
	}
	return l.seen.Add(l.TTL)
}

// renewalDue returns the time at which the next renewal of the hold is due. A holder renews after a
// third of its term, when two thirds are left. The largest TTL that was seen is about that term.
func (l *lock) renewalDue() time.Time { return l.until().Add(-l.maxTTL * 2 / 3) }

// unrenewed reports whether the holder seems to have stopped renewing. hasp renews when two thirds
// of the term are left, so if less than half is left, a renewal is overdue. A hold without an end
// needs no renewal, and neither does one that only a min hold keeps after the unlock.
func (l *lock) unrenewed() bool {
	needsRenewal := l.Held && !l.Kept
	return needsRenewal && l.TTL >= 0 && l.TTL < l.maxTTL/2
}

// compare sets w.known to next, the locks of a new list, and records in the history what has
// changed. A hold that goes on keeps the values of first and maxTTL. The caller holds w.mu.
func (w *watcher) compare(next map[string]*lock, now time.Time) {
	for key, l := range next {
		l.first = l.seen
		l.maxTTL = l.TTL
		old := w.known[key]
		if old != nil && SameHold(old.Status, l.Status) {
			l.first = old.first
			l.maxTTL = max(old.maxTTL, l.TTL)
		}
		w.history.follow(old, l)
	}

	for key, old := range w.known {
		if next[key] == nil { // the key is free now, and no caller waits for it
			w.history.follow(old, &lock{Entry: backend.Entry{Key: key}, seen: now})
		}
	}

	w.known = next
}

// The method detail returns all that the page can show about one key.
func (w *watcher) detail(key string) detail {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := time.Now()
	d := detail{
		Key:     shown(key),
		Now:     ms(now),
		Listed:  ms(w.listed),
		Waiters: []string{}, // and not nil, which would be null in JSON
		Shared:  []string{},
	}
	l := w.known[key]
	if l != nil {
		d.Row = new(rowOf(l))
		for _, s := range l.Waiters {
			d.Waiters = append(d.Waiters, shown(s))
		}
		for _, s := range l.Shared {
			d.Shared = append(d.Shared, shown(s))
		}
	}

	d.Lanes = w.history.lanes(key, l)
	d.Gaps = append([]unwatched{}, w.history.gaps...)
	if w.failure != "" && !w.listed.IsZero() { // the outage goes on, and listOnce records it at its end
		d.Gaps = append(d.Gaps, unwatched{"outage", ms(w.listed), 0})
	}
	return d
}

// The method table returns the rows of the last list, in no particular order.
func (w *watcher) table() table {
	w.mu.Lock()
	defer w.mu.Unlock()
	t := table{
		Now:    ms(time.Now()),
		Number: w.lists,
		Store:  store{w.o.Store, shown(w.o.Prefix), w.o.Ordered},
		Rows:   make([]tableRow, 0, len(w.known)),
		Status: status{
			Listed: ms(w.listed),
			Took:   w.took.Milliseconds(),
			Rest:   w.rest.Milliseconds(),
			Keys:   len(w.known),
			More:   w.more,
			Error:  w.failure,
			Since:  ms(w.since),
		},
	}

	for _, l := range w.known {
		t.Rows = append(t.Rows, rowOf(l))
	}
	return t
}
