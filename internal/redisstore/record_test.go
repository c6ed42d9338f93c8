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

func TestTermsAreRoundedUp(t *testing.T) {
	for d, want := range map[time.Duration]int64{
		time.Second: 1000, time.Second + 1: 1001, time.Second - 1: 1000, 100 * time.Millisecond: 100, time.Nanosecond: 1,
	} {
		if got := Millis(d); got != want {
			t.Errorf("%v: got %d ms, want %d", d, got, want)
		}
	}
}

// Owner returns a part of a record only if hasp wrote the record. Another value
// may be a secret.
func TestOwnerOfAForeignRecordIsEmpty(t *testing.T) {
	for record, want := range map[string]string{
		"AZaz09-_#host/1/job": "host/1/job", "t#": "", "t#a#b": "a#b", "t#\x00\xff": "\x00\xff",
		"": "", "#": "", "#owner": "", "8c0b3f0e-5d0c-4f6e-9a0e-0f3f0c8d9b1a": "", "pass word#1": "", "é#x": "", "a=b#c": "",
	} {
		if got := Owner(record); got != want {
			t.Errorf("%q: got %q, want %q", record, got, want)
		}
	}
}
