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

// looker finds out who has what, for all who want to know: one search at a
// time.
type looker struct {
	search func(ctx context.Context) error
	open   context.Context // ends with the Store
	wg     sync.WaitGroup  // of all that the topology runs

	mu    sync.Mutex // guards the rest
	now   *look      // the search under way
	again bool       // another one is to follow
	ended time.Time  // of the last one
	over  bool       // nothing is to be started any more
}

// look is one search.
type look struct {
	done chan struct{} // closed when err is there
	err  error
}

// pause is the least time between two searches.
const pause = 100 * time.Millisecond

// wait returns when the next search, or the one under way, has ended.
func (l *looker) wait(ctx context.Context) error {
	l.mu.Lock()
	k := l.start()
	l.mu.Unlock()
	select {
	case <-k.done:
		return k.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// trouble has a search made in the background; not too often.
func (l *looker) trouble() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.start()
}

// news has a search made that begins after this moment.
func (l *looker) news() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.again = l.now != nil
	l.start()
}

// start starts a search, if none is under way. mu is held.
func (l *looker) start() *look {
	if l.now != nil {
		return l.now
	}
	k := &look{done: make(chan struct{})}
	if l.over || l.open.Err() != nil {
		k.err = redis.ErrClosed
		close(k.done)
		return k
	}
	l.now = k
	wait := pause - time.Since(l.ended)
	l.wg.Go(func() {
		select {
		case <-time.After(wait):
		case <-l.open.Done():
		}
		k.err = l.search(l.open)
		l.finish(k)
	})
	return k
}

func (l *looker) finish(k *look) {
	l.mu.Lock()
	defer l.mu.Unlock()
	close(k.done)
	l.now, l.ended = nil, time.Now()
	if l.again {
		l.again = false
		l.start()
	}
}

// close returns when nothing runs any more. open has ended.
func (l *looker) close() {
	l.mu.Lock()
	l.over = true
	l.mu.Unlock()
	l.wg.Wait()
}

// ask sends a command to a server that is not asked for locks.
func (d *dialer) ask(ctx context.Context, rdb redis.UniversalClient, args ...any) (any, error) {
	within, end := d.calls.Begin(ctx)
	defer end()
	cmd := resp.NewCommand(within, args)
	_ = rdb.Process(within, cmd)
	return cmd.Result()
}

// worst picks the error that tells most of those that servers of a kind gave:
// what one replied before what the network did.
func worst(errs []error, of string) error {
	for _, err := range errs {
		if errors.As(err, new(redis.Error)) {
			return err
		}
	}
	if len(errs) == 1 {
		return errs[0]
	}
	return fmt.Errorf("none of %d %s answers: %w", len(errs), of, errs[0])
}

// moved reports whether an error of a server may mean that another one has
// its place: it does not answer, or says so.
func moved(err error) bool {
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
