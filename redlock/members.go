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

// forever is a limit for gather, which then waits until all nodes have answered or ctx is done.
const forever = time.Duration(math.MaxInt64)

// noLead in place of a lead means that all nodes are asked at once.
const noLead = -1

var errClosed = errors.New("redlock: driver is closed")

// members are the nodes, and what this driver knows about all of them together.
type members struct {
	nodes  []*node
	names  []string
	unsafe bool   // one server may be several nodes
	evict  string // "1" if a node may evict keys

	suspended func() time.Duration // how long the host has slept, or less
	slept     atomic.Int64         // the largest result of suspended so far

	longestTTL atomic.Int64  // the longest term of any caller, with drift, in ms, as far as is known
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

	// Include the drift in the wait, because a node's clock may run faster than a holder's.
	m.raiseLongestTTL((o.MaxTTL + backend.Drift(o.MaxTTL) + time.Millisecond - 1).Milliseconds())
	for i, s := range stores {
		name := s.Name()
		if names[i] == "" {
			name = fmt.Sprintf("node %d", i+1)
		}
		m.names = append(m.names, name)
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
	// A process that is stopped during the call of suspended gets too small a result.
	slept := raise(&m.slept, int64(m.suspended()))
	return time.Now().Add(time.Duration(slept))
}

// raiseLongestTTL raises m.longestTTL to at least the given term in ms. The driver learns longer
// terms from marks. A node that has lost its own mark must wait for these terms too.
func (m *members) raiseLongestTTL(longest int64) { raise(&m.longestTTL, longest) }

// raise raises a value to at least the given one, and returns the result.
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

// patience returns how long a caller waits for the slowest node.
func (m *members) patience() (most time.Duration) {
	for _, n := range m.nodes {
		most = max(most, n.patience())
	}
	return most
}

// leader returns the node that contended attempts ask first. It is the first node in order that
// votes, is healthy, and is not much slower than the fastest node. Clients with different leads may
// split the votes, and their waiters stand in different queues.
func (m *members) leader() int {
	fastest := forever
	for _, n := range m.nodes {
		if trip := n.trip(); trip > 0 {
			fastest = min(fastest, trip)
		}
	}

	// The margin keeps the lead the same while latencies vary, so that clients agree on it.
	for i, n := range m.nodes {
		trip := n.trip()
		if trip > 0 && trip/4 <= fastest+time.Millisecond/2 && n.votes() {
			return i
		}
	}

	return noLead
}

// gather asks all nodes at once. For each answer, it runs the function that ask has returned, and
// then waits for other nodes at most the duration that this function returns. It also stops when
// ctx is done. The calls to late nodes continue. The caller must count as work (see begin).
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
			switch patience := answered(); {
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

// poll asks all nodes at once about a hold, and returns the error that follows from the votes. If
// the argument all is true, it waits for the answers of all nodes. The caller must count as work
// (see begin). If ctx ends, the calls continue.
func (m *members) poll(ctx context.Context, all bool, ask func(n *node) error) error {
	b := newBallot(m.names, false)
	m.gather(ctx, func(n *node) func() time.Duration {
		b.cast(n.i, ask(n))
		return func() time.Duration {
			if all || b.result() == errPending {
				return forever
			}
			return 0
		}
	})

	b.decide(errAbandoned) // does nothing if there is a verdict
	return b.err()
}

// query asks all nodes about keys, and returns a survey of each key. After each answer, the
// function more returns how long to wait for other nodes, as in gather. The surveys leave out the records
// for which the function skip returns true. Skip may be nil.
func (m *members) query(
	ctx context.Context, keys []string, timeout time.Duration, skip func(record string) bool,
	more func(all []*survey) time.Duration,
) []*survey {
	all := make([]*survey, len(keys))
	calls := make([]redisstore.Call, len(keys))
	for i, key := range keys {
		all[i] = newSurvey(len(m.nodes))
		calls[i].Keys = []string{redisstore.LockKey(key), redisstore.DerivedKey("fence", key)}
	}
	if !m.begin() {
		for _, s := range all {
			s.errs[0] = errClosed
		}
		return all
	}

	defer m.work.Done()

	m.gather(ctx, func(n *node) func() time.Duration {
		found, err := n.report(calls, timeout)
		return func() time.Duration {
			for i, s := range all {
				f := found[i]
				if err == nil && skip != nil {
					f = f.Without(skip)
				}
				s.add(n.i, &f, err)
			}

			return more(all)
		}
	})

	return all
}

// markNewSet marks all nodes that answer, if the set is new. A set is new if a majority of its
// nodes answers, and none of these nodes has a mark. If the set does not look new, but n has no
// mark, markNewSet asks once more after a pause, because another process may be marking the set.
func (m *members) markNewSet(ctx context.Context, n *node) {
	m.newSet <- struct{}{}
	defer func() { <-m.newSet }()

	// Do not let Close cancel the calls, because a set with some marked nodes no longer looks new.
	// Leave a third of the time to the caller's own call, which marks n.
	end, _ := ctx.Deadline()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Until(end)*2/3)
	defer cancel()

	all, isNew := m.unmarked(ctx)
	if all[n.i] != nil && !isNew {
		doze(ctx, newSetPause)
		all, isNew = m.unmarked(ctx)
	}

	// If n has not answered, it cannot be marked. If it has a mark, another process has marked the
	// set.
	if all[n.i] == nil || !isNew {
		return
	}
	m.gather(ctx, func(n *node) func() time.Duration {
		if s := all[n.i]; s != nil {
			// updateMark asks again, so ignore the error.
			_ = n.writeMark(ctx, s, anyNode, s.answered+newSetTTL.Milliseconds())
		}
		return func() time.Duration { return forever }
	})
}

// unmarked returns a standing for each node that has no mark, and whether the set is new. The
// standing of a node is nil if the node has a mark, returns an error, or does not answer within
// half of the time that is left.
//
// A majority of nodes, which all had marks, has voted for each holder. Suppose that a majority
// answers, and no node that answers has a mark. Then no key is held, or some of the nodes that voted
// for a holder have lost their data.
func (m *members) unmarked(ctx context.Context) (all []*standing, isNew bool) {
	end, _ := ctx.Deadline()
	ctx, cancel := context.WithTimeout(ctx, time.Until(end)/2)
	defer cancel()

	count, marked := 0, 0
	all = make([]*standing, len(m.nodes))
	m.gather(ctx, func(n *node) func() time.Duration {
		s := &standing{}
		err := n.writeMark(ctx, s, onlyMarked, 0)
		return func() time.Duration {
			switch {
			case err != nil:
			case s.mark == "":
				all[n.i] = s
				count++
			default:
				marked++
			}

			return forever
		}
	})

	return all, count >= m.quorum() && marked == 0
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

	// close cancels m.closing while it holds mu, and then waits for m.work. So m.work never grows
	// from zero during that wait.
	if m.closing.Err() != nil {
		return false
	}
	m.work.Add(1)
	return true
}

// close waits at most closeTimeout for the work, and then closes the connections.
func (m *members) close() error {
	m.mu.Lock()
	m.beginClose() // after this, only goroutines that m.work counts add to m.work
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
