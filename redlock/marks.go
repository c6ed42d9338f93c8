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

// A node that has forgotten a vote must not vote again before every lease has
// ended that it may have voted for. So each node bears a mark: the run of the
// server that it was given to, and from when on that run votes. A server that
// was started again is another run, and one that has lost its data has lost
// its mark; both get a new one, and wait for the longest term that anybody may
// ask for.
//
// Whether the mark is still there is asked with each vote. Which run a server
// is cannot change on a connection, so that is asked again only when some
// connection has been made since it was asked last.
const markKey = "hasp:{redlock}:mark"

const (
	markTTL   = 30 * 24 * time.Hour
	markAgain = time.Hour              // after which a mark's own term is prolonged
	settling  = 100 * time.Millisecond // for another process to mark a new set
	foundFor  = 5 * time.Second        // how long it is known that a set is new
)

// standing is what is known of a node's right to vote.
type standing struct {
	run, mark string
	told      int64     // when it was, by the server's time in ms
	dials     uint64    // of the node's store, before it was asked
	began     time.Time // when it was asked
	from      time.Time // when it votes; zero: always
}

// marks is the standing of one node.
type marks struct {
	turn  chan struct{} // has room for the one who asks
	at    atomic.Pointer[standing]
	fresh atomic.Bool // somebody prolongs the mark
}

// known has the node's standing asked for, if it never was.
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
	return s != nil && (s.from.IsZero() || time.Now().After(s.from))
}

// votes is nil if the vote for a that the node has given together with mark
// counts.
func (n *node) votes(ctx context.Context, a *attempt, mark string) error {
	s := n.marks.at.Load()
	if s.mark != mark || s.dials != n.store.Dials() {
		var err error
		if s, err = n.verify(ctx, time.Now()); err != nil {
			return err
		}
		if s.mark != mark {
			// The mark is newer than the vote, which must have outlived that.
			if err := n.confirm(ctx, a, s.mark); err != nil {
				return err
			}
		}
	}
	if time.Since(s.began) > markAgain && !n.marks.fresh.Swap(true) {
		c := a.c
		n.d.spawn(func() {
			defer n.marks.fresh.Store(false)
			ctx, cancel := context.WithTimeout(context.Background(), c.Timeout)
			defer cancel()
			_, _ = n.verify(ctx, time.Now()) // or the next one does
		})
	}
	if left := time.Until(s.from); !s.from.IsZero() && left > 0 {
		return fmt.Errorf("%s: was restarted or has lost its data, and does not vote for another %v (max_ttl)", n.name, left.Round(time.Millisecond))
	}
	return nil
}

// confirm is nil if the node has the record of a, and that mark.
func (n *node) confirm(ctx context.Context, a *attempt, mark string) error {
	replies := n.store.Together(ctx, []any{"get", a.lock}, []any{"get", markKey})
	switch err := cmp.Or(replies[0].Err, replies[1].Err); {
	case err != nil:
		return n.plain(err, a.c.Timeout)
	case replies[0].Value != a.record || replies[1].Value != mark:
		return fmt.Errorf("%s: loses its data", n.name)
	}
	return nil
}

// verify asks for the node's standing, unless somebody has done so since.
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
	s := &standing{dials: n.store.Dials(), began: time.Now()}
	err := n.ask(ctx, s)
	if err == nil && s.mark == "" {
		n.d.found(ctx, n)
		err = n.ask(ctx, s)
	}
	if err == nil {
		err = n.d.distinct(n, s.run)
	}
	if err == nil {
		err = n.register(ctx, s, false)
	}
	n.heard(ctx, s.began, err)
	if err != nil {
		return nil, n.plain(err, time.Since(s.began))
	}
	n.marks.at.Store(s)
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
	info, _ := replies[1].Value.(string)
	s.run = "unknown" // to a store that is no Redis; its restarts are seen if it loses its data
	for line := range strings.Lines(info) {
		if run, ok := strings.CutPrefix(strings.TrimSpace(line), "run_id:"); ok && run != "" {
			s.run = run
		}
	}
	return nil
}

// register gives the node a mark, or has it keep the one it has.
func (n *node) register(ctx context.Context, s *standing, atOnce bool) error {
	run, _, _ := strings.Cut(s.mark, " ")
	if run == "" || !n.d.durable {
		run = s.run
	}
	atOnceUntil := int64(0)
	if atOnce {
		atOnceUntil = s.told + foundFor.Milliseconds()
	}
	reply, err := n.store.Run(ctx, markScript, redisstore.Call{
		Keys: []string{markKey},
		Args: []any{run, redisstore.Millis(n.d.maxTTL + backend.Drift(n.d.maxTTL)), atOnceUntil, redisstore.Millis(markTTL)},
	})
	if err != nil {
		return err
	}
	answered := time.Now()
	parts, _ := reply.([]any)
	if len(parts) != 2 {
		return n.store.Unexpected(reply)
	}
	mark, _ := parts[0].(string)
	text, _ := parts[1].(string)
	fields := strings.Fields(mark)
	now, err := strconv.ParseInt(text, 10, 64)
	if err != nil || now <= 0 || len(fields) != 3 {
		return n.store.Unexpected(reply)
	}
	from, err := strconv.ParseInt(fields[1], 10, 64)
	if err != nil {
		return n.store.Unexpected(reply)
	}
	s.mark, s.from = mark, time.Time{}
	if from > now {
		s.from = answered.Add(redisstore.Term(from - now + 1))
	}
	return nil
}

// found marks a set that is new: all its nodes answer, and none bears a mark.
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
	ctx, cancel := context.WithTimeout(ctx, time.Until(end)*2/3) // the rest is for n itself
	defer cancel()
	for first := true; ; first = false {
		all := d.askAll(ctx)
		if s := all[n.i]; s == nil || s.mark != "" {
			return
		}
		unmarked := 0
		for _, s := range all {
			if s != nil && s.mark == "" {
				unmarked++
			}
		}
		if unmarked == len(all) {
			d.each(func(n *node) { _ = n.register(ctx, all[n.i], true) }) // n sees what came of it
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
