// Command jumper sets its clock as it is told, and tells what it sees.
package main

import (
	"context"
	"encoding/json"
	"os"
	"time"

	"github.com/hasplock/hasp/internal/walljump"
)

// Seen is what jumper tells of a jump.
type Seen struct {
	Can      bool
	Wall     int64         // nanoseconds since 1970, after the jump
	Since    time.Duration // by the monotonic clock, since before the jump
	Stripped time.Duration // and since the same moment without its monotonic part
	Timer    time.Duration // what a timer of 50 ms took, by the monotonic clock
	Early    string        // a deadline that ended before its time
	Deadline string        // one that ended in time
}

func main() {
	orders, tell := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	for {
		var d time.Duration
		if orders.Decode(&d) != nil {
			return
		}
		tell.Encode(jump(d))
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
