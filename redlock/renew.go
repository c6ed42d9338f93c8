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
		renewals = append(renewals, &renewal{c: c, a: a, ballot: newBallot(d.nodes, having), began: time.Now(), clocks: make([]clock, len(d.nodes))})
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
		begins := r.c.Token
		if r.a != nil {
			begins = r.a.begins
		}
		calls[j] = redisstore.Call{Keys: []string{redisstore.LockKey(r.c.Key)}, Args: []any{begins, redisstore.Millis(r.c.TTL)}}
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
			d.renewed(r)
			r.repair(d)
		}
	}
	n.store.RunEach(ctx, renewScript, calls, func(j int, reply any, err error) {
		if err != nil {
			cast(j, failed, n.plain(err, timeout))
			return
		}
		switch parts, _ := reply.([]any); {
		case len(parts) == 1 && parts[0] == int64(1):
			cast(j, yes, nil)
		case len(parts) == 2 && parts[0] == int64(0):
			text, _ := parts[1].(string)
			millis, _ := strconv.ParseInt(text, 10, 64)
			renewals[j].lost(n.i, clock{millis, time.Now()})
			cast(j, no, nil)
		default:
			cast(j, failed, n.store.Unexpected(reply))
		}
	})
	for j := range renewals {
		if !told[j] {
			cast(j, failed, fmt.Errorf("%s: no answer within %v: %w", n.name, timeout, os.ErrDeadlineExceeded))
		}
	}
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
