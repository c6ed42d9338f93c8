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

// inspectTimeout bounds a call to a node if there is no claim, as for Inspect and Break.
const inspectTimeout = 3 * time.Second

// forever makes gather wait until all nodes have answered or ctx is done.
const forever = time.Duration(math.MaxInt64)

// gather asks all nodes at once, and returns their answers. After each answer it calls the function
// more, which returns the longest time to wait for the other nodes. gather also stops waiting when
// ctx is done. The caller must count as work: see beginWork.
func gather[T any](ctx context.Context, d *driver, ask func(n *node) T, more func(all []T) time.Duration) (all []T) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// Have room for all answers, because gather may return before the last one.
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

// report is what one node stores under some keys.
type report struct {
	i     int // the index of the node
	found []redisstore.Found
	err   error
}

// query asks all nodes about some keys. It waits as long as the function more says: see gather.
func (d *driver) query(ctx context.Context, keys []string, timeout time.Duration, more func([]report) time.Duration) []report {
	if !d.beginWork() {
		return []report{{err: errClosed}}
	}
	defer d.work.Done()
	calls := make([]redisstore.Call, len(keys))
	for i, key := range keys {
		calls[i] = redisstore.Call{Keys: []string{redisstore.LockKey(key), redisstore.DerivedKey("fence", key)}}
	}
	return gather(ctx, d, func(n *node) report { return n.report(calls, timeout) }, more)
}

// report runs inspect.lua on the node, once for each of calls.
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
	on      []*redisstore.Found // by node; nil if the node has not answered, or only with an error
	errs    []error             // by node
	reports int                 // how many nodes have answered, or failed
	holder  *redisstore.Found   // the record of a quorum, with what is left of the quorum's term; or nil
	taken   []redisstore.Found  // the records of all nodes that have one
	free    int                 // nodes without a record
}

// sum returns the survey of what the nodes report about the key with that index.
func (d *driver) sum(all []report, key int, reader bool) survey {
	s := survey{d: d, reader: reader, reports: len(all), on: make([]*redisstore.Found, len(d.nodes)), errs: make([]error, len(d.nodes))}
	byRecord := map[string][]redisstore.Found{}
	for _, r := range all {
		if s.errs[r.i] = r.err; r.err != nil {
			continue
		}
		f := r.found[key]
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

	// A record has a quorum until the copies that have not expired are too few.
	var members []string // of a shared record, on a quorum
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
		// A writer can take a node when the last member there has expired. So the quorum lasts
		// until too few nodes have a member.
		fs := slices.DeleteFunc(slices.Clone(s.taken), func(f redisstore.Found) bool { return !f.Shared() })
		slices.SortFunc(fs, longestFirst)
		slices.Sort(members)
		holder := fs[d.quorum()-1]
		holder.Members = members[:min(len(members), maxShared)]
		s.holder = &holder
	}
	return s
}

// maxShared is the most shared holders that a status names.
const maxShared = 1000

func longestFirst(a, b redisstore.Found) int { return -cmp.Compare(remaining(a), remaining(b)) }

// records returns the records on a node: the members of a shared record, or its one record.
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

// joins reports whether the caller could take the key on a node that has f: the caller is a reader,
// and so are the holders there.
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
	return math.MaxInt64 // it has no end
}

// hasQuorum reports whether a quorum has answered.
func (s survey) hasQuorum() bool { return len(s.taken)+s.free >= s.d.quorum() }

// silent returns how many nodes have not answered, or have answered with an error.
func (s survey) silent() int { return len(s.d.nodes) - len(s.taken) - s.free }

// outage returns nil if a quorum has answered, and otherwise the outage. If ctx
// ended before any error, it returns ctx's error.
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

// record returns the record on node i, and the largest number of nodes that may have it.
// It returns "" and 0 for a shared record, because its members differ from node to node.
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

// unheld reports whether the key has no holder in the caller's way: no record can have a quorum,
// whatever the silent nodes have.
func (s survey) unheld() bool {
	if s.open() >= s.d.quorum() {
		return true
	}

	most, count := 0, map[string]int{} // how many nodes have each record in the caller's way
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

// heldError returns the error for a key that s shows as held. The key is free again when a quorum
// of nodes has no record.
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

// survey asks the nodes about c's key, until the answers show the holder, or show that there is
// none. After a quorum has answered, it waits up to leadTimeout for the lead and for answers that
// decide whether there is a holder. It does not wait longer, so that a node that hangs does not
// delay callers.
func (d *driver) survey(ctx context.Context, c backend.Claim, lead int) survey {
	return d.sum(d.query(ctx, []string{c.Key}, c.Timeout, func(all []report) time.Duration {
		s := d.sum(all, 0, c.Shared)
		switch {
		case !s.hasQuorum():
			return forever
		case (s.holder != nil || s.unheld()) && (lead == noLead || s.on[lead] != nil || s.errs[lead] != nil):
			return 0
		}
		return leadTimeout
	}), 0, c.Shared)
}

// clearSurvey is a survey for a caller that will not ask again. While late nodes leave open whether
// there is a holder, it asks again, because a late node may be free, and a record may be about to
// be released. It ends after 160 ms, or later if the nodes are slow.
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

// Inspect reports the holder of key, whose record a quorum of the nodes has. Status
// has no Since and no waiters, because the record does not contain them. If the holder does not use
// hasp, it has no Owner.
func (d *driver) Inspect(ctx context.Context, key string) (backend.Status, error) {
	s := d.sum(d.query(ctx, []string{key}, inspectTimeout, func(all []report) time.Duration {
		switch s := d.sum(all, 0, false); {
		case s.holder != nil && s.holder.Shared():
			return leadTimeout // so that a late node can show more readers with a quorum
		case s.holder != nil || s.free >= d.quorum():
			return 0
		}
		return forever
	}), 0, false)
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

	// Take the largest: a granted fence is on a majority, so one of these nodes has it, unless that
	// node has lost its counter.
	for _, f := range s.on {
		if f != nil {
			st.Fence = max(st.Fence, f.Status().Fence)
		}
	}
	return st
}

// Break removes whatever is stored under key from all nodes that answer, and
// publishes the release. It returns nil as soon as a quorum has answered. A caller that
// takes the key on some nodes before Break has reached the others may lose it again.
func (d *driver) Break(ctx context.Context, key string) error {
	if !d.beginWork() {
		return errClosed
	}
	defer d.work.Done()

	// Wait for this driver's votes in flight, which could arrive after the removal.
	var voting []*attempt
	d.mu.Lock()
	for _, a := range d.attempts {
		if a.c.Key == key {
			voting = append(voting, a)
		}
	}
	d.mu.Unlock()

	// If ctx ends, the calls go on, so the key may still become free.
	return d.poll(ctx, noLead, func(n *node) (vote, error) {
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
