package fairlock

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
