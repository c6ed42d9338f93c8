package redisstore

import (
	"errors"
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
)

// A time to live may be longer than a Duration.
func TestTermsBeyondADuration(t *testing.T) {
	for pttl, want := range map[int64]time.Duration{-1: -time.Millisecond, 0: 0, 5: 5 * time.Millisecond, 1<<63 - 1: 100 * 365 * 24 * time.Hour} {
		if got := Term(pttl); got != want {
			t.Errorf("%d: got %v", pttl, got)
		}
	}
	f, _ := Decode([]any{int64(1 << 60), "token#owner", ""})
	var held *backend.HeldError
	if errors.As(f.Held(), &held); held.RetryAfter <= 0 || f.Status().TTL <= 0 {
		t.Errorf("%v, %v", held, f.Status())
	}
}
