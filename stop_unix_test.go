//go:build unix

package hasp_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/crew"
	"github.com/hasplock/hasp/memlock"
)

// After a stop that outlasts the term, the first check reports the loss, before
// any timer has fired. The child spins instead of blocking, since the scheduler fires
// timers before it resumes a goroutine that was blocked.
func TestFirstLookAfterAStop(t *testing.T) {
	c := crew.Test(t, "stopped")
	if line := c.Line(t); line != "held" {
		t.Fatalf("the child printed %q", line)
	}
	await.Must(t, c.Pause())
	time.Sleep(2 * stoppedTTL) // the term must pass on the real clock
	await.Must(t, c.Resume())
	got := c.Rest(t)
	const want = "ctx=context canceled cause=true done=true child=true err=true" // both are a loss
	if strings.Join(got, "\n") != want {
		t.Errorf("after the stop the child saw\n%q, want\n%q", got, want)
	}
}

const stoppedTTL = time.Second

func TestMain(m *testing.M) {
	crew.Main(crew.Roles{"stopped": stoppedHolder})
	os.Exit(m.Run())
}

// stoppedHolder is the child of TestFirstLookAfterAStop.
func stoppedHolder([]string) error {
	runtime.GOMAXPROCS(1) // the look comes before any other goroutine's turn
	c := hasp.New(memlock.New(), &hasp.Options{TTL: stoppedTTL})
	defer c.Close()
	l, err := c.Lock(context.Background(), "k")
	if err != nil {
		return err
	}
	ctx := l.Context()
	child, cancel := context.WithCancel(ctx)
	defer cancel()
	last := time.Now() // before the parent may stop us
	fmt.Println("held")

	// Renewals go on meanwhile: the scheduler takes the processor away from a
	// goroutine that spins.
	for {
		now := time.Now()
		if now.Sub(last) > stoppedTTL {
			break
		}
		last = now
	}
	err = ctx.Err()
	isDone := func(ctx context.Context) bool {
		select {
		case <-ctx.Done():
			return true
		default:
			return false
		}
	}
	isLoss := func(err error) bool { return errors.Is(err, hasp.ErrLost) }
	fmt.Printf("ctx=%v cause=%v done=%v child=%v err=%v\n", err, isLoss(context.Cause(ctx)), isDone(ctx), isDone(child), isLoss(l.Err()))
	return nil
}
