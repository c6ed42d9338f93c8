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

// joined asks all nodes about some keys, and returns those that are held.
func (d *Driver) joined(ctx context.Context, some []redisstore.Candidate, timeout time.Duration) ([]backend.Entry, error) {
	calls := make([]redisstore.Call, len(some))
	for i, c := range some {
		calls[i] = redisstore.Call{Keys: []string{redisstore.LockKey(c.Key), redisstore.DerivedKey("fence", c.Key)}}
	}
	reports := make(chan report, len(d.nodes)) // room for all, because some may be late
	for _, n := range d.nodes {
		if !d.spawn(func() { reports <- n.report(calls, timeout) }) {
			return nil, errClosed
		}
	}

	var all []report
	errs := make([]error, len(d.nodes))
	var late <-chan time.Time // nil until a quorum has answered
wait:
	for range d.nodes {
		select {
		case r := <-reports:
			if errs[r.i] = r.err; r.err == nil {
				all = append(all, r)
			}
		case <-late:
			break wait
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		// A node that hangs must not stop the list.
		if len(all) == d.quorum() && late == nil {
			late = time.After(timeout / 10)
		}
	}
	if len(all) < d.quorum() {
		return nil, outage(errs)
	}

	var entries []backend.Entry
	for i, c := range some {
		if st, ok := d.statusOf(i, all); ok {
			entries = append(entries, backend.Entry{Key: c.Key, Status: st})
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

// statusOf joins the reports on the key with index i. It returns false if no program of hasp
// holds the key.
func (d *Driver) statusOf(i int, all []report) (backend.Status, bool) {
	var answers []answer
	for _, r := range all {
		answers = append(answers, answer{Found: r.found[i], i: r.i})
	}
	s := d.sum(answers, false)
	if s.holder == nil || !s.holder.IsOurs() {
		return backend.Status{}, false
	}
	return s.status(), true
}
