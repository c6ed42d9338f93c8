package redlock

import (
	"testing"
	"testing/synctest"
	"time"
)

// A second attempt has won on nodes 0 and 1, and node 2 has a leftover of the first attempt. A
// driver that does not know the hold must not count the leftover, which is removed soon. A node
// that loses its data gets the record and the fence from the next renewal.
func TestAResumedHoldIsTheRecordOfAQuorum(t *testing.T) {
	three(t, func(tr trial) {
		c, leftover := aFenced("k"), tr.vs[2].Mini
		tr.wants("the second attempt", tr.direct().tryOnce(c, 1, noLead), nil)
		tr.want(c, "xxx") // the second attempt
		fence, _ := leftover.Get(counter)
		tr.put("2", "k", c.Token+"#"+c.Owner, 5*time.Second)

		tr.each("1", down)
		tr.isOutage("node 1 may have the record", tr.renew(c), "1")
		tr.each("1", up)
		time.Sleep(probeEvery)
		tr.renews(c) // two nodes have the record
		synctest.Wait()
		if left := leftover.TTL("k"); left > 5*time.Second {
			tr.Errorf("the leftover has a new term: %v", left)
		}

		leftover.FlushAll()
		tr.renews(c) // node 2 was emptied
		synctest.Wait()
		leftover.CheckGet(tr, "k", c.Token+"~1#"+c.Owner)
		leftover.CheckGet(tr, counter, fence)
		tr.release(c)
	})
}

// A driver resumes a hold that it took, after another driver has renewed the hold, within the term
// that it was granted or later. Its release also removes the record from a node that only the other
// driver has repaired.
func TestAHoldComesBackToTheDriverThatTookIt(t *testing.T) {
	for _, pause := range []time.Duration{6 * time.Second, time.Second} {
		three(t, func(tr trial) {
			c, other := aClaim("k"), tr.direct()
			tr.elsewhere("0", "k")
			tr.acquire(c)
			tr.lose("0", "k")
			time.Sleep(pause)
			other.renews(c)
			tr.want(c, "xxx") // repaired
			time.Sleep(pause)
			tr.renews(c)
			synctest.Wait() // until node 0 has answered as well
			tr.release(c)
			tr.want(c, "---") // released
		})
	}
}
