package redlock

import (
	"context"
	"iter"
	"slices"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

var _ backend.Lister = (*driver)(nil)

// recordsAtOnce is the number of keys about which List asks each node in one pipeline.
const recordsAtOnce = 50

// List yields the keys whose record a quorum of the nodes has, each key once. It scans one node
// after another until every possible quorum contains a scanned node. For each page of a scan, it
// asks all nodes about the keys on the page.
func (d *driver) List(ctx context.Context, prefix string, timeout time.Duration) iter.Seq2[backend.Entry, error] {
	return func(yield func(backend.Entry, error) bool) {
		seen := map[string]bool{}
		errs := make([]error, len(d.nodes))
		scanned := 0
		for i, n := range d.nodes {
			if scanned == len(d.nodes)-d.quorum()+1 { // so every quorum has a node that was scanned
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
					entries, err := d.joined(ctx, some, timeout)
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
			if ctx.Err() != nil {
				yield(backend.Entry{}, ctx.Err())
				return
			}
			if errs[i] == nil {
				scanned++
			}
		}
		if scanned < len(d.nodes)-d.quorum()+1 {
			yield(backend.Entry{}, outage(errs))
		}
	}
}

// joined asks all nodes about keys, and returns an entry for each key that is held through hasp.
func (d *driver) joined(ctx context.Context, some []redisstore.Candidate, timeout time.Duration) (entries []backend.Entry, err error) {
	keys := make([]string, len(some))
	for i, c := range some {
		keys[i] = c.Key
	}
	reports := d.query(ctx, keys, timeout, func(all []report) time.Duration {
		if d.sum(all, 0, false, nil).hasQuorum() {
			return timeout / 10 // a node that hangs must not stop the list
		}
		return forever
	})
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	for i, key := range keys {
		s := d.sum(reports, i, false, nil)
		if err := s.outage(ctx); err != nil {
			return nil, err
		}
		if s.holder != nil && s.holder.IsOurs() {
			entries = append(entries, backend.Entry{Key: key, Status: s.status()})
		}
	}
	return entries, nil
}
