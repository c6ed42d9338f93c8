package redisstore

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/redisstore/resp"
)

// searcher searches for the servers of a topology on behalf of all callers. One
// search runs at a time.
type searcher struct {
	run  func(ctx context.Context) error // makes one search
	open context.Context                 // ends with the Store
	wg   sync.WaitGroup                  // all goroutines of the topology

	mu    sync.Mutex // guards the fields below
	now   *search    // the search under way; nil if there is none
	again bool       // another search follows it
	ended time.Time  // when the last search ended
	over  bool       // no search starts any more
}

// search is one search.
type search struct {
	done chan struct{} // closed when err is set
	err  error
}

// pause is the least time between two searches.
const pause = 100 * time.Millisecond

// wait waits for the search under way, or else for a new one.
func (s *searcher) wait(ctx context.Context) error {
	s.mu.Lock()
	k := s.startLocked()
	s.mu.Unlock()

	select {
	case <-k.done:
		return k.err
	// The search goes on for the other callers.
	case <-ctx.Done():
		return ctx.Err()
	}
}

// request starts a search in the background, unless one is under way.
func (s *searcher) request() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.startLocked()
}

// requestNew has a search made in the background that begins after this moment.
func (s *searcher) requestNew() {
	s.mu.Lock()
	defer s.mu.Unlock()
	// A search under way may have asked before this moment, so another one follows it.
	s.again = s.now != nil
	s.startLocked()
}

// startLocked starts a search, unless one is under way, and returns it.
func (s *searcher) startLocked() *search {
	if s.now != nil {
		return s.now
	}

	k := &search{done: make(chan struct{})}
	// close sets over with mu held before it waits. So wg does not grow during that
	// wait.
	if s.over || s.open.Err() != nil {
		k.err = redis.ErrClosed
		close(k.done)
		return k
	}

	s.now = k
	wait := pause - time.Since(s.ended)
	s.wg.Go(func() {
		select {
		case <-time.After(wait):
		case <-s.open.Done():
		}
		// Set err before finish closes done, because the callers that wait read it
		// after that.
		k.err = s.run(s.open)
		s.finish(k)
	})
	return k
}

// finish ends a search, and starts the next one if that was requested.
func (s *searcher) finish(k *search) {
	s.mu.Lock()
	defer s.mu.Unlock()
	// With mu held: a caller gets either this search or a later one.
	close(k.done)
	s.now, s.ended = nil, time.Now()

	if s.again {
		s.again = false
		s.startLocked()
	}
}

// close waits until no goroutine of the topology runs. The caller has ended open.
func (s *searcher) close() {
	s.mu.Lock()
	s.over = true
	s.mu.Unlock()
	s.wg.Wait()
}

// ask sends a command that belongs to a search.
func (d *dialer) ask(ctx context.Context, rdb redis.UniversalClient, args ...any) (any, error) {
	within, end := d.calls.Begin(ctx)
	defer end()
	cmd := resp.NewCommand(within, args)
	// The command has the same error.
	_ = rdb.Process(within, cmd)
	return cmd.Result()
}

// worst returns the most useful of the errors of some servers: a reply before an
// error of the network. kind is what the servers are, in the plural.
func worst(errs []error, kind string) error {
	for _, err := range errs {
		if errors.As(err, new(redis.Error)) {
			return err
		}
	}
	if len(errs) == 1 {
		return errs[0]
	}
	return fmt.Errorf("none of %d %s answers: %w", len(errs), kind, errs[0])
}

// mayHaveMoved reports whether a server's error can mean that another server has
// its place: the server does not answer, or its reply says so.
func mayHaveMoved(err error) bool {
	var reply redis.Error
	switch {
	case errors.Is(err, context.Canceled):
		return false
	case errors.As(err, &reply):
		for _, word := range []string{"READONLY", "MASTERDOWN", "CLUSTERDOWN", "MOVED"} {
			if redis.HasErrorPrefix(err, word) {
				return true
			}
		}
		return false
	}
	return true
}
