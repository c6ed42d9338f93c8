package pubsub

import "time"

// channel describes a channel that has listeners, or whose last listener was closed a moment ago.
type channel struct {
	name, slotKey string
	listeners     []*Listener
	state         state
	link          *link     // nil while the server is not known
	idle          time.Time // when the last listener was closed
}

// state is the state of a channel's subscription.
type state int

const (
	isPending   state = iota // the server has not answered yet
	isConfirmed              // the server has confirmed it
	isRefused                // the server has refused it
)

// settleLocked lets the calls of Subscribe that wait for ch return err. It returns the other
// Listeners, whose calls have returned before.
func (ch *channel) settleLocked(err error) (others []*Listener) {
	for _, l := range ch.listeners {
		if l.done {
			others = append(others, l)
		}
		l.settleLocked(err)
	}
	return others
}
