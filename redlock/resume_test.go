package redlock

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/strategytest"
)

// A second attempt has won on nodes 0 and 1, and node 2 has a leftover of the first attempt. A
// driver that does not know the hold must not count the leftover, which is removed soon. A node
// that loses its data gets the record and the fence from the next renewal.
func TestAResumedHoldIsTheRecordOfAQuorum(t *testing.T) {
	try(t, 3, nil, func(t *testing.T, tr trial) {
		c, leftover := aFenced("k"), tr.vs[2].Mini
		g, err := tryOnce(t, tr.direct(t, nil), c, 1, noLead)
		await.Must(t, err)
		tr.want(t, "the second attempt", c, "xxx")
		leftover.Del("k")
		await.Must(t, leftover.Set("k", c.Token+"#"+c.Owner))
		leftover.SetTTL("k", 5*time.Second)

		tr.vs[1].Proxy.Down()
		isOutage(t, "node 1 may have the record", renewOne(tr.d, c, time.Second), "1")
		tr.vs[1].Proxy.Up()
		time.Sleep(probeEvery)
		tr.renews(t, "two nodes have the record", c)
		synctest.Wait()
		left := leftover.TTL("k")
		if left > 5*time.Second {
			t.Errorf("the leftover has a new term: %v", left)
		}

		leftover.FlushAll()
		tr.renews(t, "node 2 was emptied", c)
		synctest.Wait()
		if all := leftover.Dump(); !strings.Contains(all, c.Token+"~1#"+c.Owner) || !strings.Contains(all, fmt.Sprint(g.Fence)) {
			t.Errorf("node 2 lacks the record or the fence: %s", all)
		}
		tr.release(t, tr.d, c)
	})
}

// A driver resumes a hold that it took, after another driver has renewed the hold, within the term
// that it was granted or later. Its release also removes the record from a node that only the other
// driver has repaired.
func TestAHoldComesBackToTheDriverThatTookIt(t *testing.T) {
	for _, pause := range []time.Duration{6 * time.Second, time.Second} {
		try(t, 3, nil, func(t *testing.T, tr trial) {
			c, other := aClaim("k"), tr.direct(t, nil)
			elsewhere(t, tr.vs[0], "k")
			tr.acquire(t, tr.d, c)
			tr.lose("0", "k")
			time.Sleep(pause)
			strategytest.Want(t, "the other driver", renewOne(other, c, time.Second), nil)
			synctest.Wait() // until node 0 is repaired
			tr.want(t, "repaired", c, "xxx")
			time.Sleep(pause)
			tr.renews(t, fmt.Sprint("again after ", pause), c)
			synctest.Wait() // until node 0 has answered as well
			tr.release(t, tr.d, c)
			tr.want(t, "released", c, "---")
		})
	}
}
