package spinlock_test

import (
	"context"
	"fmt"
	"log"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/spinlock"
)

// A job must not run twice at a time, and must stop when the lock is lost. The program has
// a go-redis client already.
func Example() {
	rdb := redis.NewClient(&redis.Options{Addr: "localhost:6379"})
	defer rdb.Close()
	locks, err := spinlock.New(rdb, &spinlock.Options{Client: hasp.Options{Prefix: "jobs:", TTL: 10 * time.Second}})
	if err != nil {
		log.Fatal(err)
	}
	defer locks.Close()

	err = hasp.Do(context.Background(), locks, "nightly-report", func(ctx context.Context, lease *hasp.Lease) error {
		fmt.Println("writing with fence", lease.Fence())
		return report(ctx) // ends with ctx, which ends with the lease
	}, hasp.WithFence(), hasp.WithMaxWait(time.Minute))
	if err != nil {
		log.Print(err)
	}
}

// The same by URL: another strategy is another string.
func Example_url() {
	locks, err := hasp.Open(context.Background(), "spinlock+redis://localhost:6379/0?ttl=10s&prefix=jobs:", nil)
	if err != nil {
		log.Fatal(err)
	}
	defer locks.Close()
	lease, err := locks.Lock(context.Background(), "nightly-report")
	if err != nil {
		log.Print(err)
		return
	}
	defer lease.Unlock(context.Background())
	_ = report(lease.Context())
}

func report(context.Context) error { return nil }
