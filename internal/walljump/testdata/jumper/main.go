// Command jumper reads durations from standard input, sets its wall clock ahead by
// each, and reports how its clocks and timers behave.
package main

import (
	"context"
	"encoding/json"
	"os"
	"time"

	"github.com/hasplock/hasp/internal/walljump"
)

// Seen is the report of one jump.
type Seen struct {
	Can      bool
	Wall     int64         // nanoseconds since 1970, after the jump
	Since    time.Duration // the jump's duration by the monotonic clock
	Stripped time.Duration // the jump's duration by the wall clock
	Timer    time.Duration // how long a timer of 50 ms took, by the monotonic clock
	Early    string        // the error of a deadline of 10 minutes that ended early, or empty
	Deadline string        // the error of a deadline of 50 ms
}

func main() {
	requests, reports := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	for {
		var d time.Duration
		if requests.Decode(&d) != nil {
			return
		}
		reports.Encode(jump(d))
	}
}

func jump(d time.Duration) (s Seen) {
	s.Can = walljump.Can()
	long, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	before := time.Now()
	walljump.Set(d)
	s.Wall = time.Now().UnixNano()
	s.Since, s.Stripped = time.Since(before), time.Since(before.Round(0))

	began := time.Now()
	<-time.After(50 * time.Millisecond)
	s.Timer = time.Since(began)
	short, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	<-short.Done()
	s.Deadline = short.Err().Error()
	if err := long.Err(); err != nil {
		s.Early = err.Error()
	}
	return s
}
