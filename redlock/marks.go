package redlock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

// A node that has forgotten a vote must not vote again until every lease that it
// may have voted for has ended. So each node bears a mark: the run of the server
// that the mark was given to, and the time from which that run votes. A server
// that was restarted is another run, and a server that has lost its data has
// lost its mark. Either one gets a new mark, and does not vote until the longest
// term that any caller may ask for has passed.
//
// Each vote brings the mark and the run, both from the server that voted: a
// replica that has taken over the address bears a copy of the mark, and
// connections to both servers may be in use at once.
const markKey = "hasp:{redlock}:mark"

const (
	settling = 100 * time.Millisecond // for another process to mark a new set
	foundFor = 5 * time.Second        // how long the finding that a set is new is used
)

// bearing is what the reply to a vote says about the node.
type bearing struct {
	run  string // of the server; empty if it was not asked
	mark string // empty if there is none
}

// standing is what is known of a node's right to vote.
type standing struct {
	bearing
	told  int64     // when the node answered, by the server's time in ms
	began time.Time // when it was asked
	from  time.Time // when it votes; zero: always
}

// marks is the standing of one node.
type marks struct {
	turn   chan struct{} // has room for one caller that asks
	at     atomic.Pointer[standing]
	asking atomic.Bool // a goroutine asks in the background
	absent atomic.Bool // a goroutine waits until the node votes
}

// known asks for the node's standing, unless it is already known.
func (m *marks) known(ctx context.Context, n *node) error {
	if m.at.Load() != nil {
		return nil
	}
	_, err := n.verify(ctx, time.Time{})
	return err
}

// voting reports whether the node votes, as far as is known.
func (m *marks) voting() bool {
	s := m.at.Load()
	return s != nil && !time.Now().Before(s.from)
}

// votes returns nil if a vote for a, which came with b, counts. Otherwise it
// returns why the vote does not count.
func (n *node) votes(ctx context.Context, a *attempt, b bearing) error {
	s := n.marks.at.Load()
	if s.bearing != b {
		var err error
		if s, err = n.verify(ctx, time.Now()); err != nil {
			return err
		}
		switch {
		case s.run != b.run:
			return fmt.Errorf("%s: was restarted, or two servers answer at its address", n.name)
		case s.mark != b.mark:
			// The mark is newer than the vote. The vote counts only if it is still
			// there.
			if err := n.confirm(ctx, a, s.bearing); err != nil {
				return err
			}
		}
	}
	switch left := time.Until(s.from); {
	case s.from.IsZero():
	case left > 0:
		return fmt.Errorf("%s: was restarted or has lost its data, and does not vote for another %v (max_ttl)", n.name, left.Round(time.Millisecond))
	default:
		n.remark(a.c.Timeout) // writes into the mark that the wait is over
	}
	return nil
}

// confirm returns nil if the node has the record of a, and still bears b.
func (n *node) confirm(ctx context.Context, a *attempt, b bearing) error {
	// All three commands use one connection, so one server answers them.
	replies := n.store.Together(ctx, []any{"get", a.lock}, []any{"get", markKey}, []any{"info", "server"})
	switch err := cmp.Or(replies[0].Err, replies[1].Err, replies[2].Err); {
	case err != nil:
		return n.plain(err, a.c.Timeout)
	case replies[0].Value != a.record || replies[1].Value != b.mark || runOf(replies[2].Value) != b.run:
		return fmt.Errorf("%s: loses its data", n.name)
	}
	return nil
}

// saw asks for the node's standing in the background, if b differs from the known
// standing. Every use of a node must leave a mark on it. Then, if one node has a
// mark, the nodes without one have lost their data.
func (n *node) saw(b bearing, timeout time.Duration) {
	s := n.marks.at.Load()
	if s != nil && s.mark == b.mark && (b.run == "" || s.run == b.run) {
		return
	}
	n.remark(timeout)
}

// remark asks for the node's standing in the background.
func (n *node) remark(timeout time.Duration) {
	if n.marks.asking.Swap(true) {
		return
	}
	n.d.spawn(func() { // does nothing if Close has begun
		defer n.marks.asking.Store(false)
		ctx, cancel := context.WithTimeout(n.d.life, timeout) // Close may cancel this: it leaves no record behind
		defer cancel()
		_, _ = n.verify(ctx, time.Now()) // if this fails, the next use asks again
	})
}

// verify asks for the node's standing, unless another caller has asked after since.
func (n *node) verify(ctx context.Context, since time.Time) (*standing, error) {
	began := time.Now()
	select {
	case n.marks.turn <- struct{}{}:
		defer func() { <-n.marks.turn }()
	case <-ctx.Done():
		return nil, n.plain(ctx.Err(), time.Since(began))
	}
	if s := n.marks.at.Load(); s != nil && s.began.After(since) {
		return s, nil
	}
	s := &standing{began: time.Now()}
	err := n.ask(ctx, s)
	if err == nil && s.mark == "" {
		n.d.found(ctx, n)
		err = n.ask(ctx, s)
	}
	if err == nil {
		// The mark's time is by the node's clock, which may have been ahead. A wait
		// that is over by our clock is over for every driver.
		waited := ""
		if old := n.marks.at.Load(); old != nil && !old.from.IsZero() && n.marks.voting() {
			waited = old.mark
		}
		err = n.register(ctx, s, 0, waited)
	}
	if err == nil {
		err = n.d.distinct(n, s.run)
	}
	n.heard(ctx, s.began, err)
	if err != nil {
		return nil, n.plain(err, time.Since(s.began))
	}
	n.marks.at.Store(s)
	if !n.marks.voting() && !n.marks.absent.Swap(true) {
		n.d.spawn(func() {
			defer n.marks.absent.Store(false)
			if n.d.sleep(time.Until(s.from)) {
				n.remark(inspectTimeout)
			}
		})
	}
	return s, nil
}

// ask reads the node's mark, and which run of the server it is. After a restart
// all connections that there were are dead, which is not to be taken for the
// node's silence.
func (n *node) ask(ctx context.Context, s *standing) error {
	for tries := 1; ; tries++ {
		err := n.askOnce(ctx, s)
		if !broke(err) || tries == maxTries || ctx.Err() != nil {
			return err
		}
	}
}

// maxTries is how often a node is asked whose connections die: there are no
// more of them.
const maxTries = connections + 1

// broke reports whether err is a connection that was ended.
func broke(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrClosedPipe) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}

func (n *node) askOnce(ctx context.Context, s *standing) error {
	replies := n.store.Together(ctx, []any{"get", markKey}, []any{"info", "server"}, []any{"time"})
	if err := cmp.Or(replies[0].Err, replies[1].Err, replies[2].Err); err != nil {
		return err
	}
	if now, _ := replies[2].Value.([]any); len(now) == 2 {
		text, _ := now[0].(string)
		seconds, _ := strconv.ParseInt(text, 10, 64)
		s.told = seconds * 1000
	}
	s.mark, _ = replies[0].Value.(string)
	s.run = runOf(replies[1].Value)
	if fields := strings.Fields(s.mark); len(fields) == 3 {
		longest, _ := strconv.ParseInt(fields[2], 10, 64)
		n.d.longer(longest)
	}
	return nil
}

// longer notes the longest term, in ms, that a mark names. A node that has lost its
// own mark must also wait for that term, and learns of it only from a driver.
func (d *Driver) longer(longest int64) {
	for {
		old := d.longest.Load()
		if longest <= old || d.longest.CompareAndSwap(old, longest) {
			return
		}
	}
}

// runOf returns the run of the server that a reply to INFO names. A server other
// than Redis may not name one. Its restarts are noticed only if it loses its data.
func runOf(info any) string {
	text, _ := info.(string)
	for line := range strings.Lines(text) {
		if run, ok := strings.CutPrefix(strings.TrimSpace(line), "run_id:"); ok && run != "" {
			return run
		}
	}
	return "unknown"
}

// register gives the node a mark, or keeps the mark that it has. If the node's time
// is before atOnceUntil, in ms, the run of s votes at once. A node that keeps its
// mark votes at once if that mark equals waited, the mark whose wait is over.
func (n *node) register(ctx context.Context, s *standing, atOnceUntil int64, waited string) error {
	durable := 0
	if n.d.durable {
		durable = 1
	}
	n.d.longer(redisstore.Millis(n.d.maxTTL + backend.Drift(n.d.maxTTL)))
	reply, err := n.store.Run(ctx, markScript, redisstore.Call{
		Keys: []string{markKey},
		Args: []any{n.d.longest.Load(), durable, s.run, atOnceUntil, waited},
	})
	if err != nil {
		return err
	}
	answered := time.Now()
	parts, _ := reply.([]any)
	if len(parts) != 3 {
		return n.store.Unexpected(reply)
	}
	mark, _ := parts[0].(string)
	run, _ := parts[1].(string)
	text, _ := parts[2].(string)
	fields := strings.Fields(mark)
	now, err := strconv.ParseInt(text, 10, 64)
	if err != nil || now <= 0 || len(fields) != 3 || run == "" {
		return n.store.Unexpected(reply)
	}
	from, err := strconv.ParseInt(fields[1], 10, 64)
	if err != nil {
		return n.store.Unexpected(reply)
	}
	s.bearing, s.from = bearing{run: run, mark: mark}, time.Time{}
	if from > now {
		s.from = answered.Add(redisstore.Term(from - now + 1))
	}
	return nil
}

// found marks a set that is new. A set is new if a majority of its nodes answers
// and no node that answers bears a mark.
// Where n alone has none, it waits a moment, since another process may be
// about to give it one.
func (d *Driver) found(ctx context.Context, n *node) {
	select {
	case d.founding <- struct{}{}:
		defer func() { <-d.founding }()
	case <-ctx.Done():
		return
	}
	end, _ := ctx.Deadline()
	// Close does not cancel this, because a set with only some nodes marked no longer
	// looks new.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Until(end)*2/3) // the rest is for n itself
	defer cancel()
	for first := true; ; first = false {
		all := d.askAll(ctx)
		if s := all[n.i]; s == nil || s.mark != "" {
			return
		}
		marked, unmarked := 0, 0
		for _, s := range all {
			switch {
			case s == nil:
			case s.mark == "":
				unmarked++
			default:
				marked++
			}
		}
		// A majority has voted for each live lock, and its nodes bear marks. If no
		// node answers with a mark, that majority is away or has lost its data. So a
		// minority that is away makes no difference.
		if marked == 0 && unmarked >= d.quorum() {
			d.each(func(n *node) {
				if s := all[n.i]; s != nil {
					_ = n.register(ctx, s, s.told+foundFor.Milliseconds(), "") // the next ask of n shows the outcome
				}
			})
			return
		}
		if !first {
			return
		}
		timer := time.NewTimer(settling)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return
		}
	}
}

// askAll asks all nodes for their standing; nil is one that has not answered.
func (d *Driver) askAll(ctx context.Context) []*standing {
	within, cancel := ctx, context.CancelFunc(func() {})
	if end, ok := ctx.Deadline(); ok {
		within, cancel = context.WithTimeout(ctx, time.Until(end)/2)
	}
	defer cancel()
	all := make([]*standing, len(d.nodes))
	d.each(func(n *node) {
		s := &standing{}
		if n.ask(within, s) == nil {
			all[n.i] = s
		}
	})
	return all
}

// each runs f for all nodes at once, and returns when all have.
func (d *Driver) each(f func(n *node)) {
	var wg sync.WaitGroup
	for _, n := range d.nodes {
		wg.Go(func() { f(n) })
	}
	wg.Wait()
}

// distinct is an error if another node is the same server.
func (d *Driver) distinct(n *node, run string) error {
	if d.unsafe || run == "unknown" {
		return nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	n.run = run
	for _, other := range d.nodes {
		if other != n && other.run == run {
			return sameError{n.name, other.name}
		}
	}
	return nil
}

// sameError is that a set has one server twice.
type sameError struct{ one, other string }

func (e sameError) Error() string {
	return fmt.Sprintf("%s: is the same server as %s, which would vote twice; allow_unsafe_nodes=true admits it", e.one, e.other)
}

// answered reports whether a server has answered, with an error.
func answered(err error) bool {
	var reply redis.Error
	return errors.As(err, &reply)
}
