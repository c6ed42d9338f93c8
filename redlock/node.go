package redlock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/calls"
	"github.com/hasplock/hasp/internal/redisstore"
	"github.com/hasplock/hasp/internal/redisstore/resp"
)

const (
	// connections is the largest number of connections to a node. The number is high, so that calls
	// to a slow node do not wait for a connection.
	connections = 256

	// probeEvery is the shortest time between two calls to a suspect node, so that callers rarely
	// wait for that node, and few calls wait for its answer. A node is suspect if it has left a
	// call unanswered for the time probeEvery and has answered no later call, or if it refuses or
	// closes every connection.
	probeEvery = 200 * time.Millisecond

	// leadTimeout is the smallest limit on the time that a caller waits for one node.
	leadTimeout = 20 * time.Millisecond

	// inspectTimeout limits a call to a node if no claim sets the Timeout, as in Inspect and Break.
	inspectTimeout = 3 * time.Second

	// newSetPause is how long markNewSet waits for another process that may be marking the set.
	newSetPause = 100 * time.Millisecond

	// newSetTTL limits, by the servers' clocks, the time between finding that a set is new and
	// writing marks that let the nodes vote at once. So a late command cannot write such a mark
	// after the node has lost votes.
	newSetTTL = 5 * time.Second

	// unknownRun is the run of a server whose INFO names no run.
	unknownRun = "unknown"
)

// These values tell writeMark to write to any node, or only to a node that already has a mark.
const (
	anyNode    = "0"
	onlyMarked = "1" // the script does not write to a node without a mark
)

// markKey is the key of a node's mark. The mark names the run of the server (its run_id), and the
// time from which that run votes. A server that was restarted or has lost its data may have
// forgotten a vote. So the server receives a new mark, and does not vote until the longest term of
// any caller has passed. At that time, every lease for which it may have voted has ended. Each vote
// comes with the mark and the run of the server that voted. See docs/redlock.md.
const markKey = "hasp:{redlock}:mark"

// standing is a node's right to vote, as the node reported it.
type standing struct {
	run       string    // empty if the server was not asked for it
	mark      string    // empty if the node has none
	asked     time.Time // a time just before the node was asked
	answered  int64     // the node's time in ms when it answered
	votesFrom time.Time // when the node may begin to vote, by our clock; zero if it may vote now
}

// node is one of the masters.
type node struct {
	m     *members
	i     int // the index in m.nodes
	store *redisstore.Store
	name  string // as the store's errors name it

	latency    atomic.Int64             // smoothed answer time in ns; 0 if unknown, and the node cannot lead
	turn       chan struct{}            // a mutex that can time out; full while the mark is updated
	standing   atomic.Pointer[standing] // nil if the node has never answered
	refreshing atomic.Bool              // a goroutine of refreshInBackground is running

	mu           sync.Mutex // guards the fields below
	suspectSince time.Time  // when the first call without an answer began, or zero
	refusal      error      // why a suspect node refuses connections; nil if it hangs
	probed       time.Time  // when the suspect node was last asked
	answered     time.Time  // when the last call that the node has answered began
	disconnects  int        // how many successive calls failed because the connection was closed
}

// trip returns how long the node takes to answer, or 0 if that is not known or the node is suspect.
func (n *node) trip() time.Duration { return time.Duration(n.latency.Load()) }

// patience returns how long a caller waits for this node before going on without it: eight times as
// long as the node usually takes.
func (n *node) patience() time.Duration {
	return max(leadTimeout, 8*n.trip())
}

// votes reports whether the node votes, as far as the driver knows.
func (n *node) votes() bool {
	s := n.standing.Load()
	return s != nil && !time.Now().Before(s.votesFrom)
}

// suspicionLocked returns why the node is suspect, or nil if it is not.
func (n *node) suspicionLocked() error {
	if n.suspectSince.IsZero() || n.refusal != nil {
		return n.refusal // nil if the node is not suspect
	}

	// A node that has been silent for a shorter time is not suspect, because a call with a short
	// Timeout may have left it too little time.
	silent := time.Since(n.suspectSince).Round(time.Millisecond)
	if silent < probeEvery {
		return nil
	}
	return n.errorf("no answer for %v: %w", silent, os.ErrDeadlineExceeded)
}

// admit returns nil if the node may be asked now: it is not suspect, or its next probe is due,
// which the caller then makes. Otherwise admit returns why the node is suspect.
func (n *node) admit() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	why := n.suspicionLocked()
	now := time.Now()
	if why != nil && now.Sub(n.probed) >= probeEvery {
		n.probed = now
		return nil
	}
	return why
}

// call runs f, which sends commands to the node, or returns an error if admit does not let it. Most
// calls use it. Others call admit themselves, to act between admit and the call, or skip admit,
// because the node must be asked even if it is suspect.
func (n *node) call(timeout time.Duration, f func(ctx context.Context) error) error {
	if err := n.admit(); err != nil {
		return err
	}
	return n.exchange(timeout, f)
}

// exchange runs f, which sends commands to the node, within the duration timeout, and records
// whether the node has answered. f gets no caller's context, because if the caller's end cut f
// short, it would not be known whether the node answers.
func (n *node) exchange(timeout time.Duration, f func(ctx context.Context) error) error {
	ctx := calls.WithTimeout(context.Background(), nil, timeout)
	defer ctx.End()
	began := time.Now()
	return n.observe(began, f(ctx))
}

// run runs a script on the node by the method call.
func (n *node) run(
	timeout time.Duration, script *redisstore.Script, call redisstore.Call,
) (reply any, err error) {
	err = n.call(timeout, func(ctx context.Context) (err error) {
		reply, err = n.store.Run(ctx, script, call)
		return err
	})
	return reply, err
}

// report runs inspect.lua on the node, once for each element of calls. If one of these runs fails,
// the result found must not be used.
func (n *node) report(calls []redisstore.Call, timeout time.Duration) ([]redisstore.Found, error) {
	found := make([]redisstore.Found, len(calls))
	err := n.call(timeout, func(ctx context.Context) (err error) {
		n.store.RunEach(ctx, inspectScript, calls, func(i int, reply any, e error) {
			f, ok := redisstore.Decode(reply)
			if e == nil && !ok {
				e = n.store.Unexpected(reply)
			}
			found[i] = f
			err = cmp.Or(e, err)
		})

		return err
	})

	return found, err
}

// observe records what the outcome of a call says about the node: its latency, and whether it is
// suspect. The call was sent at the time began, and ended with err. observe returns err as the
// error of this node (see nodeError).
func (n *node) observe(began time.Time, err error) error {
	late := isTimeout(err)
	closed := isDisconnected(err)
	refuses := !late && resp.IsUnsent(err)
	took := time.Since(began)
	result := n.nodeError(err, took)

	n.mu.Lock()
	defer n.mu.Unlock()
	switch {
	case late && n.answered.After(began):
		return result // the node has answered a later call, so only one connection is bad
	case late || refuses || closed:
		n.latency.Store(0) // the node cannot lead until it has answered a call
	case err == nil && n.suspectSince.IsZero():
		// Move the smoothed latency by an eighth of the difference. Store at least 1, because 0
		// means that the latency is unknown.
		old := cmp.Or(n.trip(), took)
		n.latency.Store(int64(max(old+(took-old)/8, 1)))
	}

	n.disconnects++
	if !closed {
		n.disconnects = 0
	}

	// A closed connection is not yet a refusal, because a restart of the server closes all
	// connections of the pool. But if more calls in a row fail than the pool has connections, the
	// server also closes the new ones.
	refuses = refuses || n.disconnects > connections
	n.refusal = nil
	if !late && !refuses {
		n.suspectSince = time.Time{}
		if !closed {
			n.answered = began // also if the answer is an error
		}
		return result
	}

	// The node has not answered the call.
	if n.suspectSince.IsZero() {
		n.suspectSince = began
		n.probed = time.Now()
	}
	if refuses {
		n.refusal = result
	}
	return result
}

// nodeError turns err, the error of a call to this node that took some time, into the error of the
// node. One node does not decide the outcome of a caller's call. So the result matches no definite
// error and no context error, which would be taken for that outcome.
func (n *node) nodeError(err error, took time.Duration) error {
	switch {
	case isTimeout(err):
		return n.errorf("no answer within %v: %w", took.Round(time.Millisecond), os.ErrDeadlineExceeded)
	case err != nil && backend.Definite(err):
		return fmt.Errorf("%v", err) // keeps only the text
	}

	return err
}

// isTimeout reports whether err says that a call has ended without an answer because its time was
// over, or because Close has begun, which cancels the context of some calls.
func isTimeout(err error) bool {
	// The errors of a connection's deadline and of a context's deadline are both a net.Error.
	var timeout net.Error
	return errors.As(err, &timeout) && timeout.Timeout() || errors.Is(err, context.Canceled)
}

// isDisconnected reports whether err says that the connection was closed.
func isDisconnected(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrClosedPipe) ||
		errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}

// checkVote returns nil if the node's vote counts, and otherwise why it does not count. It is for a
// yes vote, which was requested at the time began, and came with the run and the mark in id.
func (n *node) checkVote(ctx context.Context, id standing, began time.Time) error {
	s := n.standing.Load()
	_, longest, _ := timesOf(s.mark)
	isTooShort := !s.votesFrom.IsZero() && n.m.longestTTL.Load() > longest
	if s.run != id.run || s.mark != id.mark || isTooShort {
		// The known standing is out of date, so ask the node again. The vote has another run or
		// mark, or the wait of the node is too short, because the driver has learned of a longer
		// term since.
		var err error
		if s, err = n.refreshMark(ctx, time.Now()); err != nil {
			return err
		}
	}

	// The node must have had the right to vote when the vote was requested. That it has the right
	// by now is not enough, because it may have lost its data again before the reply was read.
	switch {
	case s.run != id.run:
		return n.errorf("was restarted, or two servers answer at its address")
	case s.mark != id.mark:
		// The mark has changed since the vote, so the node may have lost the vote with its data.
		return n.errorf("has another mark than when it voted")
	case began.Before(s.votesFrom):
		left := s.votesFrom.Sub(began).Round(time.Millisecond)
		return n.errorf("was restarted, has lost its data, or is new in a set whose other nodes "+
			"are not, and does not vote for another %v because of max_ttl", left)
	}

	return nil
}

// checkRun returns an error if the mark in a reply of the node names another run than the known
// mark of the node. Then the address may lead to the server of another node, which would count
// twice. The argument run is the run that the mark in the reply names. It is empty if there was no
// mark, and then checkRun finds no error. A new server that has a copy of the old mark is not
// noticed.
func (n *node) checkRun(run string) error {
	s := n.standing.Load()
	if s != nil && run == runOfMark(s.mark) {
		return nil
	}

	// The standing is not known or out of date. Without a mark in the reply, this also gives the
	// node a new mark.
	n.refreshInBackground()
	if s != nil && run != "" {
		return n.errorf("was restarted, or another server answers at its address")
	}
	return nil
}

// checkRefusal returns an error if the refusal of a vote must not count, because the server of
// another node has given it. The argument mark is the mark in the refusal.
func (n *node) checkRefusal(mark string) error {
	// The node has another mark than we know, or none. Read it again, and give the node a mark if
	// it has none. Every node in use needs a mark: a node without one, beside nodes that have one,
	// counts as new or as a node that has lost its data. A vote was asked before, so standing is
	// not nil.
	if n.standing.Load().mark != mark {
		n.refreshInBackground()
	}
	return n.checkServer(runOfMark(mark))
}

// errSameServer is the error of two nodes that are one server.
var errSameServer = errors.New("and would vote twice: name it once" + unsafeHint)

// checkServer returns an error if another node has the given run, or has a mark that names this
// run. If so, the address of n leads to the server of that node, whose answers must not count for
// n. If run is unknown or Options.AllowUnsafeNodes is set, checkServer returns nil.
func (n *node) checkServer(run string) error {
	if n.m.unsafe || run == "" || run == unknownRun {
		return nil
	}
	for _, other := range n.m.nodes {
		s := other.standing.Load()
		if other != n && s != nil && (s.run == run || runOfMark(s.mark) == run) {
			return n.errorf("is the same server as %s, %w", other.name, errSameServer)
		}
	}

	return nil
}

// errorf returns an error that begins with the name of the node.
func (n *node) errorf(format string, args ...any) error {
	return fmt.Errorf("%s: %w", n.name, fmt.Errorf(format, args...))
}

// refreshInBackground starts a goroutine that asks for the node's standing, unless such a goroutine
// is already running.
func (n *node) refreshInBackground() {
	if n.refreshing.Swap(true) {
		return
	}
	if !n.m.spawn(func() {
		defer n.refreshing.Store(false)
		ctx, cancel := context.WithTimeout(context.Background(), inspectTimeout)
		defer cancel()
		_, _ = n.refreshMark(ctx, time.Now()) // if this fails, the next use of the node asks again
	}) {
		n.refreshing.Store(false) // close has begun
	}
}

// refreshMark asks for the node's standing, and gives the node a mark if it needs one. If any
// caller has asked after the time since, refreshMark returns that answer instead. So with a zero
// since, any known standing will do. Only one caller asks at a time. Close may cancel the call to
// the node, because that call takes no key.
func (n *node) refreshMark(ctx context.Context, since time.Time) (*standing, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(n.m.closing, cancel)()
	began := time.Now()
	select {
	case n.turn <- struct{}{}:
		defer func() { <-n.turn }()
	case <-ctx.Done():
		return nil, n.nodeError(ctx.Err(), time.Since(began))
	}

	// Another caller may have asked, also while this one waited for its turn.
	if s := n.standing.Load(); s != nil && s.asked.After(since) {
		return s, nil
	}

	s := &standing{asked: time.Now()}
	if err := n.observe(s.asked, n.updateMark(ctx, s)); err != nil {
		return nil, err
	}
	if err := n.accept(s); err != nil {
		return nil, err
	}
	if wait := time.Until(s.votesFrom); wait > 0 {
		// Update the mark when the wait is over. The mark may then still name a later time, because
		// the node's clock may have been ahead when the mark was made.
		time.AfterFunc(wait, n.refreshInBackground)
	}

	return s, nil
}

// accept makes s the standing of the node, unless another node has the same server.
func (n *node) accept(s *standing) error {
	// Hold m.mu for both steps, so that if two nodes are one server, the second finds the first.
	n.m.mu.Lock()
	defer n.m.mu.Unlock()
	err := n.checkServer(s.run)
	if err == nil {
		n.standing.Store(s)
		return nil
	}

	// Two servers may have swapped their addresses. If the server that was known for n is not at
	// the address of n any more, forget it, so that the other node may have it. The other node
	// loses its own standing in the same way, when another server answers there.
	if old := n.standing.Load(); old != nil && old.run != s.run {
		n.standing.Store(&standing{})
	}
	return err
}

// updateMark writes the node's mark, or keeps it if it is good, and fills in s. The caller has the
// node's turn.
func (n *node) updateMark(ctx context.Context, s *standing) error {
	err := n.writeMark(ctx, s, onlyMarked, 0)
	if err != nil || s.mark != "" {
		return err
	}

	// The node has no mark. If the whole set is new, markNewSet gives all nodes marks with which
	// they vote at once, and the writeMark after it keeps that mark. Otherwise, that writeMark
	// gives this node a mark that makes it wait.
	n.m.markNewSet(ctx, n)
	return n.writeMark(ctx, s, anyNode, 0)
}

// writeMark runs mark.lua on the node, and fills in the standing s from the reply. The script keeps
// the node's mark if it names the present run of the server, and otherwise writes a new mark. If
// which is onlyMarked and the node has no mark, it writes none. A new mark makes the node wait
// before it votes, unless the run of the server is s.run, and its clock is before atOnceUntil, a
// time in ms.
func (n *node) writeMark(ctx context.Context, s *standing, which string, atOnceUntil int64) error {
	known := strconv.FormatInt(n.m.longestTTL.Load(), 10)
	reply, err := n.store.Run(ctx, markScript, redisstore.Call{
		Keys: []string{markKey},
		Args: []string{known, s.run, strconv.FormatInt(atOnceUntil, 10), which, n.m.evict},
	})
	if err != nil {
		return err
	}

	// Count the wait of the node from now. So the wait may be too long by the time that the reply
	// took, but is never too short.
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
	ok = isMark && (ok || mark == "")
	if !ok || run == "" || err != nil || answered <= 0 {
		return n.store.Unexpected(reply)
	}

	*s = standing{run: run, mark: mark, asked: s.asked, answered: answered}
	if from > answered {
		// Add 1 ms, because the script rounds the clock down when it computes from.
		s.votesFrom = now.Add(redisstore.Term(from - answered + 1))
	}
	n.m.raiseLongestTTL(longest)
	return nil
}

// timesOf returns the time from which a mark lets its run vote, and the longest term that the mark
// names, both in ms. The result ok is false if mark is empty or is no mark.
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

// runOf returns the run that a server's reply to INFO names. Some servers other than Redis name no
// run. The restart of such a server is noticed only if the server loses its data.
func runOf(info any) string { return cmp.Or(redisstore.InfoField(info, "run_id"), unknownRun) }
