package redistest

import (
	"errors"
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

func TestSkewMovesTheEndsOfTerms(t *testing.T) {
	s := Start(t, &Options{Clock: true})
	rdb := s.Client()
	const term = 10 * time.Minute
	skew := func(d time.Duration) {
		t.Helper()
		if err := s.Skew(d); err != nil {
			t.Fatal(err)
		}
	}
	// However slow the machine, it is not a minute late.
	left := func(most time.Duration) {
		t.Helper()
		if got := rdb.PTTL(t.Context(), "k").Val(); got > most || got < most-time.Minute {
			t.Errorf("left of the term: %v, want %v or little less", got, most)
		}
	}
	if err := rdb.Set(t.Context(), "k", "v", term).Err(); err != nil {
		t.Fatal(err)
	}
	left(term)
	skew(5 * time.Minute)
	left(5 * time.Minute)
	skew(-5 * time.Minute)
	left(15*time.Minute + time.Second)
	rdb.PExpire(t.Context(), "k", term)
	left(term)
	skew(6 * time.Minute)
	if n := rdb.Exists(t.Context(), "k").Val(); n != 0 {
		t.Error("a key is there after its term")
	}
}

func TestSkewOutlastsARestart(t *testing.T) {
	s := Start(t, &Options{Clock: true})
	rdb := s.Client()
	if err := s.Skew(-time.Minute); err != nil {
		t.Fatal(err)
	}
	s.Kill()
	s.Restart()
	ahead(t, rdb, -time.Minute)
	s.Kill()
	if err := s.Skew(time.Minute); err != nil {
		t.Fatal(err)
	}
	if err := s.Start(false); err != nil {
		t.Fatal(err)
	}
	ahead(t, rdb, time.Minute)
}

func TestSkewOfAClusterIsOfOneServer(t *testing.T) {
	c := StartCluster(t, &Options{Clock: true, Bare: true})
	if err := c.Servers[1].Skew(time.Minute); err != nil {
		t.Fatal(err)
	}
	for i, s := range c.Servers {
		ahead(t, s.Client(), time.Duration(i%2)*time.Minute)
	}
}

func TestSkewOfAServerWithoutAClockIsAnError(t *testing.T) {
	if err := Start(t, &Options{Own: true}).Skew(time.Minute); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("got %v", err)
	}
}
