package redlock

import (
	"cmp"
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

// A node that may have forgotten a vote must not vote again until every lease that it may have
// voted for has ended. So each node has a mark, which names the run of the server (its run_id) and
// the time from which that run votes. A server that was restarted, or has lost its data, gets a new
// mark, and does not vote until the longest term of any caller has passed. The reply to each vote
// has the mark and the run of the server that voted. See docs/redlock.md.
const markKey = "hasp:{redlock}:mark"

const (
	// newSetPause is how long markNewSet waits for another process that may be marking the set.
	newSetPause = 100 * time.Millisecond

	// newSetTTL is how long the marks of a new set may be written after the set was found to be
	// new, by the servers' clocks.
	newSetTTL = 5 * time.Second

	// unknownRun is the run of a server whose INFO names no run.
	unknownRun = "unknown"
)

// identity is the run and the mark of a server.
type identity struct {
	run  string // empty if the server was not asked for it
	mark string // empty if there is none
}

// standing is a node's right to vote, as the node reported it.
type standing struct {
	identity
	i         int       // the index of the node; only markNewSet uses it
	asked     time.Time // just before the node was asked
	answered  int64     // when it answered, by the server's clock in ms
	votesFrom time.Time // when the node may vote, by our clock; zero if at once
}

// marks has what the driver knows of one node's mark.
type marks struct {
	turn       chan struct{} // a mutex whose lock can time out: full while a caller asks the node
	current    atomic.Pointer[standing]
	refreshing atomic.Bool // refreshInBackground has a goroutine under way
}

// voting reports whether the node votes, as far as is known.
func (m *marks) voting() bool {
	s := m.current.Load()
	return s != nil && !time.Now().Before(s.votesFrom)
}

// checkVote returns nil if the node's vote for the attempt a counts, and otherwise the reason. The
// vote was asked for at began, and its reply came with id.
func (n *node) checkVote(ctx context.Context, a *attempt, id identity, began time.Time) error {
	s := n.marks.current.Load()
	_, longest, _ := timesOf(s.mark)
	if s.identity != id || !s.votesFrom.IsZero() && n.d.longestTTL.Load() > longest {
		// The vote came with another run or mark than s has, or this driver has since learned of a
		// longer term, for which the node must wait. Ask the node again before the vote counts.
		var err error
		if s, err = n.refreshMark(ctx, time.Now()); err != nil {
			return err
		}
		switch {
		case s.run != id.run:
			return fmt.Errorf("%s: was restarted, or two servers answer at its address", n.name)
		case s.mark != id.mark:
			// Refuse the vote: the node may have lost the record meanwhile.
			return fmt.Errorf("%s: has another mark than when it voted", n.name)
		}
	}

	// Compare the node's wait with the time when the vote was asked for, because the node may have
	// lost its data again before the reply was read.
	switch {
	case s.votesFrom.IsZero():
	case began.Before(s.votesFrom):
		left := max(time.Until(s.votesFrom), time.Millisecond)
		return fmt.Errorf("%s: was restarted or has lost its data, and does not vote for another %v (max_ttl)", n.name, left.Round(time.Millisecond))
	default:
		n.refreshInBackground(a.c.Timeout) // writes a mark that says that the wait is over
	}
	return nil
}

// refreshInBackground asks for the node's standing on a goroutine of its own, unless
// such a goroutine is already under way.
func (n *node) refreshInBackground(timeout time.Duration) {
	if n.marks.refreshing.Swap(true) {
		return
	}
	n.d.spawn(func() { // does nothing if Close has begun
		defer n.marks.refreshing.Store(false)
		ctx, cancel := context.WithTimeout(context.Background(), timeout)
		defer cancel()
		_, _ = n.refreshMark(ctx, time.Now()) // if this fails, the next use asks again
	})
}

// refreshMark asks for the node's standing and marks the node, unless another caller has asked
// after the time since. One caller asks at a time. Close cancels the call, which takes no key.
func (n *node) refreshMark(ctx context.Context, since time.Time) (*standing, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(n.d.closing, cancel)()
	began := time.Now()
	select {
	case n.marks.turn <- struct{}{}:
		defer func() { <-n.marks.turn }()
	case <-ctx.Done():
		return nil, n.nodeError(ctx.Err(), time.Since(began))
	}

	// Use the answer to another caller that asked while this one waited for its turn.
	if s := n.marks.current.Load(); s != nil && s.asked.After(since) {
		return s, nil
	}

	s := &standing{asked: time.Now()}
	err := n.updateMark(ctx, s)
	n.observe(ctx, s.asked, err)
	if err != nil {
		return nil, n.nodeError(err, time.Since(s.asked))
	}

	// Do both steps under mu, so that if two nodes are one server, the second finds the first.
	n.d.mu.Lock()
	other := n.d.impostor(n, s.run)
	if other == nil {
		n.marks.current.Store(s)
	}
	n.d.mu.Unlock()
	switch {
	case other != nil:
		return nil, sameServerError{n.name, other.name}
	case !n.marks.voting():
		// When the wait is over, write that into the mark, unless Close has begun.
		time.AfterFunc(time.Until(s.votesFrom), func() { n.refreshInBackground(inspectTimeout) })
	}
	return s, nil
}

// updateMark writes the mark that the node has from now on, and completes s. The caller holds
// marks.turn.
func (n *node) updateMark(ctx context.Context, s *standing) error {
	// A wait that is over by our clock is over for every driver, even if the node's clock was ahead
	// when the mark was made.
	waited := ""
	if old := n.marks.current.Load(); old != nil && !old.votesFrom.IsZero() && n.marks.voting() {
		waited = old.mark
	}
	if err := n.writeMark(ctx, s, onlyMarked, 0, waited); err != nil {
		return err
	}
	if s.mark == "" {
		// If the whole set is new, markNewSet gives all nodes marks with which they vote at once. If
		// not, the mark that writeMark gives this node makes it wait.
		n.d.markNewSet(ctx, n)
		return n.writeMark(ctx, s, anyNode, 0, "")
	}
	return nil
}

// timesOf returns the time from which a mark lets its run vote, and the longest term that it
// names, both in ms. ok is false if there is no mark.
func timesOf(mark string) (from, longest int64, ok bool) {
	fields := strings.Fields(mark)
	if len(fields) != 3 {
		return 0, 0, false
	}
	from, err := strconv.ParseInt(fields[1], 10, 64)
	longest, err2 := strconv.ParseInt(fields[2], 10, 64)
	return from, longest, err == nil && err2 == nil
}

// runOfMark returns the run that a mark names, or "" if there is no mark.
func runOfMark(mark string) string {
	run, _, _ := strings.Cut(mark, " ")
	return run
}

// raiseLongestTTL raises d.longestTTL to longest, in ms. The driver learns longer terms from marks.
// A node that has lost its own mark must wait for these terms as well.
func (d *driver) raiseLongestTTL(longest int64) {
	for {
		old := d.longestTTL.Load()
		// If another caller raises it at the same moment, compare again.
		if longest <= old || d.longestTTL.CompareAndSwap(old, longest) {
			return
		}
	}
}

// runOf returns the run of the server that a reply to INFO names. A server other than Redis may
// name no run. Then a restart is noticed only if the server loses its data.
func runOf(info any) string { return cmp.Or(redisstore.InfoField(info, "run_id"), unknownRun) }

// The nodes that writeMark writes to.
const (
	anyNode    = "0"
	onlyMarked = "1" // a node without a mark stays without one
)

// writeMark gives the node a mark, or keeps the mark that it has, and completes s.
// If the node's time is before atOnceUntil, in ms, the run of s votes at once. A
// node that keeps its mark votes at once if that mark equals waited, the mark whose
// wait is over.
func (n *node) writeMark(ctx context.Context, s *standing, which string, atOnceUntil int64, waited string) error {
	durable := "0"
	if n.d.opts.Durable {
		durable = "1"
	}
	// Include the drift in the wait, because the node's clock may run ahead of a holder's.
	n.d.raiseLongestTTL((n.d.opts.MaxTTL + backend.Drift(n.d.opts.MaxTTL) + time.Millisecond - 1).Milliseconds())
	call := redisstore.Call{
		Keys: []string{markKey},
		Args: []string{strconv.FormatInt(n.d.longestTTL.Load(), 10), durable, s.run, strconv.FormatInt(atOnceUntil, 10), waited, which},
	}

	// Try once more than there can be connections: after a restart all earlier connections are
	// dead, although the node answers on new ones. If the script runs twice, the second run keeps
	// the mark.
	for tries := 1; ; tries++ {
		began := time.Now()
		reply, err := n.store.Run(ctx, markScript, call)
		switch {
		case err == nil:
			return n.completeStanding(s, reply)
		case !disconnected(err) || tries > connections || ctx.Err() != nil:
			return err
		}
		n.observe(ctx, began, err)
	}
}

// completeStanding fills in s from a reply of mark.lua.
func (n *node) completeStanding(s *standing, reply any) error {
	// Count the wait from now: it may then be too long by the reply's trip, but never too short.
	now := time.Now()
	parts, _ := reply.([]any)
	if len(parts) != 3 {
		return n.store.Unexpected(reply)
	}
	mark, isMark := parts[0].(string)
	run, _ := parts[1].(string)
	text, _ := parts[2].(string)
	answered, err := strconv.ParseInt(text, 10, 64)
	from, longest, ok := timesOf(mark)
	if !isMark || run == "" || err != nil || answered <= 0 || mark != "" && !ok {
		return n.store.Unexpected(reply)
	}

	s.identity, s.answered, s.votesFrom = identity{run: run, mark: mark}, answered, time.Time{}
	if from > answered {
		s.votesFrom = now.Add(redisstore.Term(from - answered + 1))
	}
	n.d.raiseLongestTTL(longest)
	return nil
}

// markNewSet marks all nodes that answer, if the set is new: a majority of its nodes answers, none
// of them with a mark. If n has no mark, but the set does not look new, markNewSet asks once more
// after a pause, because another process may be marking the set.
func (d *driver) markNewSet(ctx context.Context, n *node) {
	select {
	case d.markTurn <- struct{}{}:
		defer func() { <-d.markTurn }()
	case <-ctx.Done():
		return
	}

	// Do not let Close cancel this, because a set with some marked nodes no longer looks new. Leave
	// a third of the time to the call that marks n itself.
	end, _ := ctx.Deadline()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Until(end)*2/3)
	defer cancel()

	for first := true; ; first = false {
		// A node counts as silent if it answers with an error, or not within half of the time that
		// is left. Its element stays nil.
		end, _ := ctx.Deadline()
		within, stop := context.WithTimeout(ctx, time.Until(end)/2)
		all := make([]*standing, len(d.nodes))
		marked, unmarked := 0, 0
		gather(within, d, func(n *node) *standing {
			s := &standing{i: n.i}
			if n.writeMark(within, s, onlyMarked, 0, "") != nil {
				return nil
			}
			return s
		}, func(some []*standing) time.Duration {
			switch s := some[len(some)-1]; {
			case s == nil:
			case s.mark == "":
				all[s.i] = s
				unmarked++
			default:
				marked++
			}
			return forever
		})
		stop()

		// If n does not answer, no mark can be written. If n has a mark by now,
		// another process has marked the set.
		if all[n.i] == nil {
			return
		}
		// A majority of nodes, all with marks, has voted for each live lock. So if a majority
		// answers without any mark, there is no live lock, or some of the lock's voters have lost
		// their data.
		if unmarked >= d.quorum() && marked == 0 {
			gather(ctx, d, func(n *node) error {
				if s := all[n.i]; s != nil {
					_ = n.writeMark(ctx, s, anyNode, s.answered+newSetTTL.Milliseconds(), "") // updateMark asks again
				}
				return nil
			}, func([]error) time.Duration { return forever })
			return
		}
		// If some node still has a mark after the pause, or too few answer, the set
		// is not new.
		if !first {
			return
		}

		doze(ctx, newSetPause)
		if ctx.Err() != nil {
			return
		}
	}
}

// impostor returns another node that is known to have that run, or whose mark names that run. If
// there is one, n's address leads to the server of that node, and its answers must not count for n.
func (d *driver) impostor(n *node, run string) *node {
	if d.opts.AllowUnsafeNodes || run == "" || run == unknownRun {
		return nil
	}
	for _, other := range d.nodes {
		if s := other.marks.current.Load(); other != n && s != nil && (s.run == run || runOfMark(s.mark) == run) {
			return other
		}
	}
	return nil
}

// sameServerError reports that two nodes are one server.
type sameServerError struct{ one, other string }

func (e sameServerError) Error() string {
	return fmt.Sprintf("%s: is the same server as %s, and would vote twice: name it once"+unsafeHint, e.one, e.other)
}
