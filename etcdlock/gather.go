package etcdlock

import (
	"context"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/hasplock/hasp/backend"
)

// gather sends the changes of concurrent callers together. While maxFlights transactions are under
// way, further changes wait. Then they go as the parts of one transaction. etcd writes a
// transaction to its log as one entry, whatever the number of its parts.
type gather struct {
	d *driver

	mu      sync.Mutex // guards the fields below, and change.sent
	flights int        // how many goroutines send
	waiting []*change
}

const (
	maxFlights = 4 // how many transactions are under way at once

	// How many changes one transaction has. etcd allows 128 operations, those of a part included.
	maxTogether = 64
)

// change is what one caller does to the queue of one key: the operations in then if all conditions
// are true, or else those in otherwise.
type change struct {
	ctx       context.Context
	key       string
	conds     []clientv3.Cmp
	then      []clientv3.Op
	otherwise []clientv3.Op

	sent   bool          // a flight has taken it, or its caller has left before that
	done   chan struct{} // closed when the fields below are set
	answer txnAnswer
	err    error
}

// do makes a change, and returns etcd's answer. If c.ctx ends or the driver is closed before that,
// the outcome is unknown, unless the error is a noChange.
func (g *gather) do(c *change) (txnAnswer, error) {
	if g.begin(c) {
		defer g.end()
		return g.alone(c)
	}
	select {
	case <-c.done:
		return c.answer, c.err
	case <-c.ctx.Done():
		return txnAnswer{}, g.leave(c, c.ctx.Err())
	case <-g.d.cluster.ctx.Done():
		return txnAnswer{}, g.leave(c, errClosed)
	}
}

// begin starts a flight and returns true, if fewer than maxFlights are under way. Then the caller
// sends the change itself, and calls end. Otherwise begin lets the change wait, and returns false.
func (g *gather) begin(c *change) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.flights < maxFlights {
		g.flights++
		return true
	}
	c.done = make(chan struct{})
	g.waiting = append(g.waiting, c)
	return false
}

// end ends the flight of a caller that has sent its change. If changes wait, a goroutine goes on
// with the flight.
func (g *gather) end() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.waiting) > 0 {
		g.d.cluster.spawn(g.fly)
	} else {
		g.flights--
	}
}

func (g *gather) alone(c *change) (txnAnswer, error) {
	return g.d.txn(c.ctx, c.conds, c.then, c.otherwise...)
}

// leave gives up a change whose caller does not wait any longer, and returns that caller's error:
// err, or a noChange if no flight has taken the change yet.
func (g *gather) leave(c *change, err error) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if c.sent {
		return err
	}
	c.sent = true // no flight takes it from now on: see next
	return &noChange{err}
}

// fly sends the changes that wait, until none waits.
func (g *gather) fly() {
	for batch := g.next(); len(batch) > 0; batch = g.next() {
		g.send(batch)
	}
}

// next returns the changes of the next transaction. If none waits, the flight ends.
//
// A transaction has at most one change of a key, because etcd checks the conditions of all parts
// before it carries out the first part: two callers would find the key free.
func (g *gather) next() (batch []*change) {
	g.mu.Lock()
	defer g.mu.Unlock()
	keys := map[string]bool{}
	var rest []*change
	for _, c := range g.waiting {
		switch {
		case c.sent: // drop it, because its caller has left
		case len(batch) == maxTogether, keys[c.key]:
			rest = append(rest, c)
		default:
			c.sent = true
			keys[c.key] = true
			batch = append(batch, c)
		}
	}

	g.waiting = rest
	if len(batch) == 0 {
		g.flights--
	}
	return batch
}

// send makes the changes in one transaction, and reports the outcomes to their callers. A single
// change is sent under the context of its caller.
func (g *gather) send(batch []*change) {
	if len(batch) == 1 {
		c := batch[0]
		c.answer, c.err = g.alone(c)
		close(c.done)
		return
	}

	ctx, cancel := context.WithDeadline(g.d.cluster.ctx, deadline(batch))
	defer cancel()
	var parts []clientv3.Op
	for _, c := range batch {
		parts = append(parts, clientv3.OpTxn(c.conds, c.then, c.otherwise))
	}
	r, err := g.d.txn(ctx, nil, parts)
	if isGone(err) || backend.Definite(err) {
		// etcd has refused all changes because of one, for example because its lease has ended, or
		// because they are too large together. So send each change alone. Send them at the same
		// time, because one after another, the last ones might be too late over a slow link.
		var wg sync.WaitGroup
		for _, c := range batch {
			wg.Go(func() { g.send([]*change{c}) })
		}
		wg.Wait()
		return
	}

	for i, c := range batch {
		c.err = err
		if err == nil {
			part := r.Responses[i].GetResponseTxn()
			part.Header = r.Header // etcd leaves most of the part's own header empty
			c.answer = txnAnswer{(*clientv3.TxnResponse)(part), r.m}
		}

		close(c.done)
	}
}

// deadline returns the time until which the last of the callers waits for its change.
func deadline(batch []*change) (last time.Time) {
	for _, c := range batch {
		end, ok := c.ctx.Deadline()
		if !ok {
			end = time.Now().Add(maxTTL) // the caller sets no limit, and no call takes this long
		}
		if end.After(last) {
			last = end
		}
	}

	return last
}
