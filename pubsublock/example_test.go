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

func book(context.Context) error { return nil }
