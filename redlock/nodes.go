package redlock

import (
	"context"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/hasplock/hasp/internal/redisstore"
)

// Node is the state of one node, as [Driver.Nodes] reports it for display.
type Node struct {
	Name string // the address, without a password
	Err  error  // why the node has not answered; nil if it has

	// Away reports that the node is in quarantine: it answers but does not vote, because it
	// was restarted or has lost its data. VotesFrom is about when it votes again. It is zero
	// if that is not known, because no caller has asked the node for a vote since.
	Away      bool
	VotesFrom time.Time

	// Votes has what the node stores under each key, in the order of the keys. It is nil
	// if Err is not.
	Votes []Vote
}

// Vote is what one node stores under a key.
type Vote struct {
	Held   bool   // the node has a record
	Owner  string // of the record; empty if it names none
	Shared int    // how many share it, up to 1,000; Owner is the first of them
	Quorum bool   // a quorum of the nodes has the same record, or the same share
}

// Nodes asks all nodes whether they vote, and what they store under some keys. It changes
// nothing on the nodes. Each call to a node lasts for timeout at most. After a quorum has
// answered, Nodes waits for the others for a tenth of timeout. A node that is late then has
// an Err. Nodes returns an error only if ctx ends or the driver is closed.
func (d *Driver) Nodes(ctx context.Context, timeout time.Duration, keys ...string) ([]Node, error) {
	calls := make([]redisstore.Call, len(keys))
	for i, key := range keys {
		calls[i] = redisstore.Call{Keys: []string{redisstore.LockKey(key), redisstore.DerivedKey("fence", key)}}
	}
	answers := make(chan nodeAnswer, len(d.nodes)) // room for all, because some may be late
	for _, n := range d.nodes {
		if !d.spawn(func() { answers <- n.state(calls, timeout) }) {
			return nil, errClosed
		}
	}

	all := make([]nodeAnswer, len(d.nodes))
	for i, n := range d.nodes {
		all[i] = nodeAnswer{i: i, Node: Node{Name: n.name, Err: n.nodeError(context.DeadlineExceeded, timeout/10)}}
	}
	var late <-chan time.Time // nil until a quorum has answered
	well := 0
wait:
	for range d.nodes {
		select {
		case a := <-answers:
			if all[a.i] = a; a.Err == nil {
				well++
			}
		case <-late:
			break wait
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		if well == d.quorum() && late == nil {
			late = time.After(timeout / 10)
		}
	}

	for i := range keys {
		d.count(all, i)
	}
	nodes := make([]Node, len(all))
	for i, a := range all {
		nodes[i] = a.Node
	}
	return nodes, nil
}

// nodeAnswer is the answer of one node.
type nodeAnswer struct {
	Node
	i     int
	found []redisstore.Found // by key
}

// count sets the votes on the key with index i.
func (d *Driver) count(all []nodeAnswer, i int) {
	var answers []answer
	for _, a := range all {
		if a.Err == nil {
			answers = append(answers, answer{Found: a.found[i], i: a.i})
		}
	}
	var winners []string // the records that a quorum has
	if s := d.sum(answers, false); s.holder != nil {
		winners = records(*s.holder)
	}

	for _, a := range answers {
		v := Vote{}
		if !a.Free() {
			st := a.Status()
			v = Vote{Held: true, Owner: st.Owner, Shared: len(st.Shared)}
			if v.Shared > 0 {
				v.Owner = st.Shared[0]
			}
			v.Quorum = slices.ContainsFunc(records(a.Found), func(r string) bool { return slices.Contains(winners, r) })
		}
		all[a.i].Votes = append(all[a.i].Votes, v)
	}
}

// markTries is how often a call of Nodes reads a mark. After a restart the connections of
// the pool are dead, and each try uses another one.
const markTries = 8

// state asks the node about itself and about some keys.
func (n *node) state(calls []redisstore.Call, timeout time.Duration) nodeAnswer {
	a := nodeAnswer{i: n.i, Node: Node{Name: n.name}}

	// The caller's context does not end the calls, because their outcome also shows whether
	// the node answers at all. A suspect node is asked as well: that is the question here.
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	var s *standing
	var err error
	began := time.Now()
	for range markTries {
		s = &standing{}
		if err = n.readMarkOnce(ctx, s); !disconnected(err) {
			break
		}
	}
	n.observe(ctx, began, err)
	if err != nil {
		a.Err = n.nodeError(err, time.Since(began))
		return a
	}
	a.Away, a.VotesFrom = s.away(n.d.durable)

	for some := range slices.Chunk(calls, recordsAtOnce) {
		r := n.report(some, timeout)
		if a.Err = r.err; a.Err != nil {
			return a
		}
		a.found = append(a.found, r.found...)
	}
	return a
}

// away reports whether a node with this mark does not vote, and about when it does again.
// mark.lua has the rules. A node keeps the time in whole seconds here.
func (s *standing) away(durable bool) (away bool, until time.Time) {
	fields := strings.Fields(s.mark)
	if len(fields) != 3 || fields[0] != s.run && !durable {
		return true, time.Time{}
	}
	from, _ := strconv.ParseInt(fields[1], 10, 64)
	if from <= s.answered {
		return false, time.Time{}
	}
	return true, time.Now().Add(redisstore.Term(from - s.answered))
}
