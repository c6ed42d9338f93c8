package redlock

import (
	"cmp"
	"context"
	"iter"
	"slices"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

// recordsAtOnce is the number of keys about which list asks each node in one pipeline.
const recordsAtOnce = 50

// list yields the keys whose record a quorum of the nodes has, each key once. It scans one node
// after another until every possible quorum contains a scanned node. For each page of a scan, it
// asks all nodes about the keys on the page.
func list(
	ctx context.Context, m *members, prefix string, timeout time.Duration,
) iter.Seq2[backend.Entry, error] {
	return func(yield func(backend.Entry, error) bool) {
		seen := map[string]bool{}
		errs := make([]error, len(m.nodes))
		// How many nodes must still be scanned. The nodes that are never scanned are fewer than a
		// quorum, so every quorum has a node that was scanned.
		left := len(m.nodes) - m.quorum() + 1
		for i, n := range m.nodes {
			if left == 0 {
				return
			}
			errs[i] = n.admit()
			if errs[i] != nil {
				continue // the node is suspect, so scan others instead
			}
			for page, err := range n.store.Scan(ctx, prefix, timeout, redisstore.ByToken) {
				if err != nil {
					errs[i] = n.nodeError(err, timeout) // the node does not count as scanned
					break
				}
				// Leave out the keys that this node or an earlier one has already named.
				page = slices.DeleteFunc(page, func(c redisstore.Candidate) bool {
					known := seen[c.Key]
					seen[c.Key] = true
					return known
				})

				for candidates := range slices.Chunk(page, recordsAtOnce) {
					if !listHeld(ctx, m, candidates, timeout, yield) {
						return
					}
				}
			}

			if errs[i] == nil {
				left-- // the node was scanned to its end
			}
		}

		if left > 0 {
			yield(backend.Entry{}, cmp.Or(ctx.Err(), outage(errs)))
		}
	}
}

// listHeld asks all nodes about the keys of the candidates, and yields an entry for each key that
// is held through hasp. It returns false if the list ends, because yield has returned false, or
// because of an outage, which listHeld then yields.
func listHeld(
	ctx context.Context, m *members, candidates []redisstore.Candidate, timeout time.Duration,
	yield func(backend.Entry, error) bool,
) bool {
	keys := make([]string, len(candidates))
	for i, c := range candidates {
		keys[i] = c.Key
	}
	surveys := m.query(ctx, keys, timeout, nil, func(surveys []*survey) time.Duration {
		// A node answers about all keys at once, so the first survey stands for all.
		if surveys[0].hasQuorum() {
			return timeout / 10 // a node that hangs must not hold up the list
		}
		return forever
	})

	for i, s := range surveys {
		if err := s.outage(ctx); err != nil {
			yield(backend.Entry{}, cmp.Or(ctx.Err(), err))
			return false
		}
		isHeld := s.holder != nil && s.holder.IsOurs()
		if isHeld && !yield(backend.Entry{Key: keys[i], Status: s.status()}, nil) {
			return false
		}
	}

	return true
}
