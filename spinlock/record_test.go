package spinlock

import (
	"testing"
	"time"

	"github.com/hasplock/hasp/internal/redisstore"
)

func TestTermsAreRoundedUp(t *testing.T) {
	for d, want := range map[time.Duration]int64{
		time.Second: 1000, time.Second + 1: 1001, time.Second - 1: 1000, 100 * time.Millisecond: 100, time.Nanosecond: 1,
	} {
		if got := redisstore.Millis(d); got != want {
			t.Errorf("%v: got %d ms, want %d", d, got, want)
		}
	}
}

// Only what hasp wrote is shown to people: another value may be a secret.
func TestOwnerIsOnlyThatOfARecordOfOurs(t *testing.T) {
	for record, want := range map[string]string{
		"AZaz09-_#host/1/job": "host/1/job", "t#": "", "t#a#b": "a#b", "t#\x00\xff": "\x00\xff",
		"": "", "#": "", "#owner": "", "8c0b3f0e-5d0c-4f6e-9a0e-0f3f0c8d9b1a": "", "pass word#1": "", "é#x": "", "a=b#c": "",
	} {
		if got := redisstore.Owner(record); got != want {
			t.Errorf("%q: got %q, want %q", record, got, want)
		}
	}
}
