// Package faultproxy is a proxy between clients and a server. It counts commands and injects
// faults, for tests, for the torture of lab and for benchmarks.
package faultproxy

import (
	"context"
	"net"
	"slices"
	"strings"
	"sync"
	"time"
)

// Fault is what a [Proxy] does to one command.
type Fault int

const (
	// LoseReply lets the server execute the command. The proxy closes the connection instead of
	// passing on the reply.
	LoseReply Fault = iota + 1

	// HangReply lets the server execute the command. The client receives neither the reply nor any
	// later reply on that connection.
	HangReply

	// LoseRequest closes the connection before the server receives the command.
	LoseRequest

	// The fault answer belongs to the method Answer. The fault deaf belongs to a Deaf State.
	answer
	deaf

	// HoldRequest holds back the command and all later commands on that connection. It does so
	// until Release, even if the client disconnects.
	HoldRequest
)

// State is how a [Proxy] treats all connections. The zero State lets everything pass.
type State struct {
	Delay   time.Duration // by how much each reply is late
	Deaf    bool          // replies are lost; the end of the state closes connections that lost one
	Stalled bool          // no bytes pass, as with [Proxy.Stall]
	Down    bool          // there are no connections, as with [Proxy.Down]
}

// Proxy is a proxy between clients and a server. Its methods may be called at any time, by any
// goroutine.
type Proxy struct {
	dial func() (net.Conn, error)
	ln   net.Listener

	mu       sync.Mutex // guards the fields below
	conns    map[*conn]bool
	rules    []rule
	count    int64    // how many commands clients have sent
	record   bool     // set by the first call of Commands
	commands []string // the commands since the last call of Commands

	// in is closed while requests flow, and out while replies flow.
	in, out chan struct{}

	release     chan struct{} // Release closes and replaces it
	delay       time.Duration
	down        bool
	deaf        bool
	nextState   *State // the state after repliesLeft more replies; nil if none is set
	repliesLeft int
	wg          sync.WaitGroup
}

// rule is a fault for commands whose text contains match.
type rule struct {
	match   string
	fault   Fault
	reply   string        // the reply that Answer was given
	release chan struct{} // closed by the next Release
}

// New returns a proxy to the server that dial connects to. Clients reach the proxy by Dialer, or at
// the listener that is passed to Serve.
func New(dial func() (net.Conn, error)) *Proxy {
	p := &Proxy{
		dial:    dial,
		conns:   map[*conn]bool{},
		in:      make(chan struct{}),
		out:     make(chan struct{}),
		release: make(chan struct{}),
	}

	close(p.in)
	close(p.out)
	return p
}

// Listen returns a proxy that listens on a free port of the loopback interface.
func Listen(dial func() (net.Conn, error)) (*Proxy, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p := New(dial)
	p.Serve(ln)
	return p, nil
}

// Serve accepts connections from ln in the background. Close closes ln.
func (p *Proxy) Serve(ln net.Listener) {
	p.ln = ln
	p.wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			p.serve(c)
		}
	})
}

// Addr returns the address of the listener.
func (p *Proxy) Addr() string { return p.ln.Addr().String() }

// Dialer returns a function for redis.Options.Dialer. It connects through the proxy without a
// listener. If the proxy's own dial works inside testing/synctest, so does Dialer.
func (p *Proxy) Dialer() func(ctx context.Context, network, addr string) (net.Conn, error) {
	return func(ctx context.Context, _, _ string) (net.Conn, error) {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		near, far := net.Pipe()
		p.serve(far)
		return near, nil
	}
}

func (p *Proxy) locked(f func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f()
}

// Fail makes the fault f happen to the next command whose text contains match. The text is the
// arguments, joined by spaces. If a connection does not carry commands of Redis, the next bytes
// count as a command with an empty text. Faults with the same match happen to one command each, in
// order.
func (p *Proxy) Fail(match string, f Fault) { p.add(rule{match: match, fault: f}) }

// Answer makes the proxy answer each command whose text contains match, until Forgive. The answer
// is reply, which may be any bytes. The server does not receive these commands.
func (p *Proxy) Answer(match, reply string) {
	p.add(rule{match: match, fault: answer, reply: reply})
}

func (p *Proxy) add(r rule) { p.locked(func() { p.rules = append(p.rules, r) }) }

// Conns returns how many connections are open.
func (p *Proxy) Conns() (n int) { p.locked(func() { n = len(p.conns) }); return n }

// Pending returns how many faults have not happened yet.
func (p *Proxy) Pending() (n int) { p.locked(func() { n = len(p.rules) }); return n }

// Forgive removes the faults that have not happened yet, and all answers.
func (p *Proxy) Forgive() { p.locked(func() { p.rules = nil }) }

// Commands returns the commands that clients have sent since the last call of Commands, without
// those that set up a connection. The first call starts the recording and returns nothing.
func (p *Proxy) Commands() (all []string) {
	p.locked(func() { all = p.commands; p.commands, p.record = nil, true })
	return all
}

// Count returns how many commands clients have sent, without those that set up a connection.
func (p *Proxy) Count() (n int64) { p.locked(func() { n = p.count }); return n }

// Stall stops all bytes in both directions. Connections stay, and new ones are accepted.
func (p *Proxy) Stall() { p.StallRequests(); p.StallReplies() }

// StallRequests stops the bytes from clients.
func (p *Proxy) StallRequests() { p.locked(func() { stop(&p.in) }) }

// StallReplies stops the bytes from the server.
func (p *Proxy) StallReplies() { p.locked(func() { stop(&p.out) }) }

func stop(flow *chan struct{}) {
	if isClosed(*flow) {
		*flow = make(chan struct{})
	}
}

// Flow undoes Stall, StallRequests and StallReplies.
func (p *Proxy) Flow() { p.locked(p.flowLocked) }

func (p *Proxy) flowLocked() {
	for _, flow := range []chan struct{}{p.in, p.out} {
		if !isClosed(flow) {
			close(flow)
		}
	}
}

// Release passes on the commands that HoldRequest holds back.
func (p *Proxy) Release() { p.locked(p.releaseLocked) }

func (p *Proxy) releaseLocked() { close(p.release); p.release = make(chan struct{}) }

// Delay delays every reply by d.
func (p *Proxy) Delay(d time.Duration) { p.locked(func() { p.delay = d }) }

// Set puts the proxy into state s. It cancels an earlier SetAfter.
func (p *Proxy) Set(s State) { p.locked(func() { p.setLocked(s) }) }

// SetAfter lets all bytes pass. After the given number of replies, it puts the proxy into state s.
func (p *Proxy) SetAfter(replies int, s State) {
	p.locked(func() {
		p.setLocked(State{})
		p.nextState = &s
		p.repliesLeft = replies
	})
}

func (p *Proxy) setLocked(s State) {
	p.nextState = nil
	p.delay = s.Delay
	p.deaf = s.Deaf
	p.down = s.Down

	for c := range p.conns {
		if s.Down || !s.Deaf && Fault(c.fault.Load()) == deaf {
			c.close()
		}
	}

	if p.flowLocked(); s.Stalled {
		stop(&p.in)
		stop(&p.out)
	}
}

// The method replied counts a reply for SetAfter. It reports whether the reply must be lost.
func (p *Proxy) replied() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.nextState != nil {
		if p.repliesLeft--; p.repliesLeft < 0 {
			p.setLocked(*p.nextState)
		}
	}

	return p.deaf
}

// Forget stops all bytes on the present connections. Neither end learns of this.
func (p *Proxy) Forget() {
	p.locked(func() {
		for c := range p.conns {
			c.forgotten.Store(true)
		}
	})
}

// Cut closes all connections.
func (p *Proxy) Cut() { p.locked(p.cutLocked) }

func (p *Proxy) cutLocked() {
	for c := range p.conns {
		c.close()
	}
}

// Down closes all connections. Until Up, it also closes new connections as soon as they are made.
func (p *Proxy) Down() { p.locked(p.downLocked) }

func (p *Proxy) downLocked() { p.down = true; p.cutLocked() }

// Up undoes Down.
func (p *Proxy) Up() { p.locked(func() { p.down = false }) }

// Close ends the proxy and its goroutines.
func (p *Proxy) Close() {
	if p.ln != nil {
		p.ln.Close()
	}
	p.locked(func() {
		p.downLocked()
		p.flowLocked()
		p.releaseLocked()
	})

	p.wg.Wait()
}

// judge counts and records a command, and returns the rule that applies to it. For bytes that are
// not a command, args is nil.
func (p *Proxy) judge(args []string) rule {
	text := strings.Join(args, " ")
	p.mu.Lock()
	defer p.mu.Unlock()
	name, _, _ := strings.Cut(strings.ToLower(text), " ")

	switch name {
	case "", "hello", "auth", "select", "client":
	default:
		if p.count++; p.record {
			p.commands = append(p.commands, text)
		}
	}

	for i, r := range p.rules {
		if strings.Contains(text, r.match) {
			if r.fault != answer {
				p.rules = slices.Delete(p.rules, i, i+1)
			}

			r.release = p.release
			return r
		}
	}

	return rule{}
}

func isClosed(c chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
