package redlock

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redisstore/resp"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/internal/strategytest"
)

// spoilMark makes a node answer with an error if its mark is read.
func spoilMark(v *redistest.VirtualServer) {
	v.Mini.Del(markKey)
	_, _ = v.Mini.Lpush(markKey, "no mark")
}

// claim returns a claim for key, with a token of its own.
func claim(key string) backend.Claim {
	return backend.Claim{Key: key, Token: "token-of-a-claim-" + key, Owner: "me", TTL: time.Minute, Timeout: time.Second}
}

func take(t *testing.T, d *driver, c backend.Claim) backend.Grant {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), c.Timeout)
	defer cancel()
	g, err := d.Acquire(ctx, c)
	if err != nil {
		t.Fatalf("%s: %v", c.Key, err)
	}
	return g
}

// A vote for the first attempt of a call comes after the release of the hold that a second attempt
// has won. A node that is not released yet has a record of the hold. Both are no quorum for a
// renewal.
func TestALateVoteRenewsNothingAfterTheRelease(t *testing.T) {
	try(t, 3, nil, func(t *testing.T, tr trial) {
		tr.warm(t, tr.d, aClaim("w"))
		c := aClaim("k")
		elsewhere(t, tr.vs[0], "k")
		elsewhere(t, tr.vs[1], "k")
		tr.each("01", func(v *redistest.VirtualServer) { v.Proxy.Delay(time.Millisecond) }) // they refuse when node 3 has been asked
		tr.vs[2].Proxy.Fail(c.Token, faultproxy.HoldRequest)
		if _, err := tryOnce(t, tr.d, c, 0, noLead); !errors.Is(err, backend.ErrHeld) {
			t.Fatalf("the first attempt: got %v, want ErrHeld", err)
		}
		synctest.Wait()
		if tr.vs[2].Proxy.Pending() > 0 {
			t.Fatal("node 3 was not asked")
		}
		tr.lose("01", "k")
		tr.each("01", func(v *redistest.VirtualServer) { v.Proxy.Delay(0) })
		if _, err := tryOnce(t, tr.d, c, 1, noLead); err != nil {
			t.Fatalf("the second attempt: %v", err)
		}
		tr.want(t, "held", c, "xxx")

		tr.vs[0].Proxy.Fail(c.Token, faultproxy.HoldRequest)
		tr.release(t, tr.d, c)
		tr.want(t, "released", c, "x--")
		tr.vs[2].Proxy.Delay(200 * time.Millisecond) // until then the late vote is not released
		tr.vs[2].Proxy.Release()
		tr.want(t, "the late vote", c, "x-x")
		strategytest.Want(t, "renew", renewOne(tr.d, c, time.Second), backend.ErrLost)
		strategytest.Want(t, "release again", tr.d.Release(t.Context(), c), backend.ErrLost)
		tr.vs[0].Proxy.Release()
		time.Sleep(5 * time.Second)
		tr.want(t, "afterwards", c, "---")
	})
}

// A lead that does not vote has refused nothing, so the vote of the slowest node decides.
func TestALeadThatDoesNotVote(t *testing.T) {
	try(t, 3, nil, func(t *testing.T, tr trial) {
		tr.vs[0].Proxy.Down()
		elsewhere(t, tr.vs[1], "k")
		tr.vs[2].Proxy.Delay(5 * time.Millisecond)
		_, err := tryOnce(t, tr.d, aClaim("k"), 0, 0)
		strategytest.Want(t, "acquire", err, backend.ErrHeld)
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
