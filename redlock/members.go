package redlock

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/clock"
	"github.com/hasplock/hasp/internal/redisstore"
)

// closeTimeout is the longest time that Close waits for calls in flight, and for the releases of
// the records that these calls leave on nodes.
const closeTimeout = 3 * time.Second

// forever tells gather to wait until all nodes have answered or ctx is done.
const forever = time.Duration(math.MaxInt64)

// noLead in place of a lead means that all nodes are asked at once.
const noLead = -1

var errClosed = errors.New("redlock: driver is closed")

// members are the nodes, and what this driver knows about all of them together.
type members struct {
	nodes  []*node
	unsafe bool   // one server may be several nodes
	evict  string // "1" if a node may evict keys

	suspended func() time.Duration // how long the host has slept, or less
	slept     atomic.Int64         // the largest result of suspended so far

	longestTTL atomic.Int64  // the longest term of any caller in ms, plus its drift, as far as is known
	newSet     chan struct{} // a mutex; full while a caller marks a new set

	work       sync.WaitGroup     // goroutines and calls that close waits for
	closing    context.Context    // done when close begins; no work begins after that
	beginClose context.CancelFunc // cancels the context closing

	mu sync.Mutex // held when work begins, and when a node is compared with the others
}

// newMembers returns the members for stores. The argument names contains the address of each node,
// or "" if the address is not known.
func newMembers(stores []*redisstore.Store, names []string, o *Options) *members {
	m := &members{unsafe: o.AllowUnsafeNodes, suspended: clock.Suspended}
	m.newSet = make(chan struct{}, 1)
	m.closing, m.beginClose = context.WithCancel(context.Background())

	// A node that has lost its data does not vote for the longest TTL. Add the drift to it, because
	// the node's clock may run faster than a holder's. Round up to whole ms.
	m.raiseLongestTTL((o.MaxTTL + backend.Drift(o.MaxTTL) + time.Millisecond - 1).Milliseconds())
	for i, s := range stores {
		name := s.Name() // contains the address
		if names[i] == "" {
			name = fmt.Sprintf("node %d", i+1)
		}
		n := &node{m: m, i: i, store: s, name: name, turn: make(chan struct{}, 1)}
		m.nodes = append(m.nodes, n)
	}

	return m
}

// quorum is the smallest majority of the nodes.
func (m *members) quorum() int { return len(m.nodes)/2 + 1 }

// now returns the time on a clock that also counts while the host is suspended, because records on
// the nodes expire meanwhile.
func (m *members) now() time.Time {
	// Use the largest result so far, because the result is too small if the process is stopped
	// during the call of suspended.
	slept := raise(&m.slept, int64(m.suspended()))
	return time.Now().Add(time.Duration(slept))
}

// raiseLongestTTL raises m.longestTTL to at least the given term in ms. The driver learns longer
// terms from the nodes' marks. It must remember them, because a node that loses its own mark must
// not vote for these terms either.
func (m *members) raiseLongestTTL(longest int64) { raise(&m.longestTTL, longest) }

// raise raises a value to at least the minimum least, and returns the new value.
func raise(value *atomic.Int64, least int64) int64 {
	for {
		old := value.Load()
		if least <= old {
			return old
		}

		// If another caller raises the value at the same moment, compare again.
		if value.CompareAndSwap(old, least) {
			return least
		}
	}
}

// patience returns how long a caller waits for all nodes before going on without the slow ones.
func (m *members) patience() (longest time.Duration) {
	for _, n := range m.nodes {
		longest = max(longest, n.patience())
	}
	return longest
}

// leader returns the index of the node that contended attempts ask first, or noLead if no node is
// fit. It is the first node in order that votes, is healthy, and is not much slower than the
// fastest node. Clients should agree on the lead: those with different leads may split the votes,
// and their waiters stand in different queues.
func (m *members) leader() int {
	fastest := forever
	for _, n := range m.nodes {
		if trip := n.trip(); trip > 0 { // 0 means that the node is not known to be healthy
			fastest = min(fastest, trip)
		}
	}

	// Allow four times the fastest latency and 2 ms more. This margin keeps the lead the same while
	// latencies vary, so that clients agree on it.
	for i, n := range m.nodes {
		trip := n.trip()
		if trip > 0 && trip/4 <= fastest+time.Millisecond/2 && n.votes() {
			return i
		}
	}

	return noLead
}

// gather asks all nodes at once, each on a goroutine of its own. The function ask makes the call to
// one node, and returns a function that handles the answer. gather runs these functions one after
// another, on the caller's goroutine. Each returns how long gather waits for other nodes from now
// on: not at all if it is 0, and without a limit if it is forever. An earlier limit stays valid.
// gather also stops when ctx is done. The calls to late nodes continue. The caller must count as
// work (see begin).
func (m *members) gather(ctx context.Context, ask func(n *node) (answered func() time.Duration)) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()

	// The channel has room for all answers, because gather may return before the last one comes.
	answers := make(chan func() time.Duration, len(m.nodes))
	for _, n := range m.nodes {
		m.work.Go(func() { answers <- ask(n) })
	}
	for range m.nodes {
		select {
		case answered := <-answers:
			patience := answered()
			switch {
			case patience <= 0:
				return
			case patience < forever:
				time.AfterFunc(patience, cancel)
			}
		case <-ctx.Done():
			return
		}
	}
}

// poll asks all nodes at once about a hold, and returns the error that follows from the votes (see
// ballot.err). The function ask returns the vote of one node. poll waits until the votes decide the
// ballot or, if the argument all is true, until all nodes have answered. The caller must count as
// work (see begin). If ctx ends, the calls continue.
func (m *members) poll(ctx context.Context, all bool, ask func(n *node) error) error {
	b := newBallot(m.nodes, false)
	m.gather(ctx, func(n *node) func() time.Duration {
		b.cast(n.i, ask(n))
		return func() time.Duration {
			if all || b.result() == errPending {
				return forever
			}
			return 0
		}
	})

	b.decide(errAbandoned) // for the end of ctx; does nothing if there is a verdict
	return b.err()
}

// query asks all nodes about keys, and returns a survey of each key, in the order of keys. A call
// to a node takes at most the duration timeout. After each answer, the function wait looks at the
// surveys so far, and returns how long to wait for other nodes, as in gather. The surveys leave out
// the records for which the function skip returns true. Skip may be nil.
func (m *members) query(
	ctx context.Context, keys []string, timeout time.Duration, skip func(record string) bool,
	wait func(surveys []*survey) time.Duration,
) []*survey {
	surveys := make([]*survey, len(keys))
	calls := make([]redisstore.Call, len(keys))
	for i, key := range keys {
		surveys[i] = newSurvey(len(m.nodes))
		calls[i].Keys = []string{redisstore.LockKey(key), redisstore.DerivedKey("fence", key)}
	}
	if !m.begin() {
		for _, s := range surveys {
			s.errs[0] = errClosed // so that the method outage of s returns this error
		}
		return surveys
	}

	defer m.work.Done()

	m.gather(ctx, func(n *node) func() time.Duration {
		found, err := n.report(calls, timeout)
		return func() time.Duration {
			for i, s := range surveys {
				f := found[i]
				if err == nil && skip != nil {
					f = f.Without(skip)
				}
				s.add(n.i, &f, err)
			}

			return wait(surveys)
		}
	})

	return surveys
}

// markNewSet marks all nodes that answer, if the set is new, so that they vote at once. A set is
// new if a majority of its nodes answers, and none of the nodes that answer has a mark. If the set
// does not look new, but n has no mark, markNewSet asks once more after a pause, because another
// process may be marking the set. The context ctx must have a deadline.
func (m *members) markNewSet(ctx context.Context, n *node) {
	m.newSet <- struct{}{}
	defer func() { <-m.newSet }()

	// Do not let Close cancel the calls, because a set with some marked nodes no longer looks new.
	// Leave a third of the time to the caller's own call, which marks n.
	end, _ := ctx.Deadline()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Until(end)*2/3)
	defer cancel()

	unmarked, isNew := m.unmarked(ctx)
	if unmarked[n.i] != nil && !isNew {
		doze(ctx, newSetPause)
		unmarked, isNew = m.unmarked(ctx)
	}

	// If n is not among the nodes without a mark, there is nothing to do for it: it has not
	// answered, or another process has marked the set.
	if unmarked[n.i] == nil || !isNew {
		return
	}
	m.gather(ctx, func(n *node) func() time.Duration {
		if s := unmarked[n.i]; s != nil {
			// Ignore the error, because the next use of the node updates its mark.
			_ = n.writeMark(ctx, s, anyNode, s.answered+newSetTTL.Milliseconds())
		}
		return func() time.Duration { return forever }
	})
}

// unmarked returns a standing for each node that has no mark, and whether the set is new. The
// standing of a node is nil if the node has a mark, returns an error, or does not answer within
// half of the time that is left before the deadline of ctx.
//
// The set counts as new if a majority answers, and no node that answers has a mark. This is safe:
// if a key had a holder, a majority with marks would have voted for it. Each of these nodes would
// now be silent or without its data, and no hold needs to survive the loss of a majority.
func (m *members) unmarked(ctx context.Context) (standings []*standing, isNew bool) {
	end, _ := ctx.Deadline()
	ctx, cancel := context.WithTimeout(ctx, time.Until(end)/2)
	defer cancel()

	count, marked := 0, 0
	standings = make([]*standing, len(m.nodes))
	m.gather(ctx, func(n *node) func() time.Duration {
		s := &standing{}
		err := n.writeMark(ctx, s, onlyMarked, 0)
		return func() time.Duration {
			switch {
			case err != nil: // the node counts as silent
			case s.mark == "":
				standings[n.i] = s
				count++
			default:
				marked++
			}

			return forever
		}
	})

	return standings, count >= m.quorum() && marked == 0
}

// spawn runs f on a goroutine that close waits for. It returns false, and does not run f, if close
// has begun.
func (m *members) spawn(f func()) bool {
	if !m.begin() {
		return false
	}
	defer m.work.Done()
	m.work.Go(f)
	return true
}

// begin counts the caller as work that close waits for. It returns false if close has begun.
func (m *members) begin() bool {
	m.mu.Lock()
	defer m.mu.Unlock()

	// Hold mu for both steps. close cancels m.closing under mu before it waits for m.work. So no
	// caller adds to m.work once close waits.
	if m.closing.Err() != nil {
		return false
	}
	m.work.Add(1)
	return true
}

// close waits at most closeTimeout for the work, and then closes the connections.
func (m *members) close() error {
	m.mu.Lock()
	m.beginClose() // after this, only goroutines that m.work already counts add to m.work
	m.mu.Unlock()

	done := make(chan struct{})
	go func() {
		m.work.Wait()
		close(done)
	}()

	// If a call does not end in time, the goroutine above ends only when that call ends.
	select {
	case <-done:
	case <-time.After(closeTimeout):
	}

	// Close the connections last, because the releases need them.
	var err error
	for _, n := range m.nodes {
		err = errors.Join(err, n.store.Close())
	}
	return err
}

// doze returns after the duration pause, or as soon as ctx is done.
func doze(ctx context.Context, pause time.Duration) {
	select {
	case <-time.After(pause):
	case <-ctx.Done():
	}
}
