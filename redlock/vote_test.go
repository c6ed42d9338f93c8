package redlock

import (
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redisstore/resp"
	"github.com/hasplock/hasp/internal/redistest"
)

// spoilMark makes a node answer with an error if its mark is read.
func spoilMark(v *redistest.VirtualServer) {
	v.Mini.Del(markKey)
	_, _ = v.Mini.Lpush(markKey, "no mark")
}

// A vote for the first attempt of a call comes after the release of the hold that a second attempt
// has won. A node that is not released yet has a record of the hold. Both are no quorum for a
// renewal.
func TestALateVoteRenewsNothingAfterTheRelease(t *testing.T) {
	try(t, 3, func(t *testing.T, tr trial) {
		c := aClaim("k")
		tr.each("01", elsewhere(t, "k"))
		tr.each("01", delay(time.Millisecond)) // they refuse when node 3 has been asked
		tr.vs[2].Proxy.Fail(c.Token, faultproxy.HoldRequest)
		wants(t, "the first attempt", tryOnce(t, tr.d, c, 0, noLead), backend.ErrHeld)
		tr.each("2", happened(t, "the late vote"))
		tr.lose("01", "k")
		tr.each("01", delay(0))
		wants(t, "the second attempt", tryOnce(t, tr.d, c, 1, noLead), nil)
		tr.want(t, "held", c, "xxx")

		tr.vs[0].Proxy.Fail(c.Token, faultproxy.HoldRequest)
		tr.release(t, tr.d, c)
		tr.want(t, "released", c, "x--")
		tr.each("2", delay(200*time.Millisecond)) // until then the late vote is not released
		tr.vs[2].Proxy.Release()
		tr.want(t, "the late vote", c, "x-x")
		tr.lost(t, "renew", c)
		wants(t, "release again", tr.d.Release(t.Context(), c), backend.ErrLost)
		tr.vs[0].Proxy.Release()
		time.Sleep(5 * time.Second)
		tr.want(t, "afterwards", c, "---")
	})
}

// A lead that does not vote has refused nothing, so the vote of the slowest node decides.
func TestALeadThatDoesNotVote(t *testing.T) {
	try(t, 3, func(t *testing.T, tr trial) {
		tr.each("0", down)
		tr.each("1", elsewhere(t, "k"))
		tr.each("2", delay(5*time.Millisecond))
		wants(t, "attempt", tryOnce(t, tr.d, aClaim("k"), 0, 0), backend.ErrHeld)
	})
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
