package redlock

import (
	"fmt"
	"os"
	"slices"
	"sync"

	"github.com/hasplock/hasp/backend"
)

// vote is what one node says.
type vote int

const (
	pending vote = iota
	yes
	no
	failed // does not vote, and there is nothing of ours
	unsure // does not vote, and there may be something of ours
)

// verdict is what all votes come to.
type verdict int

const (
	open    verdict = iota
	won             // a quorum of yes
	refused         // the answer is no
	broken          // too few nodes have voted to tell
	left            // nobody wants to know any more
)

// rule reads a verdict off a count of n votes.
type rule func(n, quorum int, count *[5]int) verdict

// taking is the rule for a key that is to be taken. It is held by another if a
// quorum has voted and too few of them with yes.
func taking(n, quorum int, count *[5]int) verdict {
	voted := count[yes] + count[no]
	switch {
	case count[yes] >= quorum:
		return won
	case count[failed]+count[unsure] > n-quorum:
		return broken
	case count[yes]+count[pending] < quorum && voted >= quorum:
		return refused
	}
	return open
}

// having is the rule for a hold there is. It is lost if so many nodes do not
// have it that no quorum can.
func having(n, quorum int, count *[5]int) verdict {
	switch {
	case count[yes] >= quorum:
		return won
	case count[no] > n-quorum:
		return refused
	case count[yes]+count[pending] < quorum && count[no]+count[pending] <= n-quorum:
		return broken
	}
	return open
}

// ballot counts votes, and is decided as soon as those that are missing cannot
// change the verdict.
type ballot struct {
	rule   rule
	nodes  []*node
	quorum int
	done   chan struct{} // closed with the verdict

	mu      sync.Mutex // guards all below
	verdict verdict
	votes   []vote
	count   [5]int
	errs    []error // of nodes that do not vote
}

func newBallot(nodes []*node, r rule) *ballot {
	n := len(nodes)
	b := &ballot{rule: r, nodes: nodes, quorum: n/2 + 1, done: make(chan struct{}), votes: make([]vote, n), errs: make([]error, n)}
	b.count[pending] = n
	return b
}

// cast counts the vote of node i, and returns the verdict so far and whether
// it was this vote that has decided it.
func (b *ballot) cast(i int, v vote, err error) (so verdict, now bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.count[b.votes[i]]--
	b.count[v]++
	b.votes[i], b.errs[i] = v, err
	if b.verdict == open {
		b.decide(b.rule(len(b.votes), b.quorum, &b.count))
		now = b.verdict != open
	}
	return b.verdict, now
}

// end gives the ballot a verdict, if it has none.
func (b *ballot) end(v verdict) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.verdict == open {
		b.decide(v)
	}
}

func (b *ballot) decide(v verdict) {
	if b.verdict = v; v != open {
		close(b.done)
	}
}

// result is the verdict so far.
func (b *ballot) result() verdict {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.verdict
}

// of is the vote of node i so far.
func (b *ballot) of(i int) vote {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.votes[i]
}

// has reports whether a node has voted so.
func (b *ballot) has(v vote) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.count[v] > 0
}

// failures are the errors of the nodes that do not vote, as an outage. One that
// was just not waited for is none of them.
func (b *ballot) failures() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	errs := slices.Clone(b.errs)
	for i, v := range b.votes {
		if v == pending && b.verdict == left {
			errs[i] = fmt.Errorf("%s: no answer yet: %w", b.nodes[i].name, os.ErrDeadlineExceeded)
		}
	}
	return outage(errs)
}

// err is the error of a ballot by the rule having.
func (b *ballot) err() error {
	switch b.result() {
	case won:
		return nil
	case refused:
		return backend.ErrLost
	}
	return b.failures()
}
