package redlock

import (
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redisstore/resp"
)

// spoilMark makes a node answer with an error if its mark is read.
func spoilMark(v *server) {
	v.Mini.Del(markKey)
	_, _ = v.Mini.Lpush(markKey, "no mark")
}

// A vote for the first attempt of a call comes after the release of the hold that a second attempt
// has won. A node that is not released yet has a record of the hold. Both are no quorum for a
// renewal.
func TestALateVoteRenewsNothingAfterTheRelease(t *testing.T) {
	three(t, func(tr trial) {
		c := aClaim("k")
		tr.elsewhere("01", "k")
		tr.each("01", delay(time.Millisecond)) // they refuse when node 3 has been asked
		tr.fail("2", c.Token, faultproxy.HoldRequest)
		tr.wants("the first attempt", tr.tryOnce(c, 0, noLead), backend.ErrHeld)
		tr.happened("2", "the late vote")
		tr.lose("01", "k")
		tr.each("01", delay(0))
		tr.wants("the second attempt", tr.tryOnce(c, 1, noLead), nil)
		tr.want(c, "xxx") // held

		tr.fail("0", c.Token, faultproxy.HoldRequest)
		tr.release(c)
		tr.want(c, "x--")                         // released
		tr.each("2", delay(200*time.Millisecond)) // until then the late vote is not released
		tr.vs[2].Proxy.Release()
		tr.want(c, "x-x") // the late vote
		tr.lost(c)        // renew
		tr.releasesNothing(c)
		tr.vs[0].Proxy.Release()
		time.Sleep(5 * time.Second)
		tr.want(c, "---") // afterwards
	})
}

// An attempt waits for a slow vote that it needs: if the lead does not vote, which refuses nothing, or
// if there is no quorum without the lead.
func TestASlowVoteThatIsNeededIsWaitedFor(t *testing.T) {
	for _, c := range []struct {
		down, no, slow string // nodes
		want           error
	}{
		{down: "0", no: "1", slow: "2", want: backend.ErrHeld},
		{down: "0", slow: "2"},
		{down: "2", slow: "0"},
	} {
		three(t, func(tr trial) {
			tr.each(c.down, down)
			tr.elsewhere(c.no, "k")
			tr.each(c.slow, delay(5*leadTimeout))
			tr.wants("attempt", tr.tryOnce(aClaim("k"), 0, 0), c.want)
		})
	}
}

// A node that will be back by itself must not make Open fail, although it answers.
func TestWhatDoesNotLast(t *testing.T) {
	for text, want := range map[string]bool{
		"LOADING Redis is loading the dataset in memory": false, "BUSY Redis is busy running a script": false,
		"ERR max number of clients reached": false, "WRONGPASS invalid username-password pair": true,
	} {
		if got := isLasting(resp.ReplyError(text)); got != want {
			t.Errorf("%s: lasting is %v", text, got)
		}
	}
}
