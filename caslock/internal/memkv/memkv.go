// Package memkv is a store in memory for tests of caslock. It can delay, lose and repeat calls.
package memkv

import (
	"context"
	"crypto/md5"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/caslock"
)

// Store is a store in memory. Its fields are set before it is used.
type Store struct {
	Hash    bool                           // versions are hashes of the values, as the ETags of S3 are
	Fault   func(op string) Fault          // decides on each call of get, put and delete; may be nil
	Written func(key string, value []byte) // is called with each value when it is written; may be nil
	Calls   atomic.Int64                   // counts the calls

	mu       sync.Mutex // guards the fields below
	revision int
	entries  map[string]caslock.Entry
	before   map[string]caslock.Entry // for each key, the entry from before the last write
	watchers map[chan struct{}]string
}

// Fault is what happens to one call. The zero value is no fault. If ctx ends before the reply comes,
// the request is still carried out.
type Fault struct {
	Request, Reply time.Duration // how long the request and the reply take
	Lost           bool          // the request is lost
	Twice          bool          // a library repeats the call, and returns the answer to the repeat
	Stale          bool          // a get returns the value from before the last write
}

// ErrLost is the error of a call whose request was lost.
var ErrLost = errors.New("the request was lost")

// New returns an empty store.
func New() *Store {
	return &Store{entries: map[string]caslock.Entry{}, before: map[string]caslock.Entry{}, watchers: map[chan struct{}]string{}}
}

// Limits says that calls end promptly, and that only this process reaches the store.
func (s *Store) Limits() (backend.Reach, backend.Cancellation) {
	return backend.Process, backend.CancelPrompt
}

// call runs the function do, with mu held and with the fault that Store.Fault returns for op.
func (s *Store) call(ctx context.Context, op string, do func(f Fault) (caslock.Entry, error)) (caslock.Entry, error) {
	s.Calls.Add(1)
	if err := ctx.Err(); err != nil {
		return caslock.Entry{}, err
	}
	var f Fault
	if s.Fault != nil {
		f = s.Fault(op)
	}
	if f.Lost {
		return caslock.Entry{}, ErrLost
	}

	type answer struct {
		e   caslock.Entry
		err error
	}
	answers := make(chan answer, 1)
	go func() {
		time.Sleep(f.Request)
		s.mu.Lock()
		if f.Twice {
			_, _ = do(f)
		}
		e, err := do(f)
		s.mu.Unlock()
		time.Sleep(f.Reply)
		answers <- answer{e, err}
	}()
	select {
	case a := <-answers:
		return a.e, a.err
	case <-ctx.Done():
		return caslock.Entry{}, ctx.Err()
	}
}

// Get returns the entry of key.
func (s *Store) Get(ctx context.Context, key string) (caslock.Entry, error) {
	return s.call(ctx, "get", func(f Fault) (caslock.Entry, error) {
		if f.Stale {
			return s.before[key], nil
		}
		return s.entries[key], nil
	})
}

// Put replaces the value of key, if it has this version.
func (s *Store) Put(ctx context.Context, key string, value []byte, version string) (string, error) {
	e, err := s.call(ctx, "put", func(Fault) (caslock.Entry, error) {
		if s.entries[key].Version != version {
			return caslock.Entry{}, caslock.ErrConflict
		}
		s.revision++
		e := caslock.Entry{Value: slices.Clone(value), Version: fmt.Sprint(s.revision)}
		if s.Hash {
			e.Version = fmt.Sprintf("%x", md5.Sum(value))
		}
		s.set(key, e)
		return e, nil
	})
	return e.Version, err
}

// Delete removes key, if it has this version.
func (s *Store) Delete(ctx context.Context, key, version string) error {
	_, err := s.call(ctx, "delete", func(Fault) (caslock.Entry, error) {
		if version == "" {
			panic("a delete without a version")
		}
		if s.entries[key].Version != version {
			return caslock.Entry{}, caslock.ErrConflict
		}
		s.set(key, caslock.Entry{})
		return caslock.Entry{}, nil
	})
	return err
}

// set changes an entry and wakes its watchers. The caller holds mu.
func (s *Store) set(key string, e caslock.Entry) {
	s.before[key], s.entries[key] = s.entries[key], e
	if e.Version == "" {
		delete(s.entries, key)
	} else if s.Written != nil {
		s.Written(key, e.Value)
	}
	for ch, of := range s.watchers {
		if of == key {
			select {
			case ch <- struct{}{}:
			default:
			}
		}
	}
}

// Watch reports the changes of key.
func (s *Store) Watch(_ context.Context, key string) (<-chan struct{}, func(), error) {
	ch := make(chan struct{}, 1)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.watchers[ch] = key
	return ch, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.watchers, ch)
	}, nil
}

// Scan returns entries in the order of their keys.
func (s *Store) Scan(ctx context.Context, position string, n int) (es []caslock.Entry, next string, err error) {
	s.Calls.Add(1)
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, k := range slices.Sorted(maps.Keys(s.entries)) {
		if k <= position {
			continue
		}
		if len(es) == n {
			return es, next, ctx.Err()
		}
		es, next = append(es, s.entries[k]), k
	}
	return es, "", ctx.Err()
}
