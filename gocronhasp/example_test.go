package gocronhasp_test

import (
	"fmt"
	"log"
	"time"

	"github.com/go-co-op/gocron/v2"

	"github.com/hasplock/hasp/gocronhasp"
	"github.com/hasplock/hasp/memlock"
)

// Two schedulers share one store. Usually each is in a process of its own, and the store is a Redis
// or a directory.
func ExampleNewLocker() {
	c, err := memlock.New(nil)
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()

	at := gocron.OneTimeJobStartDateTime(time.Now().Add(100 * time.Millisecond))
	for range 2 {
		s, err := gocron.NewScheduler(gocron.WithDistributedLocker(gocronhasp.NewLocker(c, time.Minute)))
		if err != nil {
			fmt.Println(err)
			return
		}
		defer s.Shutdown()
		report := gocron.NewTask(func() { fmt.Println("the report of today") })
		if _, err := s.NewJob(gocron.OneTimeJob(at), report, gocron.WithName("report")); err != nil {
			fmt.Println(err)
			return
		}
		s.Start()
	}
	time.Sleep(time.Second)
	// Output: the report of today
}
