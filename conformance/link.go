package conformance

import (
	"net"
	"time"

	"github.com/hasplock/hasp/internal/faultproxy"
)

// Link is a connection path to the store that the suite can disturb.
type Link struct {
	// Store is the address of the store over this link, for Open.
	Store string

	// Set puts the link into a state, also for connections that exist already.
	Set func(LinkState)

	// SetAfter carries the next replies, as many as it is given, and then puts
	// the link into state s. In state Deaf the following reply is the first one
	// that is lost; in state Hung it is the first one that is held back. Until
	// then requests are carried. A later Set or SetAfter cancels a change that
	// has not happened yet.
	//
	// A call may take several round trips. SetAfter disturbs each in turn. If
	// it is nil, the clauses that need it are skipped.
	SetAfter func(replies int, s LinkState)

	// Close ends the link.
	Close func()
}

// LinkState is how a Link behaves.
type LinkState string

const (
	// Up carries everything.
	Up LinkState = "up"

	// Slow holds every reply back for Delay.
	Slow LinkState = "slow"

	// Deaf carries requests and loses their replies. The requests of this time
	// never get a reply.
	Deaf LinkState = "deaf"

	// Hung carries nothing and refuses nothing, like a pulled cable. Requests of
	// this time arrive when the link is Up again.
	Hung LinkState = "hung"

	// Down ends connections and refuses new ones.
	Down LinkState = "down"
)

// Delay is how long a Slow link holds a reply back.
const Delay = 150 * time.Millisecond

// TCP makes a Link to the TCP address target. The link listens on an address of
// its own on the loopback interface, and Store is that host:port. A hook may change
// Store to the form that Open takes.
func TCP(target string) (*Link, error) {
	p, err := faultproxy.Listen(func() (net.Conn, error) { return net.Dial("tcp", target) })
	if err != nil {
		return nil, err
	}
	return &Link{
		Store:    p.Addr(),
		Set:      func(s LinkState) { p.Set(states[s]) },
		SetAfter: func(replies int, s LinkState) { p.SetAfter(replies, states[s]) },
		Close:    p.Close,
	}, nil
}

var states = map[LinkState]faultproxy.State{Slow: {Delay: Delay}, Deaf: {Deaf: true}, Hung: {Stalled: true}, Down: {Down: true}}
