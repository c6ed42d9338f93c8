// Package memetcd is an etcd in memory, for tests in the virtual time of package
// testing/synctest. Its members answer the public API over connections without sockets.
//
// It imitates only the requests that etcdlock makes. Any other request ends the program, or is
// answered with Unimplemented. All members share one state, which stands for their consensus. A
// member that is cut off from the others reports no new events until it has joined them again.
// TestLikeEtcd compares the answers with those of a real etcd. memetcd has no users, no disks and
// no old revisions, and its set of members does not change. A leader that is cut off confirms no
// keep-alives, as in etcd since 3.4.25 and 3.5.8.
package memetcd

import (
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/test/bufconn"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/hasplock/hasp/internal/faultproxy"
)

// Cluster is an etcd. Several goroutines may call its methods at the same time.
type Cluster struct {
	Members []*Member

	over chan struct{} // closed by Close
	wg   sync.WaitGroup

	mu       sync.Mutex // guards all fields below, and the fields of the members
	r        *rand.Rand
	state    *state
	leader   *Member
	term     uint64        // the raft term of the leader
	electing bool          // an election is under way
	changed  chan struct{} // closed and replaced at each change of the state or of a member
}

// New starts an etcd with n members. The random numbers decide what etcd leaves open: how late a
// term ends, how long an election takes, and what becomes of a call that is cut off.
func New(n int, r *rand.Rand) *Cluster {
	c := &Cluster{over: make(chan struct{}), r: r, state: newState(), term: 2,
		changed: make(chan struct{})}
	for i := range n {
		ln := bufconn.Listen(1 << 16)
		m := &Member{c: c, id: uint64(i) + 1, up: true, server: grpc.NewServer(),
			proxy: faultproxy.New(ln.Dial)}
		c.Members = append(c.Members, m)
		pb.RegisterKVServer(m.server, kv{m: m})
		pb.RegisterLeaseServer(m.server, leases{m: m})
		pb.RegisterWatchServer(m.server, watches{m: m})
		c.wg.Go(func() { _ = m.server.Serve(ln) })
	}

	c.leader = c.Members[r.IntN(n)]
	c.wg.Go(c.expire)
	return c
}

// Close ends the etcd, and all its connections and goroutines.
func (c *Cluster) Close() {
	close(c.over)
	for _, m := range c.Members {
		m.proxy.Close()
		m.server.Stop()
	}
	c.wg.Wait()
}

// do calls f with the mutex held, and wakes every goroutine that waits for a change.
func (c *Cluster) do(f func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f()
	c.changeLocked()
}

func (c *Cluster) changeLocked() { close(c.changed); c.changed = make(chan struct{}) }

// await waits until the function ready, which it calls with the mutex held, returns true. Then
// await returns true, and its caller must unlock the mutex. If the channel end is closed or the
// cluster ends first, await unlocks the mutex and returns false.
func (c *Cluster) await(ready func() bool, end <-chan struct{}) bool {
	for {
		c.mu.Lock()
		if ready() {
			return true
		}
		changed := c.changed
		c.mu.Unlock()
		select {
		case <-changed:
		case <-end:
			return false
		case <-c.over:
			return false
		}
	}
}

// upToLocked returns a random duration below d.
func (c *Cluster) upToLocked(d time.Duration) time.Duration {
	return time.Duration(c.r.Int64N(int64(d)))
}

func (c *Cluster) upTo(d time.Duration) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.upToLocked(d)
}

// quorumLocked reports whether the leader and a majority of the members work.
func (c *Cluster) quorumLocked() bool {
	return c.leader.worksLocked() && 2*len(c.workingLocked()) > len(c.Members)
}

// workingLocked returns the members that reach each other.
func (c *Cluster) workingLocked() (all []*Member) {
	for _, m := range c.Members {
		if m.worksLocked() {
			all = append(all, m)
		}
	}
	return all
}

// expire revokes leases whose terms have ended. Until Close, it looks for such leases once a tick.
func (c *Cluster) expire() {
	c.sleep(c.upTo(tick))
	for c.sleep(tick) {
		c.mu.Lock()
		if c.quorumLocked() && c.state.expire(time.Now()) {
			c.changeLocked()
		}
		c.mu.Unlock()
	}
}

// sleep waits for the duration d or until Close, and reports whether the cluster is still open.
func (c *Cluster) sleep(d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-c.over:
		return false
	}
}

// electLocked begins an election if there is no leader with a majority.
func (c *Cluster) electLocked() {
	if c.electing || c.quorumLocked() {
		return
	}
	c.electing = true
	timeout := time.Second + c.upToLocked(time.Second)
	c.wg.Go(func() {
		for c.sleep(timeout) {
			c.mu.Lock()
			if c.tryLocked() {
				c.electing = false
				c.changeLocked()
				c.mu.Unlock()
				return
			}
			timeout = 100*time.Millisecond + c.upToLocked(100*time.Millisecond)
			c.mu.Unlock()
		}
	})
}

// tryLocked elects a leader if a majority works. It reports whether there is a leader.
func (c *Cluster) tryLocked() bool {
	if c.quorumLocked() {
		return true // the old leader works again
	}
	working := c.workingLocked()
	if 2*len(working) <= len(c.Members) {
		return false
	}
	c.leadLocked(working[c.r.IntN(len(working))])
	return true
}

func (c *Cluster) leadLocked(m *Member) {
	c.leader = m
	c.term++
	c.state.promote()
}

// MoveLeader passes the leadership to another member, if another member can lead.
func (c *Cluster) MoveLeader() {
	c.do(func() {
		others := slices.DeleteFunc(c.workingLocked(),
			func(m *Member) bool { return m == c.leader })
		if c.quorumLocked() && len(others) > 0 {
			c.leadLocked(others[c.r.IntN(len(others))])
		}
	})
}

// Fill switches the alarm NOSPACE on or off. While it is on, puts and new leases fail.
func (c *Cluster) Fill(full bool) { c.do(func() { c.state.full = full }) }

// Skip ends every lease's term earlier by the duration d, as if this duration had passed.
func (c *Cluster) Skip(d time.Duration) {
	c.do(func() {
		for _, l := range c.state.leases {
			l.end = l.end.Add(-d)
		}
		if c.quorumLocked() {
			// during the skipped time, etcd would have revoked leases that ended a tick ago
			c.state.expire(time.Now().Add(-tick))
		}
	})
}

// Keys returns the names of all entries.
func (c *Cluster) Keys() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Sorted(maps.Keys(c.state.kvs))
}

// Leases returns the numbers of the leases. It leaves out a lease that has no entries and that a
// client tried to revoke before it was granted, because that grant came too late for the client.
func (c *Cluster) Leases() (all []int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for id, l := range c.state.leases {
		if !l.tardy || len(l.keys) > 0 {
			all = append(all, id)
		}
	}

	slices.Sort(all)
	return all
}

// patience is how long a member waits for the other members before it answers with an error.
const patience = 7 * time.Second
