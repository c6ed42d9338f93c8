package fairlock

import "github.com/hasplock/hasp/backend"

// A place whose claim stays outlives the Wait that took it: its waiter goes on
// hearing and being looked for, and the next Wait with that claim goes on with
// it.

// staysOn keeps w for another Wait, and reports whether it did.
func (d *Driver) staysOn(w *waiter) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !w.c.Stays || d.closed {
		return false
	}
	d.stayed[w.c.Token] = w
	return true
}

// stayedOn returns the waiter of c that was kept, if there is one.
func (d *Driver) stayedOn(c backend.Claim) *waiter {
	if !c.Stays {
		return nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	w := d.stayed[c.Token]
	delete(d.stayed, c.Token)
	return w
}
