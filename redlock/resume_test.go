package redlock

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"
)

// A second attempt has won on nodes 0 and 1, and node 2 has a leftover of the first attempt. A
// driver that does not know the hold must not count the leftover, which is removed soon. A node
// that loses its data gets the record and the fence from the next renewal.
func TestAResumedHoldIsTheRecordOfAQuorum(t *testing.T) {
	try(t, 3, func(t *testing.T, tr trial) {
		c, leftover := aFenced("k"), tr.vs[2].Mini
		wants(t, "the second attempt", tryOnce(t, tr.direct(t), c, 1, noLead), nil)
		tr.want(t, "the second attempt", c, "xxx")
		fence, _ := leftover.Get(counter)
		tr.put(t, "k", c.Token+"#"+c.Owner, 5*time.Second, 2)

		tr.each("1", down)
		isOutage(t, "node 1 may have the record", renewOne(tr.d, c), "1")
		tr.each("1", up)
		time.Sleep(probeEvery)
		tr.renews(t, "two nodes have the record", c)
		synctest.Wait()
		if left := leftover.TTL("k"); left > 5*time.Second {
			t.Errorf("the leftover has a new term: %v", left)
		}

		leftover.FlushAll()
		tr.renews(t, "node 2 was emptied", c)
		synctest.Wait()
		leftover.CheckGet(t, "k", c.Token+"~1#"+c.Owner)
		leftover.CheckGet(t, counter, fence)
		tr.release(t, tr.d, c)
	})
}

// A driver resumes a hold that it took, after another driver has renewed the hold, within the term
// that it was granted or later. Its release also removes the record from a node that only the other
// driver has repaired.
func TestAHoldComesBackToTheDriverThatTookIt(t *testing.T) {
	for _, pause := range []time.Duration{6 * time.Second, time.Second} {
		try(t, 3, func(t *testing.T, tr trial) {
			c, other := aClaim("k"), tr.direct(t)
			tr.each("0", elsewhere(t, "k"))
			tr.acquire(t, tr.d, c)
			tr.lose("0", "k")
			time.Sleep(pause)
			wants(t, "the other driver", renewOne(other, c), nil)
			tr.want(t, "repaired", c, "xxx")
			time.Sleep(pause)
			tr.renews(t, fmt.Sprint("again after ", pause), c)
			synctest.Wait() // until node 0 has answered as well
			tr.release(t, tr.d, c)
			tr.want(t, "released", c, "---")
		})
	}
}
