package redlock

import (
	"errors"
	"maps"
	"testing"
)

// errSilent is the vote of a node that does not vote.
var errSilent = errors.New("silent")

// last returns the verdict if no vote is pending.
func last(taking bool, n int, count map[error]int) error {
	quorum := n/2 + 1
	switch {
	case count[nil] >= quorum && taking:
		return errPending // redsync counts these votes
	case count[nil] >= quorum:
		return nil
	case taking && count[errSilent] > n-quorum:
		return errNoQuorum
	case taking || count[errNo] > n-quorum:
		return errNo
	}
	return errNoQuorum
}

// sure returns the verdict that all possible pending votes lead to, or errPending.
func sure(taking bool, n int, count map[error]int) error {
	if count[errPending] == 0 {
		return last(taking, n, count)
	}
	var all []error
	for _, v := range []error{nil, errNo, errSilent} {
		next := maps.Clone(count)
		next[errPending]--
		next[v]++
		all = append(all, sure(taking, n, next))
	}
	if all[0] == all[1] && all[1] == all[2] {
		return all[0]
	}
	return errPending
}

// Every sequence of votes decides a ballot at the first vote after which the others cannot change
// the verdict.
func TestABallotIsDecidedOnceByTheDecidingVote(t *testing.T) {
	t.Parallel()
	for n := 1; n <= 5; n++ {
		for _, taking := range []bool{true, false} {
			for sequence := range 1 << (2 * n) { // two bits for each vote
				b, count, want := newBallot(make([]*node, n), taking), map[error]int{errPending: n}, errPending
				for i := range n {
					v := []error{nil, errNo, errSilent, errSilent}[sequence>>(2*i)&3]
					count[errPending]--
					count[v]++
					before := want
					if before == errPending {
						want = sure(taking, n, count)
					}

					now := b.cast(i, v)
					if got := b.result(); got != want || now != (before != want) || b.result() != errPending != (want != errPending) {
						t.Fatalf("%d nodes, taking %v, sequence %b: verdict %v after vote %d, decided now %v; want %v",
							n, taking, sequence, got, i, now, want)
					}
				}
			}
		}
	}
}
