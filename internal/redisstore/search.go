package redisstore

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/redisstore/resp"
)

// searcher searches for the servers of a topology on behalf of all callers. Only one search runs at
// a time.
type searcher struct {
	d   *dialer
	run func(ctx context.Context, timeout time.Duration) error // makes one search

	mu    sync.Mutex // guards the fields below
	now   *search    // the search under way; nil if there is none
	ended time.Time  // when the last search ended
}

// search is the state of one search. Several callers may wait for the end of the search.
type search struct {
	done chan struct{} // closed when err is set
	err  error
}

// pause is the least time between the end of a search and the next search.
const pause = 100 * time.Millisecond

// wait blocks until the search under way ends. If no search is under way, wait starts one.
func (s *searcher) wait(ctx context.Context) error {
	s.mu.Lock()
	k := s.startLocked()
	s.mu.Unlock()

	select {
	case <-k.done:
		return k.err
	// If this caller leaves, the search goes on for the others.
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

// startLocked returns the search under way. If there is none, it starts one.
func (s *searcher) startLocked() *search {
	if s.now != nil {
		return s.now
	}

	k, pause := &search{done: make(chan struct{})}, pause-time.Since(s.ended)
	if !s.d.spawn(func() { s.search(k, pause) }) {
		k.err = redis.ErrClosed
		close(k.done)
		return k
	}
	s.now = k
	return k
}

// search sleeps for the duration pause, and then runs the search whose state is k.
func (s *searcher) search(k *search, pause time.Duration) {
	select {
	case <-time.After(pause):
	case <-s.d.open.Done():
	}
	timeout := time.Duration(s.d.timeout.Load())
	ctx, cancel := context.WithTimeout(s.d.open, timeout)
	defer cancel()
	k.err = s.run(ctx, timeout)

	s.mu.Lock()
	defer s.mu.Unlock()
	// Hold mu until s.now is nil, so that later callers do not find this search.
	close(k.done)
	s.now, s.ended = nil, time.Now()
}

// grace is how long a search waits for more answers after the first one.
const grace = time.Second

// askAll calls ask for each server, and returns the answers and errors in the order in which they
// came. The calls begin one after another, with the duration pause in between. When a call fails,
// another one begins at once. When the duration grace has passed since the first answer, askAll
// cancels the calls that are still running.
func askAll[T any](ctx context.Context, servers []*server, pause, grace time.Duration, ask func(context.Context, *server) (T, error)) (answers []T, errs []error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type result struct {
		answer T
		err    error
	}
	results := make(chan result)
	failed := make(chan struct{}, len(servers)) // holds an element for each call that may begin early
	for i, at := range servers {
		go func() {
			select {
			case <-time.After(time.Duration(i) * pause):
			case <-failed:
			case <-ctx.Done(): // ask then returns at once
			}
			answer, err := ask(ctx, at)
			results <- result{answer, err}
		}()
	}

	for len(answers)+len(errs) < len(servers) {
		r := <-results
		if r.err != nil {
			errs = append(errs, r.err)
			failed <- struct{}{}
			continue
		}
		answers = append(answers, r.answer)
		if len(answers) == 1 {
			defer time.AfterFunc(grace, cancel).Stop() // the running calls then return errors
		}
	}
	return answers, errs
}

// The function worst returns the most useful of the errors of several servers. If a server replied
// with an error, that error is the result. kind is a word for the servers in the plural.
func worst(errs []error, kind string) error {
	for _, err := range errs {
		if resp.IsReply(err) {
			return err
		}
	}
	if len(errs) == 1 {
		return errs[0]
	}
	return fmt.Errorf("none of %d %s can be used: %w", len(errs), kind, errs[0])
}

// mayHaveMoved reports whether another server may have replaced the one that was asked. This is so
// if the reply says it, or if there was no reply and the call was not cancelled.
func mayHaveMoved(err error) bool {
	switch {
	case errors.Is(err, context.Canceled):
		return false
	case resp.IsReadOnly(err):
		return true
	case resp.IsReply(err):
		return slices.ContainsFunc([]string{"MASTERDOWN", "CLUSTERDOWN", "MOVED"}, func(word string) bool {
			return redis.HasErrorPrefix(err, word)
		})
	}
	return true
}
