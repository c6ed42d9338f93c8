package conformance

import (
	"fmt"
	"io"
	"net"
	"sync"
	"time"
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
type LinkState int

const (
	// Up carries everything.
	Up LinkState = iota

	// Slow holds every reply back for Delay.
	Slow

	// Deaf carries requests and loses their replies. The requests of this time
	// never get a reply.
	Deaf

	// Hung carries nothing and refuses nothing, like a pulled cable. Requests of
	// this time arrive when the link is Up again.
	Hung

	// Down ends connections and refuses new ones.
	Down
)

// Delay is how long a Slow link holds a reply back.
const Delay = 150 * time.Millisecond

// String returns "up", "slow", "deaf", "hung" or "down".
func (s LinkState) String() string {
	names := [...]string{"up", "slow", "deaf", "hung", "down"}
	if s < 0 || int(s) >= len(names) {
		return fmt.Sprintf("LinkState(%d)", int(s))
	}
	return names[s]
}

// TCP makes a Link to the TCP address target. The link listens on an address of
// its own on the loopback interface, and Store is that host:port. A hook may change
// Store to the form that Open takes.
func TCP(target string) (*Link, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p := &proxy{target: target, listener: l, pipes: map[*pipe]bool{}, changed: make(chan struct{})}
	p.wg.Go(p.accept)
	return &Link{Store: l.Addr().String(), Set: p.set, SetAfter: p.setAfter, Close: p.close}, nil
}

// proxy carries connections to target.
type proxy struct {
	target   string
	listener net.Listener
	wg       sync.WaitGroup

	mu      sync.Mutex // guards all below
	state   LinkState
	pipes   map[*pipe]bool
	changed chan struct{} // closed and replaced when state changes
	then    LinkState     // the state after the next left replies, if not Up
	left    int
	closed  bool
}

// pipe is one connection through a proxy. The proxy's mu guards deafened, which is
// true if a reply was lost. The client would take the next reply for the lost one,
// so the connection ends when the link is Up again.
type pipe struct {
	client, store net.Conn
	deafened      bool
}

func (p *proxy) set(s LinkState) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.then = Up
	p.setLocked(s)
}

// setAfter is [Link.SetAfter].
func (p *proxy) setAfter(replies int, s LinkState) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.setLocked(Up)
	p.then, p.left = s, replies
}

// replyLocked counts a reply for setAfter. It changes the state before the first
// reply that must not be carried.
func (p *proxy) replyLocked() {
	if p.then == Up {
		return
	}
	if p.left--; p.left < 0 {
		s := p.then
		p.then = Up
		p.setLocked(s)
	}
}

func (p *proxy) setLocked(s LinkState) {
	p.state = s
	close(p.changed)
	p.changed = make(chan struct{})
	for c := range p.pipes {
		if s == Down || c.deafened && s != Deaf {
			c.end()
		}
	}
}

func (p *proxy) close() {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.listener.Close()
	p.set(Down)
	p.wg.Wait()
}

func (p *proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		p.wg.Go(func() { p.serve(client) })
	}
}

func (p *proxy) serve(client net.Conn) {
	defer client.Close()
	if p.current() == Down {
		if t, ok := client.(*net.TCPConn); ok {
			t.SetLinger(0) // a reset, as near to a refusal as an accepted connection comes
		}
		return
	}

	store, err := net.Dial("tcp", p.target)
	if err != nil {
		return
	}

	c := &pipe{client: client, store: store}
	defer c.end()

	p.mu.Lock()
	ok := p.state != Down && !p.closed
	if ok {
		p.pipes[c] = true
	}
	p.mu.Unlock()
	if !ok {
		return
	}

	var both sync.WaitGroup
	both.Go(func() { defer c.end(); p.carry(c, client, store, false) })
	both.Go(func() { defer c.end(); p.carry(c, store, client, true) })
	both.Wait()

	p.mu.Lock()
	delete(p.pipes, c)
	p.mu.Unlock()
}

func (c *pipe) end() {
	c.client.Close()
	c.store.Close()
}

func (p *proxy) current() LinkState {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.state
}

// carry copies in one direction, as the state of the link allows.
func (p *proxy) carry(c *pipe, from io.Reader, to io.Writer, replies bool) {
	buf := make([]byte, 64<<10)
	for {
		n, err := from.Read(buf)
		if n > 0 && !p.pass(c, to, buf[:n], replies) {
			return
		}
		if err != nil {
			return
		}
	}
}

// pass forwards the bytes that were read, when the state allows it. It reports
// whether the connection goes on.
func (p *proxy) pass(c *pipe, to io.Writer, b []byte, replies bool) bool {
	for counted := false; ; {
		p.mu.Lock()
		if replies && !counted {
			counted = true
			p.replyLocked()
		}
		state, changed := p.state, p.changed
		if state == Deaf && replies {
			c.deafened = true
		}
		p.mu.Unlock()

		switch {
		case state == Down:
			return false
		case state == Hung:
			<-changed
			continue
		case state == Deaf && replies:
			return true
		case state == Slow && replies:
			time.Sleep(Delay)
		}

		_, err := to.Write(b)
		return err == nil
	}
}
