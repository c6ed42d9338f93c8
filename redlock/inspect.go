package redlock

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

// found is what one node tells of a key.
type found struct {
	redisstore.Found
	i   int
	err error
}

// look asks all nodes about a key. It returns what they have told as soon as
// enough says that this suffices, and else when all have, or ctx has ended.
func (d *Driver) look(ctx context.Context, key string, timeout time.Duration, enough func([]found) bool) []found {
	answers := make(chan found, len(d.nodes))
	call := redisstore.Call{Keys: []string{redisstore.LockKey(key), redisstore.DerivedKey("fence", key)}}
	for _, n := range d.nodes {
		if !d.spawn(func() {
			f := n.look(call, timeout)
			f.i = n.i
			answers <- f
		}) {
			return []found{{err: errClosed}}
		}
	}
	var all []found
	for range d.nodes {
		select {
		case f := <-answers:
			if all = append(all, f); enough(all) {
				return all
			}
		case <-ctx.Done():
			return all
		}
	}
	return all
}

// look asks the node about a key.
func (n *node) look(call redisstore.Call, timeout time.Duration) found {
	if err := n.admit(); err != nil {
		return found{err: err}
	}
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	began := time.Now()
	reply, err := n.store.Run(ctx, inspectScript, call)
	n.heard(ctx, began, err)
	if err != nil {
		return found{err: n.plain(err, timeout)}
	}
	f, ok := redisstore.Decode(reply)
	if !ok {
		return found{err: n.store.Unexpected(reply)}
	}
	return found{Found: f}
}

// state is what the nodes' answers come to.
type state struct {
	all    []found
	holder *redisstore.Found // of a quorum, as the node has it that makes it one for the longest
	taken  []redisstore.Found
	free   int
	errs   []error
}

// sum adds up what n nodes have told.
func (d *Driver) sum(all []found) state {
	s := state{all: all}
	byRecord := map[string][]redisstore.Found{}
	for _, f := range all {
		switch {
		case f.err != nil:
			s.errs = append(s.errs, f.err)
		case f.Free():
			s.free++
		default:
			s.taken = append(s.taken, f.Found)
			byRecord[f.Record()] = append(byRecord[f.Record()], f.Found)
		}
	}
	for _, fs := range byRecord {
		if len(fs) >= d.quorum() {
			slices.SortFunc(fs, func(a, b redisstore.Found) int { return -cmp.Compare(lasts(a), lasts(b)) })
			s.holder = &fs[d.quorum()-1]
		}
	}
	return s
}

// lasts is how long a record lasts; one without an end for ever.
func lasts(f redisstore.Found) time.Duration {
	if ttl := f.Status().TTL; ttl >= 0 {
		return ttl
	}
	return 1<<63 - 1
}

func (d *Driver) quorum() int { return len(d.nodes)/2 + 1 }

// voted reports whether a quorum has told anything.
func (s state) voted(d *Driver) bool { return len(s.taken)+s.free >= d.quorum() }

// unanswered returns nil if a quorum has answered, and otherwise the outage. If ctx
// ended before any error, it returns ctx's error.
func (d *Driver) unanswered(ctx context.Context, s state) error {
	if s.voted(d) {
		return nil
	}
	if err := ctx.Err(); err != nil && len(s.errs) == 0 {
		return err
	}
	errs := make([]error, len(d.nodes))
	copy(errs, s.errs)
	return outage(errs)
}

// of is what node i has told, if it has.
func (s state) of(i int) (found, bool) {
	for _, f := range s.all {
		if f.i == i {
			return f, true
		}
	}
	return found{}, false
}

// record is that of node i, and how many nodes may have it, too, at most.
func (s state) record(d *Driver, i int) (record string, most int) {
	f, told := s.of(i)
	if !told || f.err != nil || f.Free() {
		return "", 0
	}
	most = len(d.nodes) - len(s.taken) - s.free
	for _, other := range s.taken {
		if other.Record() == f.Record() {
			most++
		}
	}
	return f.Record(), most
}

// unheld reports whether nobody can have the key: no record is or can be that
// of a quorum.
func (s state) unheld(d *Driver) bool {
	if s.free >= d.quorum() {
		return true
	}
	count, most := map[string]int{}, 0
	for _, f := range s.taken {
		count[f.Record()]++
		most = max(most, count[f.Record()])
	}
	return most+len(d.nodes)-len(s.taken)-s.free < d.quorum()
}

// survey asks the nodes how it stands with c's key, until it is clear who has
// it or that nobody can, and a moment longer for what the lead has.
func (d *Driver) survey(ctx context.Context, c backend.Claim, lead int) state {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	return d.sum(d.look(ctx, c.Key, c.Timeout, func(all []found) bool {
		s := d.sum(all)
		if s.holder == nil && !s.unheld(d) {
			return false
		}
		if _, told := s.of(lead); lead == nobody || told {
			return true
		}
		time.AfterFunc(leadPatience, cancel)
		return false
	}))
}

// heldBy is the error of a key that is held as s says. The key is free for
// another when so many votes have run out that a quorum is left.
func (d *Driver) heldBy(s state) error {
	if s.holder != nil {
		return s.holder.Held()
	}
	if len(s.taken) == 0 {
		return &backend.HeldError{}
	}
	slices.SortFunc(s.taken, func(a, b redisstore.Found) int { return cmp.Compare(lasts(a), lasts(b)) })
	return s.taken[max(0, min(len(s.taken)-1, d.quorum()-s.free-1))].Held()
}

// Inspect tells who holds key: whose record a quorum of the nodes has. The
// record has no room for Since, and nothing says who waits; a holder that is
// not of hasp has no Owner.
func (d *Driver) Inspect(ctx context.Context, key string) (backend.Status, error) {
	all := d.look(ctx, key, inspectTimeout, func(all []found) bool {
		s := d.sum(all)
		return s.holder != nil || s.free >= d.quorum()
	})
	s := d.sum(all)
	if err := d.unanswered(ctx, s); err != nil {
		return backend.Status{}, err
	}
	var status backend.Status
	if s.holder != nil {
		status = s.holder.Status()
	}
	for _, f := range all {
		if f.err == nil {
			status.Fence = max(status.Fence, f.Status().Fence)
		}
	}
	return status, nil
}

// inspectTimeout bounds what is asked of a node without a claim.
const inspectTimeout = 3 * time.Second

// Break removes whatever is stored under key, on all nodes that can be
// reached, and tells those who wait for it. It needs a quorum of them.
func (d *Driver) Break(ctx context.Context, key string) error {
	b := newBallot(d.nodes, having)
	for _, n := range d.nodes {
		if !d.spawn(func() {
			within, cancel := context.WithTimeout(context.Background(), inspectTimeout)
			defer cancel()
			_, err := n.store.Run(within, breakScript, redisstore.Call{
				Keys: []string{redisstore.LockKey(key)},
				Args: []any{redisstore.DerivedKey("channel", key), "broken"},
			})
			if err != nil {
				b.cast(n.i, failed, n.plain(err, inspectTimeout))
				return
			}
			b.cast(n.i, yes, nil)
		}) {
			return errClosed
		}
	}
	select {
	case <-b.done:
	case <-ctx.Done():
		b.end(left)
	}
	return b.err()
}
