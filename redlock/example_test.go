package redlock_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/redlock"
)

// A ledger must not be closed twice, whichever of three Redis masters is down: any two
// of them grant the lock. Each write carries the fence, so a program that was stopped
// past the end of its lease cannot write any more.
func Example() {
	var masters []redis.UniversalClient
	for _, addr := range []string{"redis-a:6379", "redis-b:6379", "redis-c:6379"} {
		rdb := redis.NewClient(&redis.Options{Addr: addr, ContextTimeoutEnabled: true})
		defer rdb.Close()
		masters = append(masters, rdb)
	}
	locks, err := redlock.New(masters, &redlock.Options{Client: hasp.Options{Prefix: "app:"}})
	if err != nil {
		log.Fatal(err)
	}
	defer locks.Close()

	err = hasp.Do(context.Background(), locks, "ledger", func(ctx context.Context, lease *hasp.Lease) error {
		return closeBooks(ctx, lease.Fence()) // ends with ctx, which ends with the lease
	}, hasp.WithFence(), hasp.WithMaxWait(time.Minute))
	switch {
	case errors.Is(err, hasp.ErrHeld):
		fmt.Println("busy for a minute:", err)
	case errors.Is(err, hasp.ErrLost):
		fmt.Println("somebody else may have begun meanwhile:", err)
	case err != nil:
		log.Print(err) // such as two masters that are down, by name
	}
}

// A Config, as read from a file, for masters with different passwords.
func Example_config() {
	locks, err := hasp.Config{
		Strategy: "redlock",
		Nodes:    []string{"redis://:one@redis-a:6379", "redis://:two@redis-b:6379", "rediss://:three@redis-c:6380"},
		Params:   map[string]string{"prefix": "app:", "ca": "/etc/ssl/redis.pem"},
	}.Open(context.Background(), nil)
	if err != nil {
		log.Fatal(err)
	}
	defer locks.Close()
}

func closeBooks(ctx context.Context, fence uint64) error { return nil }
