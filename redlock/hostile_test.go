package redlock

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp/backend"
)

// Any client that may publish can report any number of waiters, and so can a hostile
// node. No caller sleeps in proportion, and none panics.
func TestReportedNumbersOfWaitersAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, said := range []string{"9223372036854775807", "99999999999999999999", "1000000000000", "-5", "x", ""} {
			c := newCrowd(t, 3, 2)
			d := c.drivers[0]
			holder := c.claim()
			take(t, c.drivers[1], holder)
			had := make(chan error, 1)
			go func() { had <- c.wait(t.Context(), 0, 0) }()
			time.Sleep(time.Second)
			for _, v := range c.vs {
				v.Mini.Publish("hasp:{k}:channel:k", "token "+said)
			}
			time.Sleep(time.Second)
			if err := c.drivers[1].Release(t.Context(), holder); err != nil {
				t.Fatal(err)
			}
			began := time.Now()
			if err := <-had; err != nil {
				t.Fatalf("%q: %v", said, err)
			}
			if took := time.Since(began); took > 10*time.Second {
				t.Errorf("%q: had after %v", said, took)
			}
			d.released("k", maxCrowd)
			for _, v := range c.vs {
				v.Proxy.Answer("evalsha", ":9223372036854775807\r\n")
			}
			_ = d.Release(t.Context(), backend.Claim{Key: "k", Token: "another", TTL: time.Second, Timeout: time.Second})
			for _, v := range c.vs {
				v.Proxy.Forgive()
			}
			began = time.Now()
			take(t, d, c.claim())
			if took := time.Since(began); took > 10*time.Second {
				t.Errorf("taken after %v", took)
			}
		}
	})
}
