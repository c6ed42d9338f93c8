package redlock

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/internal/strategytest"
)

// last returns the verdict if no vote is pending.
func last(acquiring bool, n int, count [5]int) verdict {
	quorum := n/2 + 1
	switch {
	case count[yes] >= quorum && acquiring:
		return undecided // redsync counts these votes
	case count[yes] >= quorum:
		return won
	case acquiring && count[failed]+count[unknown] > n-quorum:
		return noQuorum
	case acquiring || count[no] > n-quorum:
		return refused
	}
	return noQuorum
}

// sure returns the verdict that all possible pending votes lead to, or undecided.
func sure(acquiring bool, n int, count [5]int) verdict {
	if count[pending] == 0 {
		return last(acquiring, n, count)
	}
	so := verdict(-1)
	for v := yes; v <= unknown; v++ {
		next := count
		next[pending]--
		next[v]++
		switch s := sure(acquiring, n, next); {
		case so == -1:
			so = s
		case so != s:
			return undecided
		}
	}
	return so
}

// Every sequence of votes decides a ballot at the first vote after which the others cannot change
// the verdict.
func TestABallotIsDecidedOnceByTheDecidingVote(t *testing.T) {
	t.Parallel()
	rules := map[bool]rule{true: acquireRule, false: holdRule}
	for n := 1; n <= 5; n++ {
		for acquiring, r := range rules {
			for sequence := range 1 << (2 * n) { // two bits for each vote
				b, count, want := newBallot(make([]*node, n), r), [5]int{pending: n}, undecided
				for i := range n {
					v := yes + vote(sequence>>(2*i)&3)
					count[pending]--
					count[v]++
					before := want
					if before == undecided {
						want = sure(acquiring, n, count)
					}

					now := b.cast(i, v, nil)
					over := false
					select {
					case <-b.done:
						over = true
					default:
					}
					if got := b.result(); got != want || now != (before != want) || over != (want != undecided) {
						t.Fatalf("%d nodes, acquiring %v, sequence %b: verdict %d after vote %d, decided now %v, done %v; want %d",
							n, acquiring, sequence, got, i, now, over, want)
					}
				}
			}
		}
	}
}

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
		if _, err := tr.d.tryAcquire(t.Context(), c, 0, noLead, &queueState{}); !errors.Is(err, backend.ErrHeld) {
			t.Fatalf("the first attempt: got %v, want ErrHeld", err)
		}
		synctest.Wait()
		if tr.vs[2].Proxy.Pending() > 0 {
			t.Fatal("node 3 was not asked")
		}
		tr.lose("01", "k")
		tr.each("01", func(v *redistest.VirtualServer) { v.Proxy.Delay(0) })
		if _, err := tr.d.tryAcquire(t.Context(), c, 1, noLead, &queueState{}); err != nil {
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
		_, err := tr.d.tryAcquire(t.Context(), aClaim("k"), 0, 0, &queueState{})
		strategytest.Want(t, "acquire", err, backend.ErrHeld)
	})
}
