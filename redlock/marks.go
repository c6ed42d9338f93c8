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

// markKey is the key of a node's mark. The mark names the run of the server (its run_id), and the
// time from which that run votes. A server that was restarted or has lost its data may have
// forgotten a vote. So the server receives a new mark, and does not vote until the longest term of
// any caller has passed. At that time, every lease for which it may have voted has ended. Each vote
// comes with the mark and the run of the server that voted. See docs/redlock.md.
const markKey = "hasp:{redlock}:mark"

const (
	// newSetPause is how long markNewSet waits for another process that may be marking the set.
	newSetPause = 100 * time.Millisecond

	// newSetTTL limits, by the servers' clocks, the time between finding that a set is new and
	// writing its marks.
	newSetTTL = 5 * time.Second

	// unknownRun is the run of a server whose INFO names no run.
	unknownRun = "unknown"
)

// identity is the run and the mark of a server.
type identity struct {
	run  string // empty if the server was not asked for it
	mark string // empty if the node has none
}

// standing is a node's right to vote, as the node reported it.
type standing struct {
	identity
	i         int       // the index of the node; only markNewSet uses it
	asked     time.Time // a time just before the node was asked
	answered  int64     // the node's time in ms when it answered
	votesFrom time.Time // when the node may begin to vote, by our clock; zero if it may vote now
}

// marks contains what the driver knows about one node's mark.
type marks struct {
	turn       chan struct{} // a mutex whose lock can time out; full while a caller asks the node
	current    atomic.Pointer[standing]
	refreshing atomic.Bool // a goroutine of refreshInBackground is running
}

// voting reports whether the node votes, as far as the driver knows.
func (m *marks) voting() bool {
	s := m.current.Load()
	return s != nil && !time.Now().Before(s.votesFrom)
}

// checkVote returns nil if the node's vote for the attempt a counts, and otherwise why it does not
// count. The vote was requested at the time began, and the identity id came with the reply.
func (n *node) checkVote(ctx context.Context, a *attempt, id identity, began time.Time) error {
	s := n.marks.current.Load()
	_, longest, _ := timesOf(s.mark)
	if s.identity != id || !s.votesFrom.IsZero() && n.d.longestTTL.Load() > longest {
		// The reply has another run or mark than s, or the node must wait for a longer term, of
		// which this driver has learned after it stored s. Ask the node again.
		var err error
		if s, err = n.refreshMark(ctx, time.Now()); err != nil {
			return err
		}
		switch {
		case s.run != id.run:
			return fmt.Errorf("%s: was restarted, or two servers answer at its address", n.name)
		case s.mark != id.mark:
			// Reject the vote, because the node may have lost the record after it voted.
			return fmt.Errorf("%s: has another mark than when it voted", n.name)
		}
	}

	// Compare votesFrom with the time when the vote was requested, not with the present, because
	// the node may have lost its data again before the reply was read.
	switch {
	case s.votesFrom.IsZero():
	case began.Before(s.votesFrom):
		left := max(time.Until(s.votesFrom), time.Millisecond)
		return fmt.Errorf("%s: was restarted or has lost its data, and does not vote for another %v (max_ttl)", n.name, left.Round(time.Millisecond))
	default:
		n.refreshInBackground(a.c.Timeout) // writes a mark that says that the wait has ended
	}
	return nil
}

// refreshInBackground starts a goroutine that asks for the node's standing, unless such a goroutine
// is already running.
func (n *node) refreshInBackground(timeout time.Duration) {
	if n.marks.refreshing.Swap(true) {
		return
	}
	n.d.spawn(func() { // does nothing if Close has begun
		defer n.marks.refreshing.Store(false)
		ctx, cancel := context.WithTimeout(context.Background(), timeout)
		defer cancel()
		_, _ = n.refreshMark(ctx, time.Now()) // if this fails, the next use of the node asks again
	})
}

// refreshMark asks for the node's standing and marks the node. If another caller has asked after
// the time that the argument since names, refreshMark returns that answer. Only one caller asks at
// a time. Close may cancel the call, because it takes no key.
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

	// Hold d.mu for both steps, so that if two nodes are one server, the second finds the first.
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
		// When the node's wait has ended, update the mark, unless Close has begun.
		time.AfterFunc(time.Until(s.votesFrom), func() { n.refreshInBackground(inspectTimeout) })
	}
	return s, nil
}

// updateMark writes or keeps the node's mark, and completes s. The caller holds n.marks.turn.
func (n *node) updateMark(ctx context.Context, s *standing) error {
	// If the wait has ended by our clock, it has ended for every driver, even if the mark names a
	// later time because the node's clock was ahead when the mark was made.
	waited := ""
	if old := n.marks.current.Load(); old != nil && !old.votesFrom.IsZero() && n.marks.voting() {
		waited = old.mark
	}
	if err := n.writeMark(ctx, s, onlyMarked, 0, waited); err != nil {
		return err
	}
	if s.mark == "" {
		// If the whole set is new, markNewSet gives all nodes marks with which they vote at once.
		// Otherwise, writeMark gives this node a mark that makes it wait.
		n.d.markNewSet(ctx, n)
		return n.writeMark(ctx, s, anyNode, 0, "")
	}
	return nil
}

// timesOf returns the time from which a mark lets its run vote, and the longest term that the mark
// names, both in ms. The result ok is false if there is no mark.
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

// raiseLongestTTL raises d.longestTTL to at least the given term in ms. The driver learns longer
// terms from marks. A node that has lost its own mark must wait for these terms too.
func (d *driver) raiseLongestTTL(longest int64) {
	for {
		old := d.longestTTL.Load()
		// If another caller raises the value at the same moment, compare again.
		if longest <= old || d.longestTTL.CompareAndSwap(old, longest) {
			return
		}
	}
}

// runOf returns the run that a server's reply to INFO names. Some servers other than Redis name no
// run. The restart of such a server is noticed only if the server loses its data.
func runOf(info any) string { return cmp.Or(redisstore.InfoField(info, "run_id"), unknownRun) }

// These values tell writeMark to write to any node, or only to a node that already has a mark.
const (
	anyNode    = "0"
	onlyMarked = "1" // the script does not write to a node without a mark
)

// writeMark gives the node a mark, or keeps the mark that the node has, and completes the standing
// s. The node votes at once if its run is that in s and its clock is before the time atOnceUntil,
// in ms. The node also votes at once if it keeps its mark, and this mark equals the argument
// waited, because the wait of that mark has ended.
func (n *node) writeMark(ctx context.Context, s *standing, which string, atOnceUntil int64, waited string) error {
	durable := "0"
	if n.d.opts.Durable {
		durable = "1"
	}
	// Include the drift in the wait, because the node's clock may run faster than a holder's.
	n.d.raiseLongestTTL((n.d.opts.MaxTTL + backend.Drift(n.d.opts.MaxTTL) + time.Millisecond - 1).Milliseconds())
	call := redisstore.Call{
		Keys: []string{markKey},
		Args: []string{strconv.FormatInt(n.d.longestTTL.Load(), 10), durable, s.run, strconv.FormatInt(atOnceUntil, 10), waited, which},
	}

	// Try one time more than the pool can have connections, because all old connections are dead
	// after a restart, although the node answers on new ones. If the script runs twice, the second
	// run keeps the mark.
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
	// Count the wait from now. It may be too long by the reply's trip, but is never too short.
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

// markNewSet marks all nodes that answer, if the set is new. A set is new if a majority of its
// nodes answers, and none of these nodes has a mark. If the set does not look new, but n has no
// mark, markNewSet asks once more after a pause, because another process may be marking the set.
func (d *driver) markNewSet(ctx context.Context, n *node) {
	select {
	case d.markTurn <- struct{}{}:
		defer func() { <-d.markTurn }()
	case <-ctx.Done():
		return
	}

	// Do not let Close cancel the calls, because a set with some marked nodes no longer looks new.
	// Leave a third of the time to the caller's own call, which marks n.
	end, _ := ctx.Deadline()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Until(end)*2/3)
	defer cancel()

	for first := true; ; first = false {
		// In the slice all, the element of a node stays nil if the node has a mark, returns an
		// error, or does not answer within half of the time that is left.
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

		// Stop if n has not answered, because it cannot be marked, or if n has a mark, because
		// another process has marked the set.
		if all[n.i] == nil {
			return
		}
		// A majority of nodes, which all had marks, has voted for each holder. Suppose that a
		// majority answers, and no node of it has a mark. Then no key is held, or some of the nodes
		// that voted for a holder have lost their data.
		if unmarked >= d.quorum() && marked == 0 {
			gather(ctx, d, func(n *node) error {
				if s := all[n.i]; s != nil {
					_ = n.writeMark(ctx, s, anyNode, s.answered+newSetTTL.Milliseconds(), "") // updateMark asks again, so ignore the error
				}
				return nil
			}, func([]error) time.Duration { return forever })
			return
		}
		// If some node still has a mark after the pause, or too few nodes answer, the set is not
		// new.
		if !first {
			return
		}

		doze(ctx, newSetPause)
		if ctx.Err() != nil {
			return
		}
	}
}

// impostor returns a node other than n that has the given run, or whose mark names this run. If
// there is one, the address of n leads to that node's server, whose answers must not count for n.
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
