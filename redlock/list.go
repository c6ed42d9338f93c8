package redlock

import (
	"cmp"
	"context"
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
	yield func(backend.Entry, error) bool,
) {
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
				entries, err := entriesOf(ctx, m, some, timeout)
				if err != nil {
					yield(backend.Entry{}, err)
					return
				}
				for _, e := range entries {
					if !yield(e, nil) {
						return
					}
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

// entriesOf asks all nodes about keys, and returns an entry for each key that is held through hasp.
func entriesOf(
	ctx context.Context, m *members, some []redisstore.Candidate, timeout time.Duration,
) (entries []backend.Entry, err error) {
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
			return nil, cmp.Or(ctx.Err(), err)
		}
		if s.holder != nil && s.holder.IsOurs() {
			entries = append(entries, backend.Entry{Key: keys[i], Status: s.status()})
		}
	}
	return entries, nil
}
