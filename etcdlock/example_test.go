package etcdlock_test

import (
	"context"
	"fmt"
	"log"
	"time"

	"github.com/hasplock/hasp"
	_ "github.com/hasplock/hasp/etcdlock"
)

// One of many processes writes the report. The fence goes along with each write, so that a
// store can refuse a writer whose lock has ended.
func Example() {
	locks, err := hasp.Open(context.Background(), "etcdlock+etcd://user:password@a:2379,b:2379,c:2379?ttl=10s", nil)
	if err != nil {
		log.Print(err)
		return
	}
	defer locks.Close()

	err = hasp.Do(context.Background(), locks, "nightly-report", func(ctx context.Context, lease *hasp.Lease) error {
		fmt.Println("writing with fence", lease.Fence())
		return ctx.Err() // ctx ends with the lease
	}, hasp.WithFence(), hasp.WithMaxWait(time.Minute))
	if err != nil {
		log.Print(err)
	}
}
