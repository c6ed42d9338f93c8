package redlock

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

// renewal is the renewal of one hold.
type renewal struct {
	c      backend.Claim
	a      *attempt // nil if the driver does not know of it
	ballot *ballot
	began  time.Time

	// Guarded by ballot.mu, and written before the vote is cast. By node:
	clocks []clock // of those that do not have it
}

// clock is the time of a server, at the latest when it was heard.
type clock struct {
	millis int64
	heard  time.Time
}

// Renew asks all nodes to prolong the holds, those of one node in one batch. A
// hold is renewed if a quorum still had it; the nodes that did not are given it
// afterwards, and count from the next renewal on.
func (d *Driver) Renew(ctx context.Context, cs []backend.Claim, done func(i int, g backend.Grant, err error)) {
	decided := make(chan int, len(cs))
	var renewals []*renewal
	var which []int // of cs
	for i, c := range cs {
		if c.TTL > d.maxTTL {
			done(i, backend.Grant{}, fmt.Errorf("%w: a term of %v is longer than max_ttl, which is %v", backend.ErrInvalid, c.TTL, d.maxTTL))
			continue
		}
		a, lost := d.holding(c)
		if lost {
			done(i, backend.Grant{}, backend.ErrLost)
			continue
		}
		r := &renewal{c: c, a: a, ballot: newBallot(d.nodes, having), began: time.Now(), clocks: make([]clock, len(d.nodes))}
		d.lasts(r)
		renewals = append(renewals, r)
		which = append(which, i)
	}
	if len(renewals) == 0 {
		return
	}
	for _, n := range d.nodes {
		if !d.spawn(func() { n.renew(renewals, decided) }) {
			return
		}
	}
	for range renewals {
		select {
		case j := <-decided:
			done(which[j], backend.Grant{}, renewals[j].ballot.err())
		case <-ctx.Done():
			for _, r := range renewals {
				r.ballot.end(left) // its quorum may come when the lease has ended
			}
			return
		}
	}
}

// renew renews on one node. It goes on when Renew has returned: an answer that
// comes late tells what is to be repaired.
func (n *node) renew(renewals []*renewal, decided chan<- int) {
	d := n.d
	calls := make([]redisstore.Call, len(renewals))
	for j, r := range renewals {
		begins, fence := r.c.Token, ""
		if r.a != nil {
			begins, fence = r.a.begins, d.fenceOf(r.a)
		}
		calls[j] = redisstore.Call{
			Keys: []string{redisstore.LockKey(r.c.Key), markKey, redisstore.DerivedKey("fence", r.c.Key)},
			Args: []any{begins, redisstore.Millis(r.c.TTL), fence, redisstore.Millis(d.fenceTTL)},
		}
	}
	timeout := renewals[0].c.Timeout
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	told := make([]bool, len(renewals))
	cast := func(j int, v vote, err error) {
		told[j] = true
		r := renewals[j]
		verdict, now := r.ballot.cast(n.i, v, err)
		if now {
			decided <- j // which has room for all
		}
		if verdict == won && r.a != nil {
			r.repair(d)
		}
	}
	n.store.RunEach(ctx, renewScript, calls, func(j int, reply any, err error) {
		if err != nil {
			cast(j, failed, n.plain(err, timeout))
			return
		}
		holds, marked, now, ok := decodeRenewal(reply)
		if !ok {
			cast(j, failed, n.store.Unexpected(reply))
			return
		}
		if !marked {
			n.remark(timeout)
		}
		if holds {
			cast(j, yes, nil)
			return
		}
		renewals[j].lost(n.i, clock{now, time.Now()})
		cast(j, no, nil)
	})
	for j := range renewals {
		if !told[j] {
			cast(j, failed, fmt.Errorf("%s: no answer within %v: %w", n.name, timeout, os.ErrDeadlineExceeded))
		}
	}
}

// decodeRenewal decodes the reply of renew.lua: whether the node has the hold,
// whether it bears a mark, and, if it does not have the hold, its time in ms. It
// returns false in ok if the script cannot give such a reply.
func decodeRenewal(reply any) (holds, marked bool, now int64, ok bool) {
	parts, _ := reply.([]any)
	if len(parts) < 2 || parts[1] != int64(0) && parts[1] != int64(1) {
		return false, false, 0, false
	}
	marked = parts[1] == int64(1)
	switch {
	case len(parts) == 2 && parts[0] == int64(1):
		return true, marked, 0, true
	case len(parts) == 3 && parts[0] == int64(0):
		text, _ := parts[2].(string)
		now, err := strconv.ParseInt(text, 10, 64)
		return false, marked, now, err == nil && now > 0
	}
	return false, false, 0, false
}

// fenceOf returns the fence of the hold that a took, or "" if the hold has none.
func (d *Driver) fenceOf(a *attempt) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	if a.fence == 0 {
		return ""
	}
	return strconv.FormatUint(a.fence, 10)
}

// lost notes that node i does not have the hold.
func (r *renewal) lost(i int, at clock) {
	r.ballot.mu.Lock()
	defer r.ballot.mu.Unlock()
	r.clocks[i] = at
}

// repair gives the hold to the nodes that have answered that they do not have
// it, once for each.
func (r *renewal) repair(d *Driver) {
	r.ballot.mu.Lock()
	lost := make([]clock, len(r.clocks))
	copy(lost, r.clocks)
	clear(r.clocks)
	r.ballot.mu.Unlock()
	for i, at := range lost {
		if at.millis > 0 {
			d.repair(r, d.nodes[i], at)
		}
	}
}

// repair gives the hold to one node. The node itself sees to it that it is not
// too late: by its own clock, which went on since it was heard.
func (d *Driver) repair(r *renewal, n *node, at clock) {
	end := r.began.Add(r.c.TTL - backend.Drift(r.c.TTL))
	left := end.Sub(at.heard)
	a, ended := r.a, make(chan struct{})
	d.mu.Lock()
	defer d.mu.Unlock()
	select {
	case <-a.busy[n.i]:
	default:
		return // something is under way there already
	}
	if a.released || a.over || left <= 0 || !d.spawnLocked(func() {
		defer close(ended)
		ctx, cancel := context.WithTimeout(context.Background(), r.c.Timeout)
		defer cancel()
		_, err := n.store.Run(ctx, repairScript, redisstore.Call{
			Keys: []string{a.lock},
			Args: []any{a.record, at.millis + left.Milliseconds()},
		})
		if err != nil && outcome(err) == unsure {
			d.mu.Lock()
			a.doubt[n.i] = true
			d.mu.Unlock()
		}
	}) {
		return
	}
	a.busy[n.i], a.there[n.i] = ended, true
}
