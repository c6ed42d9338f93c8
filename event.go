package hasp

import "time"

// EventKind says what an [Event] tells of.
type EventKind int

const (
	// EventAcquired: a caller was given a lease. Wait and Tries say what it
	// took; Tries is 0 if the hold was taken over from the one before in line
	// or re-entered.
	EventAcquired EventKind = iota + 1

	// EventRefused: a caller was not given a lease. Err says why.
	EventRefused

	// EventReleased: a lease was unlocked. Err is nil, or the error of an
	// Unlock whose outcome is unknown.
	EventReleased

	// EventLost: a lease ended before it was unlocked. Err is ErrLost or
	// ErrClosed.
	EventLost

	// EventRenewFailed: one try to renew a hold failed or was not answered;
	// it is repeated until the deadline. Err is the store's error.
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

// Event is one thing that happened to a lock, for metrics, traces and logs.
// It carries no token and no secret of the store.
type Event struct {
	Kind  EventKind
	Key   string        // as the caller gave it
	Owner string        // label of this Client
	Fence uint64        // of the lease, if it has one
	Wait  time.Duration // EventAcquired, EventRefused: how long the caller waited
	Hold  time.Duration // EventReleased, EventLost: how long the lease lasted
	Tries int           // EventAcquired, EventRefused: calls to the store; one Wait of a driver counts as one
	Err   error         // why, for the kinds that have a reason
}
