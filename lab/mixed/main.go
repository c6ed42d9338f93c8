// Command mixed measures how programs with hasp and with another library share one busy key, as
// they do while a company moves from one to the other. Run it in the directory lab:
//
//	go run ./mixed [-time 15s] [-hold 5ms]
//
// Three callers of the library and three Clients of hasp lock one key of a Redis of their own,
// hold it, unlock it, and lock it again at once. The table has their holds, and the longest wait
// of each side.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/bsm/redislock"
	"github.com/go-redsync/redsync/v4"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	_ "github.com/hasplock/hasp/fairlock"
	"github.com/hasplock/hasp/internal/redistest"
	_ "github.com/hasplock/hasp/pubsublock"
	_ "github.com/hasplock/hasp/spinlock"
)

const (
	key     = "mixed"
	callers = 3 // of each side
)

// lock locks the key, and returns a function that unlocks it.
type lock func(ctx context.Context) (unlock func(), err error)

// others has the other libraries, with the settings that they have by default. redislock has no
// default, so it has the strategy in its README.
var others = map[string]func(*redis.Client) lock{
	"redsync": func(rdb *redis.Client) lock {
		rs := redsync.New(goredis.NewPool(rdb))
		return func(ctx context.Context) (func(), error) {
			m := rs.NewMutex(key)
			return func() { _, _ = m.Unlock() }, m.LockContext(ctx)
		}
	},
	"redislock": func(rdb *redis.Client) lock {
		c := redislock.New(rdb)
		o := &redislock.Options{RetryStrategy: redislock.LinearBackoff(100 * time.Millisecond)}
		return func(ctx context.Context) (func(), error) {
			l, err := c.Obtain(ctx, key, time.Minute, o)
			return func() { _ = l.Release(context.Background()) }, err
		}
	},
}

// strategies has what each library is measured beside: first itself. redislock reports an error
// when it meets the records of pubsublock.
var strategies = map[string][]string{
	"redsync":   {"redsync", "spinlock", "pubsublock", "fairlock"},
	"redislock": {"redislock", "spinlock", "fairlock"},
}

// side counts the holds of one side.
type side struct {
	mu      sync.Mutex // guards all below
	holds   int
	failed  int // locks that gave up
	longest time.Duration
}

// call locks the key again and again, until ctx ends.
func (s *side) call(ctx context.Context, lock lock, hold time.Duration) {
	for ctx.Err() == nil {
		asked := time.Now()
		unlock, err := lock(ctx)
		waited := time.Since(asked)

		s.mu.Lock()
		switch {
		case err == nil:
			s.holds++
		case ctx.Err() == nil:
			s.failed++
		}
		s.longest = max(s.longest, waited)
		s.mu.Unlock()

		if err == nil {
			time.Sleep(hold)
			unlock()
		}
	}
}

func main() {
	length := flag.Duration("time", 15*time.Second, "length of each measurement")
	hold := flag.Duration("hold", 5*time.Millisecond, "how long each caller holds the key")
	flag.Parse()

	l := &redistest.Lab{}
	err := l.Do(func() error { return measure(l, *length, *hold) })
	l.Close()
	if err != nil {
		fmt.Fprintln(os.Stderr, "mixed:", err)
		os.Exit(1)
	}
}

// measure prints a table with a row for each library and strategy.
func measure(l *redistest.Lab, length, hold time.Duration) error {
	srv := redistest.Start(l, &redistest.Options{Own: true, Real: true})
	rdb := srv.Client()
	fmt.Println("| library | its holds | longest wait, gave up | beside | its holds | longest wait |")
	fmt.Println("|---|--:|--:|---|--:|--:|")
	for _, name := range []string{"redsync", "redislock"} {
		for _, strategy := range strategies[name] {
			ctx, cancel := context.WithTimeout(context.Background(), length)
			defer cancel()
			var theirs, ours side
			var wg sync.WaitGroup
			for range callers {
				other := others[name](rdb)
				beside := other
				if strategy != name {
					c, err := hasp.Open(ctx, strategy+"+"+srv.URL(), nil)
					if err != nil {
						return err
					}
					defer c.Close()
					beside = withHasp(c)
				}
				wg.Go(func() { theirs.call(ctx, other, hold) })
				wg.Go(func() { ours.call(ctx, beside, hold) })
			}
			wg.Wait()
			fmt.Printf("| %s | %d | %v, %d | %s | %d | %v |\n", name, theirs.holds,
				theirs.longest.Round(time.Millisecond), theirs.failed, strategy, ours.holds,
				ours.longest.Round(time.Millisecond))
		}
	}
	return nil
}

// withHasp locks the key by a Client.
func withHasp(c *hasp.Client) lock {
	return func(ctx context.Context) (func(), error) {
		l, err := c.Lock(ctx, key)
		if err != nil {
			return nil, err
		}
		return func() { _ = l.Unlock(context.Background()) }, nil
	}
}
