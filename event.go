package hasp

import "time"

// EventKind is the kind of an [Event].
type EventKind int

const (
	// EventAcquired: a caller got a lease, after Wait and Tries. Tries is 0 if the
	// hold was handed over in the line or re-entered.
	EventAcquired EventKind = iota + 1

	// EventRefused: a caller did not get a lease. Err says why.
	EventRefused

	// EventReleased: a lease was unlocked. Err is nil, or the error of the
	// Unlock if its outcome is unknown.
	EventReleased

	// EventLost: a lease ended before it was unlocked. Err is ErrLost or
	// ErrClosed.
	EventLost

	// EventRenewFailed: a renewal or an Extend failed or was not answered. A renewal is
	// tried again until the deadline. Err is the store's error.
	EventRenewFailed
)

var eventNames = [...]string{EventAcquired: "acquired", EventRefused: "refused", EventReleased: "released",
	EventLost: "lost", EventRenewFailed: "renew failed"}

// String returns the kind in lower-case words, such as "acquired".
func (k EventKind) String() string {
	if k < EventAcquired || int(k) >= len(eventNames) {
		return "unknown"
	}
	return eventNames[k]
}

// Event reports one change of a lock, for metrics, traces and logs. It has no token
// and no secret of the store.
type Event struct {
	Kind  EventKind
	Key   string        // as the caller gave it
	Owner string        // Options.Owner
	Fence uint64        // the lease's, or 0
	Wait  time.Duration // EventAcquired, EventRefused: how long the caller waited
	Hold  time.Duration // EventReleased, EventLost: how long the lease lasted
	Tries int           // EventAcquired, EventRefused: calls to the store; a driver's Wait is one call
	Err   error         // the reason, for the kinds that have one
}
