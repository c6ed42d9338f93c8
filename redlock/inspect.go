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

// inspectTimeout limits a call to a node if no claim sets the Timeout, as in Inspect and Break.
const inspectTimeout = 3 * time.Second

// forever is a limit for gather, which then waits until all nodes have answered or ctx is done.
const forever = time.Duration(math.MaxInt64)

// gather asks all nodes at once, and returns their answers. After each answer, it passes all
// answers so far to the function more, and then waits for other nodes at most the duration that the
// function returned. It also stops when ctx is done. The caller must count as work (see beginWork).
func gather[T any](ctx context.Context, d *driver, ask func(n *node) T, more func(all []T) time.Duration) (all []T) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// The channel has room for all answers, because gather may return before the last one comes.
	answers := make(chan T, len(d.nodes))
	for _, n := range d.nodes {
		d.work.Go(func() { answers <- ask(n) })
	}
	for range d.nodes {
		select {
		case a := <-answers:
			all = append(all, a)
			switch patience := more(all); {
			case patience <= 0:
				return all
			case patience < forever:
				time.AfterFunc(patience, cancel)
			}
		case <-ctx.Done():
			return all
		}
	}
	return all
}

// report says what one node stores under the keys of a query.
type report struct {
	i     int // the index of the node
	found []redisstore.Found
	err   error
}

// query asks all nodes about keys. The wait is limited by ctx and the function more, as in gather.
// The argument args contains the arguments of inspect.lua.
func (d *driver) query(ctx context.Context, keys []string, timeout time.Duration, more func([]report) time.Duration, args ...string) []report {
	if !d.beginWork() {
		return []report{{err: errClosed}}
	}
	defer d.work.Done()
	calls := make([]redisstore.Call, len(keys))
	for i, key := range keys {
		calls[i] = redisstore.Call{Keys: []string{redisstore.LockKey(key), redisstore.DerivedKey("fence", key)}, Args: args}
	}
	return gather(ctx, d, func(n *node) report { return n.report(calls, timeout) }, more)
}

// report runs inspect.lua on the node, once for each element of calls.
func (n *node) report(calls []redisstore.Call, timeout time.Duration) report {
	r := report{i: n.i}
	if r.err = n.admit(); r.err != nil {
		return r
	}

	// Do not end the calls with a caller's context, because the outcome also shows whether the node
	// answers.
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
		r.err = n.nodeError(r.err, timeout)
	}
	return r
}

// survey is the sum of the nodes' reports about a key.
type survey struct {
	d       *driver
	reader  bool                // the claim is shared, so shared records are not in its way
	on      []*redisstore.Found // by node; nil if the node has not answered, or has returned an error
	errs    []error             // by node
	reports int                 // how many nodes have answered or returned an error
	holder  *redisstore.Found   // the record that a quorum has, with the rest of its term on the quorum; or nil
	taken   []redisstore.Found  // the records of all nodes that have one
	free    int                 // how many nodes have no record
}

// sum returns the survey of the reports about one key. The argument key is the index of that key. It
// leaves out the records for which the function skip returns true. Skip may be nil.
func (d *driver) sum(all []report, key int, reader bool, skip func(record string) bool) survey {
	s := survey{d: d, reader: reader, reports: len(all), on: make([]*redisstore.Found, len(d.nodes)), errs: make([]error, len(d.nodes))}
	byRecord := map[string][]redisstore.Found{}
	for _, r := range all {
		if s.errs[r.i] = r.err; r.err != nil {
			continue
		}
		f := r.found[key]
		if skip != nil {
			f = f.Without(skip)
		}
		s.on[r.i] = &f
		if f.Free() {
			s.free++
			continue
		}
		s.taken = append(s.taken, f)
		for _, record := range records(f) {
			byRecord[record] = append(byRecord[record], f)
		}
	}

	// A record loses its quorum when so many copies have expired that too few are left.
	var members []string // members of shared records that a quorum has
	for record, fs := range byRecord {
		switch {
		case len(fs) < d.quorum():
		case fs[0].Shared():
			members = append(members, record)
		default:
			slices.SortFunc(fs, longestFirst)
			s.holder = &fs[d.quorum()-1]
		}
	}
	if len(members) > 0 {
		// A writer can take a node when the last member there has expired. So the readers have the
		// quorum until too few nodes have a member.
		fs := slices.DeleteFunc(slices.Clone(s.taken), func(f redisstore.Found) bool { return !f.Shared() })
		slices.SortFunc(fs, longestFirst)
		slices.Sort(members)
		holder := fs[d.quorum()-1]
		holder.Members = members[:min(len(members), maxShared)]
		s.holder = &holder
	}
	return s
}

// maxShared is the largest number of shared holders that a status names.
const maxShared = 1000

func longestFirst(a, b redisstore.Found) int { return -cmp.Compare(remaining(a), remaining(b)) }

// records returns the records on a node: the members of a shared record, or the node's only record.
func records(f redisstore.Found) []string {
	if f.Shared() {
		return f.Members
	}
	return []string{f.Record}
}

// shared reports whether node i has a shared record.
func (s survey) shared(i int) bool {
	return i != noLead && s.on[i] != nil && s.on[i].Shared()
}

// joins reports whether the caller could take the key on a node that reported f, because both the
// caller and the holders there are readers.
func (s survey) joins(f redisstore.Found) bool { return s.reader && f.Shared() }

// open returns how many nodes have no record that is in the caller's way.
func (s survey) open() int {
	n := s.free
	for _, f := range s.taken {
		if s.joins(f) {
			n++
		}
	}
	return n
}

// remaining returns how long a record will last.
func remaining(f redisstore.Found) time.Duration {
	if ttl := f.Status().TTL; ttl >= 0 {
		return ttl
	}
	return math.MaxInt64 // the record has no end
}

// hasQuorum reports whether a quorum has answered.
func (s survey) hasQuorum() bool { return len(s.taken)+s.free >= s.d.quorum() }

// silent returns how many nodes have not answered, or have answered with an error.
func (s survey) silent() int { return len(s.d.nodes) - len(s.taken) - s.free }

// outage returns nil if a quorum has answered, and otherwise the error for a missing quorum. If ctx
// has ended, and no node has returned an error, it returns ctx's error.
func (s survey) outage(ctx context.Context) error {
	if s.hasQuorum() {
		return nil
	}
	failed := slices.ContainsFunc(s.errs, func(err error) bool { return err != nil })
	if err := ctx.Err(); err != nil && !failed {
		return err
	}
	return outage(s.errs)
}

// record returns the record on node i, and the largest number of nodes that may have this record.
// For a shared record it returns "" and 0, because the members differ from node to node.
func (s survey) record(i int) (record string, most int) {
	if i == noLead || s.on[i] == nil || s.on[i].Free() || s.on[i].Shared() {
		return "", 0
	}
	most = s.silent()
	for _, other := range s.taken {
		if other.Record == s.on[i].Record {
			most++
		}
	}
	return s.on[i].Record, most
}

// unheld reports whether the key surely has no holder in the caller's way, because no record in the
// caller's way can have a quorum, whatever records the silent nodes have.
func (s survey) unheld() bool {
	if s.open() >= s.d.quorum() {
		return true
	}

	most, count := 0, map[string]int{} // count maps records in the caller's way to numbers of nodes
	for _, f := range s.taken {
		if s.joins(f) {
			continue
		}
		for _, r := range records(f) {
			count[r]++
			most = max(most, count[r])
		}
	}

	// Assume that all silent nodes have the most frequent record.
	return most+s.silent() < s.d.quorum()
}

// heldError returns the error for a key that the survey s shows as held. If the survey shows no
// holder, RetryAfter is the time until a quorum of nodes has no record.
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

// survey asks the nodes about c.Key, until their answers show whether there is a holder. After a
// quorum has answered, survey waits at most the time leadTimeout for the lead, and for answers that
// decide this. So a hanging node delays callers only that long.
func (d *driver) survey(ctx context.Context, c backend.Claim, lead int) survey {
	// All attempts of c have failed, so their records are about to be released.
	sum := func(all []report) survey {
		return d.sum(all, 0, c.Shared, func(record string) bool { return isOf(record, c.Token) })
	}
	return sum(d.query(ctx, []string{c.Key}, c.Timeout, func(all []report) time.Duration {
		s := sum(all)
		switch {
		case !s.hasQuorum():
			return forever
		case (s.holder != nil || s.unheld()) && (lead == noLead || s.on[lead] != nil || s.errs[lead] != nil):
			return 0
		}
		return leadTimeout
	}))
}

// clearSurvey is like survey, but for a caller that will not ask again. While late nodes may decide
// whether there is a holder, it asks all nodes again, because a late node may be free, or a record
// may be about to be released. It gives up after 160 ms, or later if nodes are slow.
func (d *driver) clearSurvey(ctx context.Context, c backend.Claim) survey {
	s, end := d.survey(ctx, c, noLead), time.Now().Add(max(8*leadTimeout, 4*d.patience()))
	for pause := minSleep; s.reports < len(d.nodes) && s.hasQuorum() && s.holder == nil && !s.unheld(); pause = min(2*pause, leadTimeout) {
		if time.Now().After(end) || ctx.Err() != nil {
			break
		}
		doze(ctx, pause)
		s = d.survey(ctx, c, noLead)
	}
	return s
}

// Inspect reports the holder of key, whose record a quorum of the nodes stores. The Status has no
// Since and no Waiters, because records do not contain these values. If the holder does not use
// hasp, the Status has no Owner.
func (d *driver) Inspect(ctx context.Context, key string) (backend.Status, error) {
	s := d.sum(d.query(ctx, []string{key}, inspectTimeout, func(all []report) time.Duration {
		switch s := d.sum(all, 0, false, nil); {
		case s.holder != nil && s.holder.Shared():
			return leadTimeout // a late node may show that more readers have a quorum
		case s.holder != nil || s.free >= d.quorum():
			return 0
		}
		return forever
	}), 0, false, nil)
	if err := s.outage(ctx); err != nil {
		return backend.Status{}, err
	}
	return s.status(), nil
}

// status returns the status of the key.
func (s survey) status() (st backend.Status) {
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

// Break removes whatever is stored under key from all nodes that answer, and publishes the release.
// It waits for all nodes: a removal that arrived later could remove the next holder's record. If a
// node does not answer within inspectTimeout, Break returns nil if a quorum has answered.
func (d *driver) Break(ctx context.Context, key string) error {
	if !d.beginWork() {
		return errClosed
	}
	defer d.work.Done()

	// Collect the attempts whose votes could arrive after the removal, which waits for these votes.
	var voting []*attempt
	d.mu.Lock()
	for _, a := range d.attempts {
		if a.c.Key == key {
			voting = append(voting, a)
		}
	}
	d.mu.Unlock()

	// If ctx ends, the calls continue, so the key may still become free.
	return d.poll(ctx, allNodes, func(n *node) (vote, error) {
		for _, a := range voting {
			<-d.settled(a, n.i)
		}
		within, cancel := context.WithTimeout(context.Background(), inspectTimeout)
		defer cancel()

		_, err := n.store.Run(within, breakScript, redisstore.Call{
			Keys: append([]string{redisstore.LockKey(key)}, queueKeys(key)...),
			Args: []string{redisstore.DerivedKey("channel", key), "broken"},
		})
		if err != nil {
			return failed, n.nodeError(err, inspectTimeout)
		}
		return yes, nil
	})
}
