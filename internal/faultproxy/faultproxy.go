// Package faultproxy stands between clients and a server, counts what passes
// and fails as it is told: for tests, torture and benchmarks.
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
	// LoseReply has the server carry the command out; instead of the reply
	// the client sees its connection cut.
	LoseReply Fault = iota + 1

	// HangReply has the server carry the command out; the reply, and all
	// after it on that connection, never comes.
	HangReply

	// LoseRequest cuts the connection before the server has the command.
	LoseRequest

	// answer is what Answer does.
	answer

	// HoldRequest keeps the command, and all after it on that connection,
	// from the server until Release, even if the client has gone meanwhile.
	HoldRequest
)

// Proxy stands between clients and a Redis, counts commands and fails where
// it is told to. All its methods may be called at any time.
type Proxy struct {
	dial func() (net.Conn, error)
	ln   net.Listener

	mu       sync.Mutex // guards all below
	conns    map[*conn]bool
	rules    []rule
	count    int64
	record   bool
	commands []string
	in, out  chan struct{} // closed while requests and replies flow
	release  chan struct{} // closed by Release
	delay    time.Duration
	trickle  time.Duration
	down     bool
	closed   bool
	wg       sync.WaitGroup
}

type rule struct {
	match string
	fault Fault
	promise
	release chan struct{} // closed by the Release that ends a HoldRequest
}

// New returns a proxy to what dial connects to. Clients reach it by Dialer, or
// where Serve has it listen.
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

// Serve has the proxy accept connections from ln, which Close closes.
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

// Addr is where the proxy listens.
func (p *Proxy) Addr() string { return p.ln.Addr().String() }

// Dialer connects through the proxy without a listener, for
// redis.Options.Dialer; it works inside testing/synctest if the proxy's own
// dial does.
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

// Fail does f to the next command whose text contains match: its arguments,
// joined by spaces. Faults of equal match happen one after another.
func (p *Proxy) Fail(match string, f Fault) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rules = append(p.rules, rule{match: match, fault: f})
}

// Answer has all commands whose text contains match answered with reply, which
// may be any bytes, until Forgive. The server does not see them.
func (p *Proxy) Answer(match, reply string) { p.answer(match, promise{reply: reply}) }

// LastWords is Answer, after which the connection is cut.
func (p *Proxy) LastWords(match, reply string) { p.answer(match, promise{reply: reply, last: true}) }

func (p *Proxy) answer(match string, what promise) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rules = append(p.rules, rule{match: match, fault: answer, promise: what})
}

// Say has the server say something of its own accord, on all connections.
func (p *Proxy) Say(text string) {
	p.mu.Lock()
	all := slices.Collect(maps.Keys(p.conns))
	p.mu.Unlock()
	for _, c := range all {
		c.say([]byte(text))
	}
}

// Pending returns how many faults have not happened yet.
func (p *Proxy) Pending() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.rules)
}

// Forgive takes back the faults that have not happened yet.
func (p *Proxy) Forgive() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rules = nil
}

// Commands returns the commands that clients have sent since the last call,
// without those that set a connection up. The first call begins the record.
func (p *Proxy) Commands() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := p.commands
	p.commands, p.record = nil, true
	return all
}

// Count returns how many commands there were so far, without those that set a
// connection up.
func (p *Proxy) Count() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.count
}

// Stall stops all bytes, both ways; connections stay, and new ones are taken.
func (p *Proxy) Stall() {
	p.StallRequests()
	p.StallReplies()
}

// StallRequests stops what clients say.
func (p *Proxy) StallRequests() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if isClosed(p.in) {
		p.in = make(chan struct{})
	}
}

// StallReplies stops what the server says.
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

// Release lets the commands go on that HoldRequest has kept.
func (p *Proxy) Release() {
	p.mu.Lock()
	defer p.mu.Unlock()
	close(p.release)
	p.release = make(chan struct{})
}

// Delay has every reply wait for d.
func (p *Proxy) Delay(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.delay = d
}

// Trickle has what either side says at once arrive in pieces, the last of them
// after d.
func (p *Proxy) Trickle(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.trickle = d
}

// Cut ends all connections there are.
func (p *Proxy) Cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		c.close()
	}
}

// Down cuts all connections, and new ones as soon as they are made.
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
	p.down, p.closed = true, true
	p.open()
	close(p.release)
	p.release = make(chan struct{})
	p.mu.Unlock()
	p.Cut()
	p.wg.Wait()
}

// judge returns the rule for a command, and remembers the command.
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
