package redlock

import (
	"context"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redisstore"
)

// The lead votes yes for a writer, because an intent keeps readers out there. Readers have the other
// nodes. So the writer goes to another lead, and leaves intents.
func TestAWriterThatOnlyTheLeadLetsIn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCrowd(t, 3, 7)
		c.vs[c.drivers[0].leader("k")].Mini.Set(redisstore.IntentKey("k"), "another's")
		stop := c.flow(1, 7, 200*time.Millisecond, false)
		time.Sleep(300 * time.Millisecond)
		c.writes(1, 5*time.Second)
		stop()
	})
}

// If nodes are far away, a look takes longer than 300 ms, and the intents last until the
// next one.
func TestAWriterFarAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCrowd(t, 3, 13)
		for _, v := range c.vs {
			v.Proxy.Delay(200 * time.Millisecond)
		}
		stop := c.flow(1, 13, time.Second, true)
		time.Sleep(2 * time.Second)
		c.writes(3, 5*time.Second)
		stop()
	})
}

// If the lead has lost the record of readers, a writer's votes there are in vain, and must not
// wake it again. The writers that wait go to another lead. On that lead each would get a vote in
// vain, and its release would wake the next one.
func TestWritersDoNotWakeEachOther(t *testing.T) {
	for _, writers := range []int{1, 4} {
		synctest.Test(t, func(t *testing.T) {
			c := newCrowd(t, 3, writers+1)
			r := c.claim()
			r.Shared = true
			take(t, c.drivers[0], r)
			time.Sleep(time.Second)
			c.vs[c.drivers[0].leader("k")].Mini.Del("k")
			n := c.busy()
			if t.Logf("%d writers: %d commands in 5 s", writers, n); n > 1500 {
				t.Errorf("%d writers send %d commands in 5 s", writers, n)
			}
		})
	}
}

// When a writer that waits dies, its intent ends, and a reader gets the key then.
func TestAReaderAfterADeadWriter(t *testing.T) {
	worst := time.Duration(0)
	for range 10 {
		synctest.Test(t, func(t *testing.T) {
			c := newCrowd(t, 3, 2)
			var clients []redis.UniversalClient
			var links []*faultproxy.Proxy
			for _, v := range c.vs {
				rdb, link := v.Link()
				clients, links = append(clients, rdb), append(links, link)
			}
			dies := drives(t, clients, nil)
			take(t, dies, claim("its-own-x"))
			r := c.claim()
			r.Shared = true
			take(t, c.drivers[0], r)
			ctx, cancel := context.WithCancel(t.Context())
			var wg sync.WaitGroup
			wg.Go(func() { _, _ = dies.Wait(ctx, c.claim()) })
			time.Sleep(time.Second)
			var at time.Time
			wg.Go(func() {
				r := c.claim()
				r.Shared = true
				if _, err := c.drivers[1].Wait(t.Context(), r); err != nil {
					t.Error(err)
				}
				at = time.Now()
			})
			time.Sleep(2*time.Second + rand.N(300*time.Millisecond))
			for _, l := range links {
				l.Down()
			}
			died := time.Now()
			time.Sleep(2 * time.Second)
			cancel()
			wg.Wait()
			worst = max(worst, at.Sub(died))
		})
	}
	if t.Logf("worst %v", worst); worst > 320*time.Millisecond {
		t.Errorf("a reader got in %v after the writer died", worst)
	}
}
