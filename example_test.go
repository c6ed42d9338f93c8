package hasp_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"os"
	"sync"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/memlock"
)

// Only one process at a time runs the job. For another store, change only the URL.
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
		return ctx.Err() // not nil if the lock was lost
	})
	fmt.Println(err)
	// Output:
	// billing under invoices
	// <nil>
}

// The program's own configuration file says where the locks are kept.
func ExampleConfig() {
	file := []byte(`
listen: ":8080"
locks:
  strategy: memlock
  params: {ttl: 10s, timeout: 2s, prefix: "billing:"}
`)
	var settings struct {
		Listen string
		Locks  hasp.Config
	}
	if err := yaml.Unmarshal(file, &settings); err != nil {
		fmt.Println(err)
		return
	}

	ctx := context.Background()
	c, err := settings.Locks.Open(ctx, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer c.Close()
	err = hasp.Do(ctx, c, "invoices", func(ctx context.Context, lease *hasp.Lease) error {
		fmt.Println("locked", lease.Key())
		return nil
	})
	fmt.Println(err)

	settings.Locks.Params["tll"] = "10s"
	_, err = settings.Locks.Open(ctx, nil)
	fmt.Println(errors.Is(err, hasp.ErrInvalid))
	// Output:
	// locked invoices
	// <nil>
	// true
}

// The log has what is lost or goes wrong. At slog.LevelDebug it has every event.
func ExampleLogEvents() {
	withoutTime := &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey || a.Key == "id" || a.Key == "hold" {
			return slog.Attr{} // these differ in each run
		}
		return a
	}}
	logger := slog.New(slog.NewTextHandler(os.Stdout, withoutTime))

	ctx := context.Background()
	c, err := memlock.New(&hasp.Options{Observe: hasp.LogEvents(logger)})
	if err != nil {
		log.Fatal(err)
	}
	lease, err := c.Lock(ctx, "report", hasp.WithMaxHold(10*time.Millisecond))
	if err != nil {
		fmt.Println(err)
		return
	}
	<-lease.Context().Done()
	c.Close() // waits for the log
	// Output:
	// level=ERROR msg="hasp: lost" key=report op=lock err="lease lost: its max hold is over"
}

// Before a step, the job asks for the time that the step may take. If the job hangs in the step, the
// lock ends after that time, because nothing renews it. Extend never shortens a term.
func ExampleLease_Extend() {
	ctx := context.Background()
	c, err := memlock.New(nil)
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	lease, err := c.Lock(ctx, "migration", hasp.WithoutRenewal(), hasp.WithTTL(time.Minute))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer lease.Unlock(ctx)

	if err := lease.Extend(ctx, time.Hour); err != nil {
		fmt.Println(err) // ErrLost: another caller may have begun
		return
	}
	fmt.Println("copy", time.Until(lease.Expires()) > 59*time.Minute)
	// Output:
	// copy true
}

// Two schedulers reach the same tick, one a little later than the other. The job runs once.
func ExampleWithMinHold() {
	ctx := context.Background()
	store := new(memlock.Store)
	for _, name := range []string{"a", "b"} {
		c, err := hasp.New(store.Driver(), nil)
		if err != nil {
			log.Fatal(err)
		}
		defer c.Close()
		lease, err := c.TryLock(ctx, "cron/report", hasp.WithMinHold(30*time.Second))
		if err != nil {
			fmt.Println(name, "is late:", errors.Is(err, hasp.ErrHeld))
			continue
		}
		fmt.Println(name, "runs the report")
		if err := lease.Unlock(ctx); err != nil {
			fmt.Println(err)
		}
	}
	// Output:
	// a runs the report
	// b is late: true
}

// All processes together run at most two downloads at the same time.
func ExampleWithSlots() {
	ctx := context.Background()
	c, err := memlock.New(nil)
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()

	first, _ := c.Lock(ctx, "download", hasp.WithSlots(2))
	second, _ := c.Lock(ctx, "download", hasp.WithSlots(2))
	fmt.Println(first.Slot()+second.Slot() == 1) // slots 0 and 1, in either order
	_, err = c.TryLock(ctx, "download", hasp.WithSlots(2))
	fmt.Println(errors.Is(err, hasp.ErrHeld))

	first.Unlock(ctx)
	third, _ := c.TryLock(ctx, "download", hasp.WithSlots(2))
	fmt.Println(third.Slot() == first.Slot())
	second.Unlock(ctx)
	third.Unlock(ctx)
	// Output:
	// true
	// true
	// true
}

// Transfers go between two accounts in both directions. DoAll and LockAll sort the keys, so two
// transfers that name the keys in opposite order cannot block each other for ever.
func ExampleDoAll() {
	ctx := context.Background()
	c, err := memlock.New(nil)
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()

	balance := map[string]int{"account/3": 100, "account/7": 100}
	transfer := func(from, to string, amount int) {
		err := hasp.DoAll(ctx, c, []string{from, to}, func(ctx context.Context, leases *hasp.Leases) error {
			balance[from] -= amount
			balance[to] += amount
			return ctx.Err() // not nil if one of the leases was lost
		}, hasp.WithMaxWait(time.Minute))
		if err != nil {
			fmt.Println(err)
		}
	}
	var transfers sync.WaitGroup
	for range 10 {
		transfers.Go(func() { transfer("account/7", "account/3", 1) })
		transfers.Go(func() { transfer("account/3", "account/7", 2) })
	}
	transfers.Wait()
	fmt.Println(balance)
	// Output:
	// map[account/3:90 account/7:110]
}

// One of two workers leads. When the leader must stop, it finishes its work. Only then does the
// other worker lead.
func ExampleLead() {
	c, err := memlock.New(nil)
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()

	work := func(ctx context.Context, name string, began func()) error {
		return hasp.Lead(ctx, c, "scheduler", func(ctx context.Context, lease *hasp.Lease) error {
			fmt.Println(name, "leads")
			began()

			<-ctx.Done() // the worker must stop, or has lost the lead
			if err := lease.Err(); err != nil {
				return err // the lease is lost, so Lead competes again
			}
			time.Sleep(20 * time.Millisecond) // the lease is renewed meanwhile
			fmt.Println(name, "has finished")
			return nil
		})
	}

	// In a program, these contexts come from signal.NotifyContext.
	first, stopFirst := context.WithCancel(context.Background())
	second, stopSecond := context.WithCancel(context.Background())
	defer stopSecond()

	ended := make(chan error)
	leads := make(chan bool)
	go func() { ended <- work(first, "first", func() { close(leads) }) }()
	<-leads
	go func() { ended <- work(second, "second", stopSecond) }()
	stopFirst()
	fmt.Println(<-ended, <-ended)
	// Output:
	// first leads
	// first has finished
	// second leads
	// second has finished
	// <nil> <nil>
}

// A Lock with the context of a lease, or with a context derived from it, re-enters the key.
func ExampleLease_Context() {
	ctx := context.Background()
	c, err := memlock.New(nil)
	if err != nil {
		log.Fatal(err)
	}
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
