package redistest

import (
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// ahead is what the server's TIME is ahead of the host's clock, within the
// length of the call.
func ahead(t *testing.T, rdb *redis.Client, want time.Duration) {
	t.Helper()
	before := time.Now()
	got, err := rdb.Time(t.Context()).Result()
	after := time.Now()
	if err != nil {
		t.Fatal(err)
	}
	// Redis has the time of when it woke for the command, and in microseconds.
	const slack = 5 * time.Millisecond
	if least, most := before.Add(want-slack), after.Add(want); got.Before(least) || got.After(most) {
		t.Errorf("TIME is ahead by %v to %v, want %v", got.Sub(after), got.Sub(before), want)
	}
}

func TestSkewSetsTheServersClockAndNoOther(t *testing.T) {
	s := Start(t, &Options{Clock: true})
	plain := Start(t, &Options{Own: true}).Client()
	rdb := s.Client()
	for _, d := range []time.Duration{0, time.Minute, -100 * time.Millisecond, -time.Hour, 1234567 * time.Microsecond, 0} {
		if err := s.Skew(d); err != nil {
			t.Fatal(err)
		}
		ahead(t, rdb, d)
		ahead(t, plain, 0)
	}
}
