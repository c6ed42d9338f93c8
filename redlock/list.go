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
		left := len(m.nodes) - m.quorum() + 1 // so every quorum has a node that was scanned
		for i, n := range m.nodes {
			if left == 0 {
				return
			}
			if errs[i] = n.admit(); errs[i] != nil {
				continue
			}
			for page, err := range n.store.Scan(ctx, prefix, timeout, redisstore.ByToken) {
				if err != nil {
					errs[i] = n.nodeError(err, timeout) // the node does not count as scanned
					break
				}
				page = slices.DeleteFunc(page, func(c redisstore.Candidate) bool {
					known := seen[c.Key] // a scan may name a key twice
					seen[c.Key] = true
					return known
				})

				for some := range slices.Chunk(page, recordsAtOnce) {
					if !listSome(ctx, m, some, timeout, yield) {
						return
					}
				}
			}

			if errs[i] == nil {
				left--
			}
		}

		if left > 0 {
			yield(backend.Entry{}, cmp.Or(ctx.Err(), outage(errs)))
		}
	}
}

// listSome asks all nodes about keys, and yields an entry for each key that is held through hasp. It
// returns false if the list ends.
func listSome(
	ctx context.Context, m *members, some []redisstore.Candidate, timeout time.Duration,
	yield func(backend.Entry, error) bool,
) bool {
	keys := make([]string, len(some))
	for i, c := range some {
		keys[i] = c.Key
	}
	all := m.query(ctx, keys, timeout, nil, func(all []*survey) time.Duration {
		if all[0].hasQuorum() {
			return timeout / 10 // a node that hangs must not stop the list
		}
		return forever
	})

	for i, s := range all {
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
