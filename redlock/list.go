package redlock

import (
	"context"
	"iter"
	"slices"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

var _ backend.Lister = (*Driver)(nil)

// recordsAtOnce is how many keys List asks each node about in one pipeline.
const recordsAtOnce = 50

// List returns the keys whose record a quorum of the nodes has. It scans one node after
// another, until the nodes that are not scanned are fewer than a quorum. It asks all nodes
// about the keys of each page. It remembers the keys that it has listed, so that none comes
// twice.
func (d *Driver) List(ctx context.Context, prefix string, timeout time.Duration) iter.Seq2[backend.Entry, error] {
	return func(yield func(backend.Entry, error) bool) {
		listed := map[string]bool{}
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
				seen := map[string]bool{} // a scan may name a key twice
				page = slices.DeleteFunc(page, func(c redisstore.Candidate) bool {
					known := listed[c.Key] || seen[c.Key]
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
						listed[e.Key] = true
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

// report is what one node has under some keys.
type report struct {
	i     int // the node
	found []redisstore.Found
	err   error
}

// joined asks all nodes about some keys, and returns those that programs of hasp hold.
func (d *Driver) joined(ctx context.Context, some []redisstore.Candidate, timeout time.Duration) ([]backend.Entry, error) {
	calls := make([]redisstore.Call, len(some))
	for i, c := range some {
		calls[i] = redisstore.Call{Keys: []string{redisstore.LockKey(c.Key), redisstore.DerivedKey("fence", c.Key)}}
	}

	within, cancel := context.WithCancel(ctx)
	defer cancel()
	var voted []report
	errs := make([]error, len(d.nodes))
	_, ok := gather(within, d, func(n *node) report { return n.report(calls, timeout) }, func(all []report) bool {
		r := all[len(all)-1]
		if errs[r.i] = r.err; r.err != nil {
			return false
		}
		if voted = append(voted, r); len(voted) == d.quorum() {
			time.AfterFunc(timeout/10, cancel) // a node that hangs must not stop the list
		}
		return false
	})
	switch {
	case !ok:
		return nil, errClosed
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case len(voted) < d.quorum():
		return nil, outage(errs)
	}

	var entries []backend.Entry
	for k, c := range some {
		var answers []answer
		for _, r := range voted {
			answers = append(answers, answer{Found: r.found[k], i: r.i})
		}
		if s := d.sum(answers, false); s.holder != nil && s.holder.IsOurs() {
			entries = append(entries, backend.Entry{Key: c.Key, Status: s.status()})
		}
	}
	return entries, nil
}

// report asks the node about some keys.
func (n *node) report(calls []redisstore.Call, timeout time.Duration) report {
	r := report{i: n.i}
	if r.err = n.admit(); r.err != nil {
		return r
	}

	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	began := time.Now()
	r.found = make([]redisstore.Found, len(calls))
	answered := 0
	n.store.RunEach(ctx, inspectScript, calls, func(i int, reply any, err error) {
		f, ok := redisstore.Decode(reply)
		if err == nil && !ok {
			err = n.store.Unexpected(reply)
		}
		if err != nil {
			r.err = err
			return
		}
		r.found[i] = f
		answered++
	})
	if r.err == nil && answered < len(calls) {
		r.err = ctx.Err()
	}
	n.observe(ctx, began, r.err)
	if r.err != nil {
		r.err = n.nodeError(r.err, time.Since(began))
	}
	return r
}
