// Command mixed measures how programs with different libraries or strategies share one busy key, as
// they do while a company moves from one to the other. Run it in the directory lab:
//
//	go run ./mixed [-time 15s] [-hold 5ms]
//
// Three callers of each side lock one key of a Redis, hold it, unlock it, and lock it again at once.
// The table has the holds and the longest wait of each side.
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

// libraries has the other libraries, with the settings that they have by default. redislock has no
// default, so it has the strategy in its README.
var libraries = map[string]func(*redis.Client) lock{
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

// pairs has the sides that are measured. Each library is also measured beside itself. redislock
// reports an error when it meets a record of pubsublock.
var pairs = [][2]string{
	{"redsync", "redsync"}, {"redsync", "spinlock"}, {"redsync", "pubsublock"},
	{"redsync", "fairlock"}, {"redislock", "redislock"}, {"redislock", "spinlock"},
	{"redislock", "fairlock"}, {"spinlock", "pubsublock"}, {"spinlock", "fairlock"},
	{"pubsublock", "fairlock"},
}

// side counts the holds of one side.
type side struct {
	mu      sync.Mutex // guards all below
	holds   int
	longest time.Duration
}

// call locks the key again and again, until ctx ends.
func (s *side) call(ctx context.Context, lock lock, hold time.Duration) {
	for ctx.Err() == nil {
		asked := time.Now()
		unlock, err := lock(ctx)
		waited := time.Since(asked)

		s.mu.Lock()
		if err == nil {
			s.holds++
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

// measure prints a table with a row for each pair.
func measure(l *redistest.Lab, length, hold time.Duration) error {
	srv := redistest.Start(l, redistest.Real)
	fmt.Println("| one side | its holds | longest wait | the other side | its holds | longest wait |")
	fmt.Println("|---|--:|--:|---|--:|--:|")
	for _, pair := range pairs {
		ctx, cancel := context.WithTimeout(context.Background(), length)
		defer cancel()
		var sides [2]side
		var wg sync.WaitGroup
		for i, name := range pair {
			for range callers {
				lock, end, err := open(srv, name)
				if err != nil {
					return err
				}
				defer end()
				wg.Go(func() { sides[i].call(ctx, lock, hold) })
			}
		}
		wg.Wait()

		for i, name := range pair {
			s := &sides[i]
			fmt.Printf("| %s | %d | %v ", name, s.holds, s.longest.Round(time.Millisecond))
		}
		fmt.Println("|")
	}
	return nil
}

// open returns the lock of a library or of a strategy.
func open(srv *redistest.Server, name string) (lock lock, end func(), err error) {
	if library := libraries[name]; library != nil {
		return library(srv.Client()), func() {}, nil
	}

	c, err := hasp.Open(context.Background(), name+"+"+srv.URL(), nil)
	if err != nil {
		return nil, nil, err
	}
	lock = func(ctx context.Context) (func(), error) {
		l, err := c.Lock(ctx, key)
		return func() { _ = l.Unlock(context.Background()) }, err
	}
	return lock, func() { c.Close() }, nil
}
