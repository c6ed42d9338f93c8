package broken

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/hasplock/hasp/conformance"
)

// latency is how long a command takes to the store, and its reply back.
const latency = 200 * time.Microsecond

// way is a driver's connection path to the store.
type way struct {
	store *store

	mu      sync.Mutex // guards all below
	state   conformance.LinkState
	changed chan struct{}         // closed and replaced when state changes
	then    conformance.LinkState // the state after the next left replies, if not Up
	left    int
}

func newWay(s *store) *way { return &way{store: s, changed: make(chan struct{})} }

func (w *way) set(state conformance.LinkState) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.then = conformance.Up
	w.setLocked(state)
}

// setAfter is the SetAfter of a [conformance.Link].
func (w *way) setAfter(replies int, state conformance.LinkState) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.setLocked(conformance.Up)
	w.then, w.left = state, replies
}

// count counts a reply for setAfter.
func (w *way) count() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.then == conformance.Up {
		return
	}
	if w.left--; w.left < 0 {
		w.state, w.then = w.then, conformance.Up
		w.setLocked(w.state)
	}
}

func (w *way) setLocked(state conformance.LinkState) {
	w.state = state
	close(w.changed)
	w.changed = make(chan struct{})
}

func (w *way) now() (conformance.LinkState, <-chan struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.state, w.changed
}

var (
	errRefused   = errors.New("broken: connection refused")
	errNoReply   = errors.New("broken: connection lost before the reply")
	errWrongType = errors.New("broken: a record of another type")
)

// call makes the store run f, unless the request is lost, and returns with the
// reply. An error means that the outcome is unknown.
func (w *way) call(ctx context.Context, f func(now time.Time)) error {
	for {
		state, changed := w.now()
		if state == conformance.Down {
			return errRefused
		}
		if state != conformance.Hung {
			break
		}

		// The request arrives when the link works again.
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}

	if err := pause(ctx, latency); err != nil {
		return err // the request was not sent
	}
	if err := w.store.do(f); err != nil {
		return err
	}
	return w.reply(ctx)
}

func (w *way) reply(ctx context.Context) error {
	w.count()
	for {
		state, changed := w.now()
		switch state {
		case conformance.Down:
			return errNoReply
		case conformance.Slow:
			return pause(ctx, conformance.Delay)
		case conformance.Up:
			return pause(ctx, latency)
		}

		// A deaf link loses the reply for good. A hung link only holds it back.
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
		if state == conformance.Deaf {
			return errNoReply
		}
	}
}

// link makes a new way.
func (s *store) link() *conformance.Link {
	w := newWay(s)
	var name string
	s.locked(func() {
		name = fmt.Sprintf("link %d", len(s.ways))
		s.ways[name] = w
	})
	return &conformance.Link{Store: name, Set: w.set, SetAfter: w.setAfter, Close: func() { w.set(conformance.Down) }}
}

// endConnections ends all connections.
func (s *store) endConnections() {
	s.locked(func() {
		s.kick()
		s.kicked, s.kick = context.WithCancel(context.Background())
		for _, w := range s.ways {
			w.set(conformance.Down)
			w.set(conformance.Up)
		}
	})
}

// delivers reports whether messages of the store arrive.
func (w *way) delivers() bool {
	state, _ := w.now()
	return state == conformance.Up || state == conformance.Slow
}

func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
