//go:build unix

package hasp_test

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/childtest"
	"github.com/hasplock/hasp/memlock"
)

// After a stop that outlasts the term, the first check reports the loss, before
// any timer has fired. The child spins instead of blocking, since the scheduler fires
// timers before it resumes a goroutine that was blocked.
func TestFirstLookAfterAStop(t *testing.T) {
	c := childtest.Start(t, "stopped")
	if line := c.Line(t); line != "held" {
		t.Fatalf("the child printed %q", line)
	}
	c.Stop(t)
	time.Sleep(2 * stoppedTTL) // the term must pass on the real clock
	c.Continue(t)
	got := c.Rest(t)
	const want = "ctx=context canceled cause=lease lost done=true child=true err=lease lost"
	if strings.Join(got, "\n") != want {
		t.Errorf("after the stop the child saw\n%q, want\n%q", got, want)
	}
}

const stoppedTTL = time.Second

func TestMain(m *testing.M) {
	childtest.Main(childtest.Roles{"stopped": stoppedHolder})
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
	fmt.Printf("ctx=%v cause=%v done=%v child=%v err=%v\n", err, context.Cause(ctx), isDone(ctx), isDone(child), l.Err())
	return nil
}
