package conformance

import (
	"net"
	"time"

	"github.com/hasplock/hasp/internal/faultproxy"
)

// Link is a connection path to the store. The suite can disturb this path.
type Link struct {
	// Store is the address of the store over this link, for Open.
	Store string

	// Set puts the link into a state. The state also applies to connections that exist already.
	Set func(LinkState)

	// SetAfter puts the link into state s when the link has carried the given number of replies.
	// State s already applies to the next reply: Deaf loses it, and Hung holds it back. A later Set
	// or SetAfter cancels a change that has not happened yet.
	//
	// The suite uses SetAfter to disturb each round trip of a call in turn. If it is nil, the
	// clauses that need it are skipped.
	SetAfter func(replies int, s LinkState)

	Close func()
}

// LinkState says how a Link treats requests and replies.
type LinkState string

const (
	// Up carries everything.
	Up LinkState = "up"

	// Slow holds every reply back for Delay.
	Slow LinkState = "slow"

	// Deaf carries requests and loses their replies for good.
	Deaf LinkState = "deaf"

	// Hung holds requests and replies back, like a pulled cable, until the link is Up again.
	Hung LinkState = "hung"

	// Down ends connections and refuses new ones.
	Down LinkState = "down"
)

// Delay is how long a Slow link holds a reply back.
const Delay = 150 * time.Millisecond

// TCP creates a Link to target, which is a TCP address. The link listens on the loopback interface,
// and its Store is the host:port where it listens. If Open expects another form of address,
// Harness.Link must change Store to that form.
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

// states has no entry for Up, because the zero State of a proxy carries everything.
var states = map[LinkState]faultproxy.State{Slow: {Delay: Delay}, Deaf: {Deaf: true},
	Hung: {Stalled: true}, Down: {Down: true}}
