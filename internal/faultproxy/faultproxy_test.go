package faultproxy_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp/internal/redistest"
)

// Nothing but lab uses Trickle. The tests of the strategies use all other faults.
func TestBytesTrickle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v := redistest.Virtual(t)
		rdb := v.Client()
		for _, d := range []time.Duration{0, time.Minute} {
			v.Proxy.Trickle(d)
			begin := time.Now()
			if err := rdb.Set(t.Context(), "k", "v", 0).Err(); err != nil {
				t.Error(err)
			}
			if took := time.Since(begin); took < 2*d || d == 0 && took > 0 {
				t.Errorf("a request and its reply took %v, want %v each", took, d)
			}
		}
	})
}
