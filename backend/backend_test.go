package backend_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp/backend"
)

func TestHeldErrorIsErrHeld(t *testing.T) {
	err := error(&backend.HeldError{Owner: "a\x1b[2Jb", RetryAfter: time.Second})
	if !errors.Is(err, backend.ErrHeld) || errors.Is(err, backend.ErrLost) {
		t.Errorf("got %v", err)
	}
	for _, tc := range []struct {
		err  backend.HeldError
		want string
	}{
		{backend.HeldError{}, backend.ErrHeld.Error()},
		{backend.HeldError{Owner: "a\x1b[2Jb", RetryAfter: 12345 * time.Millisecond}, `held by "a\x1b[2Jb", 12s left`},
		{backend.HeldError{RetryAfter: time.Microsecond}, `held by another, 1ms left`},
		{backend.HeldError{Owner: "me", Here: true}, "held by another caller of this Client (a nested call needs the lease's context)"},
		{backend.HeldError{Owner: "a", RetryAfter: 12 * time.Hour, Kept: true}, `kept for 12h0m0s more by a min hold of "a"`},
		{backend.HeldError{RetryAfter: time.Second, Kept: true}, `kept for 1s more by a min hold`},
	} {
		if got := tc.err.Error(); got != tc.want {
			t.Errorf("got %s, want %s", got, tc.want)
		}
	}
}

func TestUnavailableErrorIsErrUnavailable(t *testing.T) {
	down := errors.New("connection refused")
	err := error(&backend.UnavailableError{Since: time.Now(), Err: down})
	if !errors.Is(err, backend.ErrUnavailable) || !errors.Is(err, down) || errors.Is(err, backend.ErrHeld) {
		t.Errorf("got %v", err)
	}
	if got := err.Error(); got != down.Error() {
		t.Errorf("got %q, want the text of the store's error", got)
	}
	if got := (&backend.UnavailableError{}).Error(); got != backend.ErrUnavailable.Error() {
		t.Errorf("got %q", got)
	}
}

func TestDrift(t *testing.T) {
	if got, want := backend.Drift(30*time.Second), 302*time.Millisecond; got != want {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestRenewEach(t *testing.T) {
	cs := make([]backend.Claim, 100)
	for i := range cs {
		cs[i].TTL = time.Duration(i)
	}
	odd := errors.New("odd")
	var mu sync.Mutex
	answers := map[int]error{}
	backend.RenewEach(t.Context(), cs, func(i int, g backend.Grant, err error) {
		mu.Lock()
		defer mu.Unlock()
		if _, twice := answers[i]; twice || g.Fence != uint64(i) {
			t.Errorf("answer %d: %v, twice %v", i, g, twice)
		}
		answers[i] = err
	}, func(_ context.Context, c backend.Claim) (backend.Grant, error) {
		if c.TTL%2 == 1 {
			return backend.Grant{Fence: uint64(c.TTL)}, odd
		}
		return backend.Grant{Fence: uint64(c.TTL)}, nil
	})
	for i := range cs {
		if err, ok := answers[i]; !ok || (err == odd) != (i%2 == 1) {
			t.Errorf("answer %d: %v, %v", i, err, ok)
		}
	}
}

func TestRenewEachBeginsNothingOnceItsContextHasEnded(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	var mu sync.Mutex
	begun := 0
	backend.RenewEach(ctx, make([]backend.Claim, 100), func(int, backend.Grant, error) {}, func(context.Context, backend.Claim) (backend.Grant, error) {
		mu.Lock()
		defer mu.Unlock()
		begun++
		cancel()
		return backend.Grant{}, nil
	})
	if begun > 16 {
		t.Errorf("%d renewals begun", begun)
	}
}

// More claims have no answer than RenewEach renews at the same time.
func TestRenewEachPassesClaimsThatHang(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		cs := make([]backend.Claim, 256)
		for i := range 100 {
			cs[i].Key = "hangs"
		}
		var renewed atomic.Int64
		backend.RenewEach(ctx, cs, func(_ int, _ backend.Grant, err error) {
			if err == nil {
				renewed.Add(1)
			}
		}, func(ctx context.Context, c backend.Claim) (backend.Grant, error) {
			if c.Key == "hangs" {
				<-ctx.Done()
			}
			return backend.Grant{}, ctx.Err()
		})
		if n := renewed.Load(); n != 156 {
			t.Errorf("%d renewed, want 156", n)
		}
	})
}

func TestOutage(t *testing.T) {
	ended, end := context.WithCancel(t.Context())
	end()
	cause := errors.New("connection refused")
	for _, tt := range []struct {
		ctx  context.Context
		err  error
		want bool
	}{
		{t.Context(), nil, false},
		{t.Context(), cause, true},
		{t.Context(), fmt.Errorf("x: %w", backend.ErrInvalid), false},
		{t.Context(), context.Canceled, true}, // of another context
		{ended, context.Canceled, false},
		{ended, cause, true},
	} {
		got := backend.Outage(tt.ctx, tt.err)
		if errors.Is(got, backend.ErrUnavailable) != tt.want || !errors.Is(got, tt.err) {
			t.Errorf("%v: %v, want an outage: %t", tt.err, got, tt.want)
		}
	}
}
