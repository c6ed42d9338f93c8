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

// permutations calls f with every order of 0 to n-1.
func permutations(n int, f func(order []int)) {
	order := make([]int, n)
	for i := range order {
		order[i] = i
	}
	var from func(k int)
	from = func(k int) {
		if k == n {
			f(order)
			return
		}
		for i := k; i < n; i++ {
			order[k], order[i] = order[i], order[k]
			from(k + 1)
			order[k], order[i] = order[i], order[k]
		}
	}
	from(0)
}

// combinations calls f with every choice of one of several for each of n.
func combinations(n, several int, f func(choice []int)) {
	choice := make([]int, n)
	for {
		f(choice)
		i := 0
		for ; i < n; i++ {
			if choice[i]++; choice[i] < several {
				break
			}
			choice[i] = 0
		}
		if i == n {
			return
		}
	}
}

func TestABallotIsDecidedOnceByTheDecidingVote(t *testing.T) {
	t.Parallel()
	for n := range 6 {
		if n == 0 {
			continue
		}
		for _, taken := range []bool{true, false} {
			r := holdRule
			if taken {
				r = acquireRule
			}
			known := map[[5]int]verdict{}
			want := func(count [5]int) verdict {
				v, ok := known[count]
				if !ok {
					v = sure(taken, n, count)
					known[count] = v
				}
				return v
			}
			combinations(n, 4, func(choice []int) {
				permutations(n, func(order []int) {
					b := newBallot(make([]*node, n), r)
					count := [5]int{pending: n}
					for _, i := range order {
						v := yes + vote(choice[i])
						before := b.result()
						now := b.cast(i, v, nil)
						got := b.result()
						count[pending]--
						count[v]++
						over := false
						select {
						case <-b.done:
							over = true
						default:
						}
						if w := want(count); got != w || now != (before == undecided && w != undecided) || over != (w != undecided) || before != undecided && got != before {
							t.Fatalf("%d nodes, acquiring %v, votes %v in order %v: verdict %d after vote of %d, decided now %v, done %v; want %d",
								n, taken, choice, order, got, i, now, over, w)
						}
					}
				})
			})
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
	return backend.Claim{Key: key, Token: "token-" + key, Owner: "me", TTL: time.Minute, Timeout: time.Second}
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
		if err := renewOne(tr.d, c, time.Second); !errors.Is(err, backend.ErrLost) {
			t.Errorf("renew: got %v, want ErrLost", err)
		}
		if err := tr.d.Release(t.Context(), c); !errors.Is(err, backend.ErrLost) {
			t.Errorf("release again: got %v, want ErrLost", err)
		}
		tr.vs[0].Proxy.Release()
		time.Sleep(5 * time.Second)
		tr.want(t, "afterwards", c, "---")
	})
}
