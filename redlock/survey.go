package redlock

import (
	"cmp"
	"context"
	"math"
	"slices"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

// survey is the sum of the nodes' reports about a key.
type survey struct {
	on      []*redisstore.Found // by node; nil if there is no answer
	errs    []error             // by node
	answers int                 // how many elements of on and errs are known

	// These follow from the reports.
	holder *redisstore.Found  // the record of a quorum, with the rest of the quorum's term; or nil
	taken  []redisstore.Found // the records of all nodes that have one, the shortest term first
	free   int                // how many nodes have no record
	most   int                // the number of nodes that have the most frequent record
}

func newSurvey(nodes int) *survey {
	return &survey{on: make([]*redisstore.Found, nodes), errs: make([]error, nodes)}
}

// quorum is the smallest majority of the nodes.
func (s *survey) quorum() int { return len(s.on)/2 + 1 }

// add adds the report f of node i, or the error in its place.
func (s *survey) add(i int, f *redisstore.Found, err error) {
	s.answers++
	s.errs[i] = err
	switch {
	case err != nil:
		return
	case f.Free():
		s.free++
	default:
		s.taken = append(s.taken, *f)
		slices.SortFunc(s.taken, func(a, b redisstore.Found) int {
			return cmp.Compare(remaining(a), remaining(b))
		})
	}

	s.on[i] = f

	// Find the record of a quorum, and how long it has this quorum. The list taken is sorted by the
	// rest of the term, the shortest first. If a record has n copies, n-quorum of these may end
	// before the quorum is lost. The next one to end, which has the index n-quorum, ends the
	// quorum.
	copies := map[string][]*redisstore.Found{}
	for at := range s.taken {
		record := s.taken[at].Record
		copies[record] = append(copies[record], &s.taken[at])
		n := len(copies[record])
		s.most = max(s.most, n)
		if n >= s.quorum() {
			s.holder = copies[record][n-s.quorum()]
		}
	}
}

// remaining returns how long a record will last on its node.
func remaining(f redisstore.Found) time.Duration {
	if ttl := f.Status().TTL; ttl >= 0 {
		return ttl
	}
	return math.MaxInt64 // the record has no end
}

// hasQuorum reports whether a quorum has answered without an error.
func (s *survey) hasQuorum() bool { return len(s.taken)+s.free >= s.quorum() }

// outage returns nil if a quorum has answered, and otherwise the error for a missing quorum. If no
// node has returned an error, and ctx has ended, that end is why answers are missing. Then outage
// returns the error of ctx.
func (s *survey) outage(ctx context.Context) error {
	if s.hasQuorum() {
		return nil
	}
	anyFailed := slices.ContainsFunc(s.errs, func(err error) bool { return err != nil })
	if err := ctx.Err(); err != nil && !anyFailed {
		return err
	}
	return outage(s.errs)
}

// unheld reports whether the key surely has no holder, because no record can have a quorum,
// whatever records the silent nodes have.
func (s *survey) unheld() bool {
	// Assume that all silent nodes have the most frequent record.
	silent := len(s.on) - len(s.taken) - s.free
	return s.most+silent < s.quorum()
}

// heldError returns the HeldError for a key that was refused. It names the holder if s has found
// one.
func (s *survey) heldError() error {
	if s.holder == nil {
		return &backend.HeldError{}
	}
	return s.holder.Held()
}

// status returns the status of the key: its holder, if there is one, and its largest fence.
func (s *survey) status() (st backend.Status) {
	if s.holder != nil {
		st = s.holder.Status()
	}

	// Return the largest fence. A majority stores each granted fence, so one of the nodes that
	// answered has it, unless that node has lost its counter.
	for _, f := range s.on {
		if f != nil {
			st.Fence = max(st.Fence, f.Status().Fence)
		}
	}

	return st
}

// askFor asks the nodes about c.Key, until their answers show whether there is a holder. Unless
// lead is noLead, it also waits for the answer of that node. Once a quorum has answered, it waits
// for these at most leadTimeout. So a hanging node delays callers only that long.
func askFor(ctx context.Context, m *members, c backend.Claim, lead int) *survey {
	// Leave out the records of c itself. All attempts of c have failed, so their records are about
	// to be released.
	skip := func(record string) bool { return isOf(record, c.Token) }
	return m.query(ctx, []string{c.Key}, c.Timeout, skip, func(surveys []*survey) time.Duration {
		s := surveys[0] // of the only key
		leadAnswered := lead == noLead || s.on[lead] != nil || s.errs[lead] != nil
		switch {
		case !s.hasQuorum():
			return forever
		case leadAnswered && (s.holder != nil || s.unheld()):
			return 0
		}

		return leadTimeout
	})[0]
}
