package hasp_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/memlock"
)

// A job that only one process runs at a time. Against another store only the
// string changes.
func Example() {
	ctx := context.Background()
	c, err := hasp.Open(ctx, "memlock://", nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer c.Close()

	err = hasp.Do(ctx, c, "invoices", func(ctx context.Context, lease *hasp.Lease) error {
		fmt.Println("billing under", lease.Key())
		return ctx.Err() // ended if the lock was lost
	})
	fmt.Println(err)
	// Output:
	// billing under invoices
	// <nil>
}

// A fence protects what the lock alone cannot: a write that was on its way
// when its writer lost the lock.
func ExampleWithFence() {
	var seen uint64 // kept by the resource, next to the data
	write := func(fence uint64) error {
		if fence < seen {
			return fmt.Errorf("stale writer")
		}
		seen = fence
		return nil
	}

	ctx := context.Background()
	c := hasp.New(memlock.New(), nil)
	defer c.Close()
	first, _ := c.Lock(ctx, "account", hasp.WithFence())
	c.Break(ctx, "account") // as if its holder had been stopped for too long
	second, _ := c.Lock(ctx, "account", hasp.WithFence())

	fmt.Println(write(second.Fence()))
	fmt.Println(write(first.Fence()))
	second.Unlock(ctx)
	// Output:
	// <nil>
	// stale writer
}

// Skip a run rather than queue behind the one under way.
func ExampleClient_TryLock() {
	ctx := context.Background()
	c := hasp.New(memlock.New(), &hasp.Options{Owner: "worker 1"})
	defer c.Close()
	lease, err := c.TryLock(ctx, "report")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer lease.Unlock(ctx)

	_, err = c.TryLock(ctx, "report")
	fmt.Println(err)
	fmt.Println(errors.Is(err, hasp.ErrHeld))
	// Output:
	// hasp: trylock "report": held by "worker 1"
	// true
}

// Several keys at once, without a deadlock whatever order they are named in.
func ExampleLockAll() {
	ctx := context.Background()
	c := hasp.New(memlock.New(), nil)
	defer c.Close()
	both, err := hasp.LockAll(ctx, c, []string{"account/7", "account/3"}, hasp.WithMaxWait(time.Second))
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, l := range both.All() {
		fmt.Println(l.Key())
	}
	fmt.Println(both.Unlock(ctx))
	// Output:
	// account/3
	// account/7
	// <nil>
}

// A context derived from a lease's re-enters its key.
func ExampleLease_Context() {
	ctx := context.Background()
	c := hasp.New(memlock.New(), nil)
	defer c.Close()
	save := func(ctx context.Context) error {
		return hasp.Do(ctx, c, "document", func(context.Context, *hasp.Lease) error { return nil })
	}

	outer, _ := c.Lock(ctx, "document")
	fmt.Println(save(outer.Context()))
	fmt.Println(outer.Unlock(ctx))
	fmt.Println(outer.Context().Err(), context.Cause(outer.Context()))
	// Output:
	// <nil>
	// <nil>
	// context canceled lease released
}
