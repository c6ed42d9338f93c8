package redlock

import (
	"cmp"
	"context"
	"crypto/rand"
	"math"
	"slices"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

// inspectTimeout bounds a call to a node that is not for a claim.
const inspectTimeout = 3 * time.Second

// answer is one node's answer about a key.
type answer struct {
	redisstore.Found
	i   int // the node
	err error
}

// query asks all nodes about a key. It returns the answers so far as soon as enough
// returns true for them, and otherwise when all nodes have answered or ctx is done.
func (d *Driver) query(ctx context.Context, key string, timeout time.Duration, enough func([]answer) bool) []answer {
	// There is room for all answers, because query may return before the last one.
	answers := make(chan answer, len(d.nodes))
	call := redisstore.Call{Keys: []string{redisstore.LockKey(key), redisstore.DerivedKey("fence", key)}}
	for _, n := range d.nodes {
		if !d.spawn(func() { answers <- n.query(call, timeout) }) {
			return []answer{{err: errClosed}}
		}
	}

	var all []answer
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

// query asks the node about a key.
func (n *node) query(call redisstore.Call, timeout time.Duration) answer {
	if err := n.admit(); err != nil {
		return answer{i: n.i, err: err}
	}

	// The caller's context does not end the call, because the outcome also shows
	// whether the node answers at all.
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	began := time.Now()
	reply, err := n.store.Run(ctx, inspectScript, call)
	n.observe(ctx, began, err)
	if err != nil {
		return answer{i: n.i, err: n.nodeError(err, timeout)}
	}

	f, ok := redisstore.Decode(reply)
	if !ok {
		return answer{i: n.i, err: n.store.Unexpected(reply)}
	}
	return answer{i: n.i, Found: f}
}

// survey is the sum of the nodes' answers about a key.
type survey struct {
	d      *Driver
	all    []answer
	holder *redisstore.Found  // the record of a quorum, from the node that ends the quorum; or nil
	taken  []redisstore.Found // the records
	free   int                // nodes without a record
	errs   []error
}

// sum returns the survey of answers.
func (d *Driver) sum(all []answer) survey {
	s := survey{d: d, all: all}
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

	// A record has a quorum until so many of its copies have expired that no quorum
	// is left.
	for _, fs := range byRecord {
		if len(fs) >= d.quorum() {
			slices.SortFunc(fs, func(a, b redisstore.Found) int { return -cmp.Compare(remaining(a), remaining(b)) })
			s.holder = &fs[d.quorum()-1]
		}
	}
	return s
}

// remaining returns how long a record lasts.
func remaining(f redisstore.Found) time.Duration {
	if ttl := f.Status().TTL; ttl >= 0 {
		return ttl
	}
	return math.MaxInt64 // it has no end
}

// hasQuorum reports whether a quorum has answered.
func (s survey) hasQuorum() bool { return len(s.taken)+s.free >= s.d.quorum() }

// silent returns how many nodes have not answered, or not yet.
func (s survey) silent() int { return len(s.d.nodes) - len(s.taken) - s.free }

// outage returns nil if a quorum has answered, and otherwise the outage. If ctx
// ended before any error, it returns ctx's error.
func (s survey) outage(ctx context.Context) error {
	if s.hasQuorum() {
		return nil
	}
	if err := ctx.Err(); err != nil && len(s.errs) == 0 {
		return err
	}

	errs := make([]error, len(s.d.nodes))
	copy(errs, s.errs)
	return outage(errs)
}

// answer returns the answer of node i, and false if there is none yet.
func (s survey) answer(i int) (answer, bool) {
	for _, f := range s.all {
		if f.i == i {
			return f, true
		}
	}
	return answer{}, false
}

// record returns the record on node i, and how many nodes may have the same record
// at most.
func (s survey) record(i int) (record string, most int) {
	f, ok := s.answer(i)
	if !ok || f.err != nil || f.Free() {
		return "", 0
	}
	most = s.silent()
	for _, other := range s.taken {
		if other.Record() == f.Record() {
			most++
		}
	}
	return f.Record(), most
}

// unheld reports whether the key has no holder: no record has a quorum, whatever
// the silent nodes have.
func (s survey) unheld() bool {
	if s.free >= s.d.quorum() {
		return true
	}

	count, most := map[string]int{}, 0
	for _, f := range s.taken {
		count[f.Record()]++
		most = max(most, count[f.Record()])
	}

	// All silent nodes may have the most frequent record.
	return most+s.silent() < s.d.quorum()
}

// heldError returns the error of a key that is held as s shows. The key becomes free
// when so many records have expired that a quorum of nodes has none.
func (s survey) heldError() error {
	if s.holder != nil {
		return s.holder.Held()
	}

	if len(s.taken) == 0 {
		return &backend.HeldError{}
	}

	slices.SortFunc(s.taken, func(a, b redisstore.Found) int { return cmp.Compare(remaining(a), remaining(b)) })
	return s.taken[max(0, min(len(s.taken)-1, s.d.quorum()-s.free-1))].Held()
}

// survey asks the nodes about c's key, until the answers show the holder, or show that
// there is none. When a quorum has answered, it waits a moment longer: for the lead, and
// for nodes whose answers decide whether there is a holder. A node that hangs must not
// make callers wait while the others hand the key on.
func (d *Driver) survey(ctx context.Context, c backend.Claim, lead int) survey {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	return d.sum(d.query(ctx, c.Key, c.Timeout, func(all []answer) bool {
		s := d.sum(all)
		if !s.hasQuorum() {
			return false
		}
		_, answered := s.answer(lead)
		if (s.holder != nil || s.unheld()) && (lead == noLead || answered) {
			return true
		}
		time.AfterFunc(leadTimeout, cancel)
		return false
	}))
}

// clearSurvey is a survey by a caller that will not ask again. If nodes are late, and the
// answers of the others neither show the holder nor show that there is none, it asks again,
// for 60 ms at most: a late node may be free, and a record may be about to be released.
func (d *Driver) clearSurvey(ctx context.Context, c backend.Claim) survey {
	s := d.survey(ctx, c, noLead)
	for pause := minSleep; pause <= 2*leadTimeout && len(s.all) < len(d.nodes) && s.hasQuorum() && s.holder == nil && !s.unheld(); pause *= 2 {
		doze(ctx, pause)
		s = d.survey(ctx, c, noLead)
	}
	return s
}

// Inspect reports the holder of key, whose record a quorum of the nodes has. Status
// has no Since and no waiters, because the record does not contain them. A holder
// that is not a program of hasp has no Owner.
func (d *Driver) Inspect(ctx context.Context, key string) (backend.Status, error) {
	all := d.query(ctx, key, inspectTimeout, func(all []answer) bool {
		s := d.sum(all)
		return s.holder != nil || s.free >= d.quorum()
	})
	s := d.sum(all)
	if err := s.outage(ctx); err != nil {
		return backend.Status{}, err
	}

	var status backend.Status
	if s.holder != nil {
		status = s.holder.Status()
	}

	// A granted fence is on a majority. So one of these answers has it, unless a node
	// has lost its counter.
	for _, f := range all {
		if f.err == nil {
			status.Fence = max(status.Fence, f.Status().Fence)
		}
	}
	return status, nil
}

// votesInFlight returns the channels that are closed when the commands have ended
// that may still write a record of key to node i.
func (d *Driver) votesInFlight(key string, i int) (ends []<-chan struct{}) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, a := range d.attempts {
		// An attempt that has failed, and is remembered for its token only, has no key.
		if a.c.Key == key && a.inFlight != nil {
			ends = append(ends, a.inFlight[i])
		}
	}
	return ends
}

// Break removes whatever is stored under key from all nodes that answer, and
// publishes the release. It returns nil as soon as a quorum has answered.
func (d *Driver) Break(ctx context.Context, key string) error {
	b := newBallot(d.nodes, holdRule)
	// A waiter wakes once for each message. So each Break has a message of its own, as
	// each release has its token.
	message := "broken-" + rand.Text()
	for _, n := range d.nodes {
		if !d.spawn(func() {
			within, cancel := context.WithTimeout(context.Background(), inspectTimeout)
			defer cancel()

			// A vote of this driver that is in flight would arrive after the removal.
			for _, ended := range d.votesInFlight(key, n.i) {
				select {
				case <-ended:
				case <-within.Done():
				}
			}

			_, err := n.store.Run(within, breakScript, redisstore.Call{
				Keys: append([]string{redisstore.LockKey(key)}, queueKeys(key)...),
				Args: []any{redisstore.DerivedKey("channel", key), message},
			})
			if err != nil {
				b.cast(n.i, failed, n.nodeError(err, inspectTimeout))
				return
			}
			b.cast(n.i, yes, nil)
		}) {
			// Some nodes may have removed the key already.
			return errClosed
		}
	}

	select {
	case <-b.done:
	case <-ctx.Done():
		// The nodes that were asked go on, so the key may still become free.
		b.decide(abandoned)
	}
	return b.err()
}
