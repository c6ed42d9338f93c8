package redlock

import (
	"context"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/hasplock/hasp/backend"
)

// vote is the answer of one node.
type vote int

const (
	pending vote = iota
	yes
	no
	failed  // the node does not vote, and has no record of the attempt
	unknown // the node does not vote, and may have a record of the attempt
)

// verdict is the result of all votes.
type verdict int

const (
	undecided verdict = iota
	won               // a quorum voted yes
	refused           // the attempt cannot win, or the hold is lost
	noQuorum          // too few nodes vote, so there is no decision
	abandoned         // the caller stopped waiting
)

// rule derives the verdict from the number of nodes that gave each vote.
type rule func(n, quorum int, count *[5]int) verdict

// acquireRule is the rule for an attempt to take a key. It never returns won, because redsync
// decides who wins. It returns refused if a quorum has voted, and no quorum can still vote yes.
func acquireRule(n, quorum int, count *[5]int) verdict {
	voted := count[yes] + count[no]
	switch {
	case count[failed]+count[unknown] > n-quorum:
		return noQuorum
	case count[yes]+count[pending] < quorum && voted >= quorum:
		return refused
	}
	return undecided
}

// holdRule is the rule for an existing hold. The hold is lost if fewer than a quorum of the
// nodes may have its record.
func holdRule(n, quorum int, count *[5]int) verdict {
	switch {
	case count[yes] >= quorum:
		return won
	case count[no] > n-quorum:
		return refused
	case count[yes]+count[pending] < quorum && count[no]+count[pending] <= n-quorum:
		return noQuorum
	}
	return undecided
}

// ballot counts votes. It has a verdict as soon as pending votes cannot change the result.
type ballot struct {
	rule   rule
	nodes  []*node
	quorum int
	done   chan struct{} // closed when there is a verdict

	mu      sync.Mutex // guards the fields below
	verdict verdict
	votes   []vote  // by node
	count   [5]int  // how many nodes gave each vote
	errs    []error // by node, why the node does not vote; nil until there is an error
}

func newBallot(nodes []*node, r rule) *ballot {
	n := len(nodes)
	b := &ballot{rule: r, nodes: nodes, quorum: n/2 + 1, done: make(chan struct{}), votes: make([]vote, n)}
	b.count[pending] = n
	return b
}

// cast counts v as the vote of node i, in place of the node's earlier vote. It reports whether v
// decided the ballot.
func (b *ballot) cast(i int, v vote, err error) (decided bool) {
	b.mu.Lock()
	defer b.mu.Unlock()

	b.count[b.votes[i]]--
	b.count[v]++
	b.votes[i] = v
	if err != nil && b.errs == nil {
		b.errs = make([]error, len(b.votes))
	}
	if b.errs != nil {
		b.errs[i] = err
	}

	// The verdict never changes. Later votes only change what b.failures() returns.
	if b.verdict == undecided {
		b.decideLocked(b.rule(len(b.votes), b.quorum, &b.count))
		decided = b.verdict != undecided
	}
	return decided
}

// decide gives the ballot the verdict v, unless the ballot already has a verdict.
func (b *ballot) decide(v verdict) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.verdict == undecided {
		b.decideLocked(v)
	}
}

// refuseIfSplit gives the ballot the verdict refused if a quorum has voted, but a quorum of yes
// votes would need nodes that have not voted.
func (b *ballot) refuseIfSplit() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.verdict == undecided && b.count[yes] < b.quorum && b.count[yes]+b.count[no] >= b.quorum {
		b.decideLocked(refused)
	}
}

func (b *ballot) decideLocked(v verdict) {
	if b.verdict = v; v != undecided {
		close(b.done)
	}
}

// result returns the verdict so far.
func (b *ballot) result() verdict {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.verdict
}

// poll asks all nodes at once about a hold, and returns the error that follows from the verdict. If
// there is a lead, poll also waits for the lead's answer, but no longer than the lead's method
// patience allows. The caller must count as work (see beginWork). If ctx ends, the calls continue.
func (d *driver) poll(ctx context.Context, lead int, ask func(n *node) (vote, error)) error {
	b := newBallot(d.nodes, holdRule)
	gather(ctx, d, func(n *node) int {
		v, err := ask(n)
		b.cast(n.i, v, err)
		return n.i
	}, func(answered []int) time.Duration {
		switch {
		case b.result() == undecided || lead == allNodes:
			return forever
		case lead == noLead || slices.Contains(answered, lead):
			return 0
		}
		return d.nodes[lead].patience()
	})
	b.decide(abandoned) // does nothing if there is a verdict
	return b.err()
}

// failures returns an error that contains the errors of the nodes that do not vote. If the ballot
// was abandoned, it also contains an error for each node whose vote is pending.
func (b *ballot) failures() error {
	b.mu.Lock()
	defer b.mu.Unlock()

	// Votes may still arrive and change b.errs, so work on a copy.
	errs := make([]error, len(b.votes))
	copy(errs, b.errs)
	for i, v := range b.votes {
		if v == pending && b.verdict == abandoned {
			errs[i] = fmt.Errorf("%s: no answer yet: %w", b.nodes[i].name, os.ErrDeadlineExceeded)
		}
	}
	return outage(errs)
}

// err returns the error of a ballot whose rule is holdRule.
func (b *ballot) err() error {
	switch b.result() {
	case won:
		return nil
	case refused:
		return backend.ErrLost
	}
	return b.failures()
}
