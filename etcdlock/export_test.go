package etcdlock

import (
	"sync/atomic"
	"time"
)

// Driver is the type of the drivers.
type Driver = driver

// Member returns the endpoint of the member in use, or "".
func (d *driver) Member() string {
	m := d.cluster.inUse()
	if m == nil {
		return ""
	}
	return shown(m.endpoint)
}

// Connection identifies the connection in use.
func (d *driver) Connection() any { return d.cluster.inUse() }

// CutMember closes the connection to the member in use, so that each call on it fails at once.
func (d *driver) CutMember() {
	d.cluster.inUse().client.ActiveConnection().Close()
}

// LeaveInSearch begins a search and gives up the member in use when it has answered the search.
// It calls pause before and resume after the search has begun. It returns what the method silence
// returns when the search has ended.
func (d *driver) LeaveInSearch(pause func() (resume func())) (silent time.Time, err error) {
	c := d.cluster
	resume := pause()
	c.mu.Lock()
	m := c.current
	s := c.searchLocked()
	c.mu.Unlock()
	time.Sleep(100 * time.Millisecond) // the question is sent

	c.mu.Lock() // the search cannot end
	resume()
	time.Sleep(300 * time.Millisecond) // the answer comes
	c.current = nil
	c.mu.Unlock()
	m.client.Close()
	<-s
	return c.silence()
}

// Idle returns how many leases the pool has.
func (d *driver) Idle() int {
	d.pool.mu.Lock()
	defer d.pool.mu.Unlock()
	n := 0
	for _, ls := range d.pool.idle {
		n += len(ls)
	}
	return n
}

// Burials returns how many leases are still to be ended.
func (d *driver) Burials() int { return int(d.active.Load()) }

// CheckVersion is checkVersion.
func CheckVersion(version string, user bool) error { return checkVersion(version, user) }

// Suspendable returns a function that makes d's clock see that the machine has slept for
// some more time. It is called before the first claim.
func Suspendable(d *driver) func(time.Duration) {
	before := d.clock.suspended
	var slept atomic.Int64
	d.clock.suspended = func() time.Duration { return before() + time.Duration(slept.Load()) }
	return func(t time.Duration) { slept.Add(int64(t)) }
}

// MaxFlights is maxFlights.
const MaxFlights = maxFlights

// Waiting returns how many changes wait for a flight.
func (d *driver) Waiting() int {
	d.changes.mu.Lock()
	defer d.changes.mu.Unlock()
	return len(d.changes.waiting)
}

// Unchanged is unchanged.
func Unchanged(err error) bool { return unchanged(err) }
