package redlock

import (
	"errors"
	"slices"
	"sync"

	"github.com/hasplock/hasp/backend"
)

// The vote of a node is nil for yes, errNo for no, or an error that says why it does not vote.
var (
	errNo      = errors.New("the node votes no")
	errPending = errors.New("the node has not voted yet")
)

// A verdict of a ballot is nil for yes, errNo for no, or one of these.
var (
	errNoQuorum  = errors.New("too few nodes vote")
	errAbandoned = errors.New("the caller has stopped waiting")
)

// ballot counts the votes of the nodes, either on a hold that exists or on taking a key. It has a
// verdict as soon as pending votes cannot change the result. If a key is to be taken, the verdict
// is never yes: redsync counts the votes for a win, and the ballot finds what redsync does not
// know, that a win has become impossible.
type ballot struct {
	nodes  []*node
	taking bool // the nodes vote on taking a key, and otherwise on a hold that exists
	done   chan struct{}

	mu      sync.Mutex // guards the fields below
	votes   []error    // by node
	verdict error      // errPending until done is closed
}

// newBallot returns a ballot of the given nodes. If the argument taking is set, they vote on taking
// a key, and otherwise on a hold that exists.
func newBallot(nodes []*node, taking bool) *ballot {
	return &ballot{
		nodes:   nodes,
		taking:  taking,
		done:    make(chan struct{}),
		votes:   slices.Repeat([]error{errPending}, len(nodes)),
		verdict: errPending,
	}
}

// cast counts the vote of node i. It reports whether the vote decided the ballot.
func (b *ballot) cast(i int, vote error) (decided bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.votes[i] = vote // also after the verdict, because the method failures returns all votes
	return b.decideLocked(b.countLocked())
}

// tallyLocked returns how many nodes have voted yes and no, how many may still vote, and the
// smallest majority.
func (b *ballot) tallyLocked() (yes, no, pending, quorum int) {
	for _, vote := range b.votes {
		switch vote {
		case nil:
			yes++
		case errNo:
			no++
		case errPending:
			pending++
		}
	}

	return yes, no, pending, len(b.votes)/2 + 1
}

// countLocked returns the verdict that the votes lead to, or errPending if there is none yet.
func (b *ballot) countLocked() error {
	yes, no, pending, quorum := b.tallyLocked()
	canWin := yes+pending >= quorum
	voted := yes + no
	minority := len(b.votes) - quorum // the largest number of nodes that a hold does not need

	// A key is held if a quorum has voted, and the yes votes cannot become a quorum.
	if b.taking {
		switch {
		case voted+pending < quorum:
			return errNoQuorum
		case voted >= quorum && !canWin:
			return errNo
		}
		return errPending
	}

	// A hold is lost if so many nodes do not have its record that the others are no quorum. If the
	// pending votes can lead to neither nil nor errNo any more, too few nodes vote.
	switch {
	case yes >= quorum:
		return nil
	case no > minority:
		return errNo
	case !canWin && no+pending <= minority:
		return errNoQuorum
	}

	return errPending
}

// decide gives the ballot a verdict, unless it already has one.
func (b *ballot) decide(verdict error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.decideLocked(verdict)
}

// decideLocked is decide with mu held. It reports whether the ballot had no verdict and now has
// one.
func (b *ballot) decideLocked(verdict error) (decided bool) {
	if b.verdict != errPending || verdict == errPending {
		return false
	}
	b.verdict = verdict
	close(b.done)
	return true
}

// refuseIfSplit gives the ballot the verdict errNo if a quorum has voted, but the yes votes are no
// quorum yet, so that a win would need nodes that have not voted.
func (b *ballot) refuseIfSplit() {
	b.mu.Lock()
	defer b.mu.Unlock()
	yes, no, _, quorum := b.tallyLocked()
	if yes+no >= quorum && yes < quorum {
		b.decideLocked(errNo)
	}
}

// result returns the verdict, or errPending if there is none yet.
func (b *ballot) result() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.verdict
}

// failures returns the error of a ballot without a quorum. It contains the errors of the nodes that
// do not vote. If the caller has stopped waiting, it also contains an error for each node that has
// not voted yet.
func (b *ballot) failures() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	errs := make([]error, len(b.votes))
	for i, vote := range b.votes {
		switch {
		case vote == errPending && b.verdict == errAbandoned:
			errs[i] = b.nodes[i].store.Unanswered(b.nodes[i].name)
		case vote != errNo && vote != errPending:
			errs[i] = vote // an error, or nil for yes
		}
	}

	return outage(errs)
}

// err returns the result of a ballot on a hold that exists: nil if a quorum has voted yes, ErrLost
// if the hold is lost, and otherwise the error of failures.
func (b *ballot) err() error {
	switch b.result() {
	case nil:
		return nil
	case errNo:
		return backend.ErrLost
	}

	return b.failures()
}
