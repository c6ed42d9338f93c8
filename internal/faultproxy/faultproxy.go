// Package faultproxy is a proxy between clients and a server. It counts commands
// and injects faults, for tests, torture and benchmarks.
package faultproxy

import (
	"context"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"time"
)

// Fault is what a [Proxy] does to one command.
type Fault int

const (
	// LoseReply lets the server execute the command, and cuts the connection
	// instead of the reply.
	LoseReply Fault = iota + 1

	// HangReply lets the server execute the command. The client never gets the
	// reply, nor any later reply on that connection.
	HangReply

	// LoseRequest cuts the connection before the server gets the command.
	LoseRequest

	// answer is the fault of Answer.
	answer

	// HoldRequest holds back the command, and all later ones on that connection,
	// until Release, even if the client disconnects.
	HoldRequest
)

// Proxy is a proxy between clients and a Redis. Its methods may be called at any
// time.
type Proxy struct {
	dial func() (net.Conn, error)
	ln   net.Listener

	mu       sync.Mutex // guards all below
	conns    map[*conn]bool
	rules    []rule
	count    int64         // of commands
	record   bool          // keep commands
	commands []string      // since the last call of Commands
	in, out  chan struct{} // closed while requests and replies flow
	release  chan struct{} // closed by Release
	delay    time.Duration
	trickle  time.Duration
	down     bool
	wg       sync.WaitGroup
}

// rule is a fault for commands whose text contains match.
type rule struct {
	match string
	fault Fault
	promise
	release chan struct{} // closed by the Release that ends a HoldRequest
}

// New returns a proxy to the server that dial connects to. Clients reach it by
// Dialer, or by the listener that Serve gets.
func New(dial func() (net.Conn, error)) *Proxy {
	p := &Proxy{dial: dial, conns: map[*conn]bool{}, in: make(chan struct{}), out: make(chan struct{}), release: make(chan struct{})}
	close(p.in)
	close(p.out)
	return p
}

// Listen returns a proxy that listens on a port of its own on the loopback
// interface.
func Listen(dial func() (net.Conn, error)) (*Proxy, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p := New(dial)
	p.Serve(ln)
	return p, nil
}

// Serve accepts connections from ln. Close closes ln.
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

// Dialer returns a function for redis.Options.Dialer that connects through the
// proxy without a listener. It works inside testing/synctest if the proxy's dial
// does.
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

// Fail makes the next command fail whose text contains match. The text is the
// arguments, joined by spaces. Faults with the same match happen one after another.
func (p *Proxy) Fail(match string, f Fault) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rules = append(p.rules, rule{match: match, fault: f})
}

// Answer answers all commands whose text contains match with reply, until Forgive.
// reply may be any bytes. The server does not get these commands.
func (p *Proxy) Answer(match, reply string) { p.answer(match, promise{reply: reply}) }

// LastWords is Answer, but cuts the connection after the reply.
func (p *Proxy) LastWords(match, reply string) { p.answer(match, promise{reply: reply, last: true}) }

func (p *Proxy) answer(match string, reply promise) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rules = append(p.rules, rule{match: match, fault: answer, promise: reply})
}

// Say sends bytes to all clients, as if the server had sent them unasked.
func (p *Proxy) Say(text string) {
	p.mu.Lock()
	all := slices.Collect(maps.Keys(p.conns))
	p.mu.Unlock()
	for _, c := range all {
		c.send([]byte(text))
	}
}

// Pending returns how many faults have not happened yet.
func (p *Proxy) Pending() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.rules)
}

// Forgive removes the faults that have not happened yet.
func (p *Proxy) Forgive() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rules = nil
}

// Commands returns the commands that clients have sent since the last call,
// without those that set up a connection. The first call starts the recording.
func (p *Proxy) Commands() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := p.commands
	p.commands, p.record = nil, true
	return all
}

// Count returns how many commands clients have sent, without those that set up a
// connection.
func (p *Proxy) Count() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.count
}

// Stall stops all bytes in both directions. Connections stay, and new ones are
// accepted.
func (p *Proxy) Stall() {
	p.StallRequests()
	p.StallReplies()
}

// StallRequests stops the bytes from clients.
func (p *Proxy) StallRequests() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if isClosed(p.in) {
		p.in = make(chan struct{})
	}
}

// StallReplies stops the bytes from the server.
func (p *Proxy) StallReplies() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if isClosed(p.out) {
		p.out = make(chan struct{})
	}
}

// Flow ends Stall, StallRequests and StallReplies.
func (p *Proxy) Flow() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.open()
}

func (p *Proxy) open() {
	for _, c := range []chan struct{}{p.in, p.out} {
		if !isClosed(c) {
			close(c)
		}
	}
}

// Release passes on the commands that HoldRequest holds back.
func (p *Proxy) Release() {
	p.mu.Lock()
	defer p.mu.Unlock()
	close(p.release)
	p.release = make(chan struct{})
}

// Delay delays every reply by d.
func (p *Proxy) Delay(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.delay = d
}

// Trickle splits each command and each piece of replies into parts, of which the
// last arrives after d.
func (p *Proxy) Trickle(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.trickle = d
}

// Cut closes all connections.
func (p *Proxy) Cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		c.close()
	}
}

// Down closes all connections, and new ones as soon as they are made.
func (p *Proxy) Down() {
	p.mu.Lock()
	p.down = true
	p.mu.Unlock()
	p.Cut()
}

// Up ends Down.
func (p *Proxy) Up() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.down = false
}

// Close ends the proxy and its goroutines.
func (p *Proxy) Close() {
	if p.ln != nil {
		p.ln.Close()
	}
	p.mu.Lock()
	p.down = true
	p.open()
	close(p.release)
	p.release = make(chan struct{})
	p.mu.Unlock()
	p.Cut()
	p.wg.Wait()
}

// judge returns the rule for a command, and counts and records the command.
func (p *Proxy) judge(args []string) rule {
	if len(args) == 0 {
		return rule{}
	}
	text := strings.Join(args, " ")
	p.mu.Lock()
	defer p.mu.Unlock()
	switch strings.ToLower(args[0]) {
	case "hello", "auth", "select", "client":
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
