package redisstore

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hasplock/hasp/internal/redistest"
)

// Holds that wait for a slow replica must not delay renewals: healthy leases would be
// lost.
func TestRenewalsDoNotQueueBehindHoldsThatWaitForReplicas(t *testing.T) {
	t.Parallel()
	set := redistest.StartSentinel(t, nil)
	// The pool is smaller than the number of callers on any machine.
	s, probe := prepared(t, set.URL(), map[string]string{"replicas": "2"}, 2)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := probe(ctx); err != nil {
		t.Fatal(err)
	}
	master, replica := set.Master().Client(), set.Servers[2]
	s.RunEach(ctx, taking, []Call{{[]string{"known"}, []string{"v"}}}, func(_ int, _ any, err error) {
		if err != nil {
			t.Fatal(err)
		}
	})

	replica.Pause()
	resume := sync.OnceFunc(replica.Resume)
	defer resume()
	var calls sync.WaitGroup
	hold := func(i int) {
		calls.Go(func() {
			if v, err := s.Run(ctx, taking, Call{[]string{fmt.Sprint("k", i)}, []string{"v"}}); fmt.Sprint(v) != "[1 taken]" || err != nil {
				t.Errorf("hold %d: got %v, %v", i, v, err)
			}
		})
	}
	hold(0)
	at, err := s.servers.find(ctx, "")
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the hold waits for the replica", func(ctx context.Context) error {
		if info := master.Info(ctx, "clients").Val(); !strings.Contains(info, "blocked_clients:1\r") {
			return errors.New(info)
		}
		return nil
	})

	// From here on commands travel together. The command of a caller that leaves is
	// not sent.
	const callers = 100
	for i := range callers {
		hold(1 + i)
	}
	left, leave := context.WithCancel(ctx)
	gone := make(chan error, 1)
	go func() {
		_, err := s.Run(left, taking, Call{[]string{"left"}, []string{"v"}})
		gone <- err
	}()
	eventually(t, "all callers wait", func(context.Context) error {
		at.waits.mu.Lock()
		defer at.waits.mu.Unlock()
		if n := len(at.waits.waiting); n != callers+1 {
			return fmt.Errorf("%d callers", n)
		}
		return nil
	})
	leave()
	if err := <-gone; !errors.Is(err, context.Canceled) {
		t.Errorf("a caller that left: got %v", err)
	}

	calls.Go(func() {
		s.RunEach(ctx, taking, []Call{{[]string{"renewed"}, []string{"v"}}}, func(_ int, v any, err error) {
			if fmt.Sprint(v) != "[1 taken]" || err != nil {
				t.Errorf("renewal: got %v, %v", v, err)
			}
		})
	})
	eventually(t, "a renewal reaches the server", func(ctx context.Context) error {
		return master.Get(ctx, "renewed").Err()
	})

	before := waits(t, master)
	resume()
	calls.Wait()
	if n := master.Exists(t.Context(), "left").Val(); n != 0 {
		t.Error("the command of a caller that had left was sent")
	}
	// The hold that waited, the renewal, and the other holds together.
	if n := waits(t, master) - before; n > 3 {
		t.Errorf("the server was asked %d times to wait for its replicas", n)
	}
	eventually(t, "no hold waits", func(context.Context) error {
		at.waits.mu.Lock()
		defer at.waits.mu.Unlock()
		if at.waits.moving || at.waits.waiting != nil {
			return fmt.Errorf("%d callers wait", len(at.waits.waiting))
		}
		return nil
	})
}
