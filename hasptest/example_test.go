package hasptest_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/hasptest"
)

func Example() {
	ctx := context.Background()
	locks := hasptest.New(nil)
	defer locks.Close()

	release := locks.Hold("k")
	_, err := locks.TryLock(ctx, "k")
	fmt.Println(errors.Is(err, hasp.ErrHeld))
	release()

	lease, err := locks.TryLock(ctx, "k")
	fmt.Println(err)
	locks.Lose("k")
	fmt.Println(lease.Unlock(ctx))

	locks.Down()
	_, err = locks.TryLock(ctx, "k")
	fmt.Println(errors.Is(err, hasp.ErrUnavailable))
	// Output:
	// true
	// <nil>
	// hasp: unlock "k": lease lost: the store does not have it any more: it was broken, or the store lost its data
	// true
}

// nightly is the service: each host runs it, and one of them makes the report of a night.
func nightly(ctx context.Context, locks hasp.Locker, report func(ctx context.Context) error) {
	for ctx.Err() == nil {
		now := time.Now()
		two := time.Date(now.Year(), now.Month(), now.Day(), 2, 0, 0, 0, now.Location())
		if !two.After(now) {
			two = two.AddDate(0, 0, 1)
		}
		sleep(ctx, time.Until(two))

		// Until three o'clock, try again after an outage.
		for three := two.Add(time.Hour); time.Now().Before(three); sleep(ctx, time.Minute) {
			err := hasp.Do(ctx, locks, "report", func(ctx context.Context, _ *hasp.Lease) error {
				return report(ctx)
			}, hasp.WithMaxWait(time.Until(three)), hasp.WithMinHold(12*time.Hour))
			if !errors.Is(err, hasp.ErrUnavailable) {
				break // it is done, another host did it, or it failed
			}
		}
	}
}

// sleep sleeps for d, or until ctx ends.
func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func TestNightly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithCancel(t.Context())
		a := hasptest.New(nil)
		b := a.Another(nil)

		// The report takes twenty minutes.
		var mu sync.Mutex
		var log []string
		report := func(ctx context.Context) error {
			began := time.Now()
			err := sleep(ctx, 20*time.Minute)
			mu.Lock()
			defer mu.Unlock()
			log = append(log, fmt.Sprintf("%s to %s, lost: %t", began.Format("02 15:04"), time.Now().Format("15:04"), errors.Is(err, hasp.ErrLost)))
			return err
		}
		var hosts sync.WaitGroup
		hosts.Go(func() { nightly(ctx, a, report) })
		hosts.Go(func() { nightly(ctx, b, report) })

		at := func(day, hour, minute int) {
			time.Sleep(time.Until(time.Date(2000, 1, day, hour, minute, 0, 0, time.Local)))
		}
		at(1, 12, 0) // the first night is an ordinary one

		at(2, 1, 50) // in the second, the store is down
		a.Down()
		b.Down()
		at(2, 2, 10)
		a.Up()
		b.Up()

		at(3, 2, 5) // in the third, the lock is lost
		a.Lose("report")

		at(4, 1, 50) // in the fourth, another program has the lock
		release := a.Hold("report")
		at(4, 2, 30)
		release()

		at(5, 1, 0)
		stop()
		hosts.Wait()
		a.Close()
		b.Close()
		if got := strings.Join(log, "\n"); got != want {
			t.Errorf("got:\n%s\nwant:\n%s", got, want)
		}
	})
}

const want = `01 02:00 to 02:20, lost: false
02 02:10 to 02:30, lost: false
03 02:00 to 02:05, lost: true
03 02:05 to 02:25, lost: false
04 02:30 to 02:50, lost: false`
