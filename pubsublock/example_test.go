package pubsublock_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/pubsublock"
)

// A program shares a lock with a Java service, which uses redisson.getLock("app:orders").
// The program has a go-redis client already. An Unlock of either wakes the other.
func Example() {
	rdb := redis.NewClient(&redis.Options{Addr: "localhost:6379", ContextTimeoutEnabled: true})
	defer rdb.Close()
	locks, err := pubsublock.New(rdb, &pubsublock.Options{Client: hasp.Options{Prefix: "app:"}})
	if err != nil {
		log.Fatal(err)
	}
	defer locks.Close()

	err = hasp.Do(context.Background(), locks, "orders", func(ctx context.Context, lease *hasp.Lease) error {
		return book(ctx) // ends with ctx, which ends with the lease
	}, hasp.WithMaxWait(time.Minute))
	switch {
	case errors.Is(err, hasp.ErrHeld):
		fmt.Println("busy for a minute:", err)
	case err != nil:
		log.Print(err)
	}
}

// The same by URL: another strategy is another string.
func Example_url() {
	locks, err := hasp.Open(context.Background(), "pubsublock+redis://localhost:6379/0?prefix=app:", nil)
	if err != nil {
		log.Fatal(err)
	}
	defer locks.Close()
	lease, err := locks.Lock(context.Background(), "orders")
	if err != nil {
		log.Print(err)
		return
	}
	defer lease.Unlock(context.Background())
	_ = book(lease.Context())
}

func book(context.Context) error { return nil }
