package main

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"time"
)

// proxy is the way to a server, which can be slow or gone.
type proxy struct {
	dial func() (net.Conn, error)
	addr string
	wg   sync.WaitGroup

	mu    sync.Mutex        // guards all below
	ln    net.Listener      // nil while the proxy is down
	conns map[net.Conn]bool // both ends of all connections
	delay time.Duration     // of replies, on connections made from now on
}

// newProxy returns a proxy that is up. Where there are many loopback addresses
// it has one of its own: while it is down nobody else is given its port, least
// of all a client that calls it.
func newProxy(dial func() (net.Conn, error)) (*proxy, error) {
	p := &proxy{dial: dial, conns: map[net.Conn]bool{}}
	p.addr = fmt.Sprintf("127.%d.%d.%d:0", 1+rand.N(254), rand.N(256), 1+rand.N(254))
	if p.up() == nil {
		return p, nil
	}
	p.addr = "127.0.0.1:0"
	return p, p.up()
}

// up has the proxy accept connections.
func (p *proxy) up() error {
	ln, err := net.Listen("tcp", p.addr)
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ln, p.addr = ln, ln.Addr().String()
	p.wg.Go(func() {
		for {
			near, err := ln.Accept()
			if err != nil {
				return
			}
			p.serve(near)
		}
	})
	return nil
}

// down has connections refused, and cuts those there are.
func (p *proxy) down() {
	p.mu.Lock()
	if p.ln != nil {
		p.ln.Close()
		p.ln = nil
	}
	p.cut()
	p.mu.Unlock()
	p.wg.Wait()
}

// slow has every reply come late by d, however many are under way. It cuts
// the connections there are.
func (p *proxy) slow(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.delay = d
	p.cut()
}

// cut is called with mu held.
func (p *proxy) cut() {
	for c := range p.conns {
		c.Close()
	}
}

// serve passes on what a client and the server tell each other, until either
// has gone.
func (p *proxy) serve(near net.Conn) {
	far, err := p.dial()
	if err != nil {
		near.Close()
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ln == nil { // accepted before, too late for cut
		near.Close()
		far.Close()
		return
	}
	p.conns[near], p.conns[far] = true, true
	delay := p.delay
	p.wg.Go(func() {
		_, _ = io.Copy(far, near)
		p.forget(near, far)
	})
	p.wg.Go(func() {
		if delay > 0 {
			passLate(near, far, delay)
		} else {
			_, _ = io.Copy(near, far)
		}
		p.forget(near, far)
	})
}

func (p *proxy) forget(conns ...net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range conns {
		c.Close()
		delete(p.conns, c)
	}
}

// passLate writes what it reads when d has passed.
func passLate(to io.Writer, from io.Reader, d time.Duration) {
	type chunk struct {
		due  time.Time
		data []byte
	}
	chunks := make(chan chunk, 1<<10)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for c := range chunks {
			time.Sleep(time.Until(c.due))
			_, _ = to.Write(c.data) // if nobody is there, reading ends, too
		}
	}()
	for {
		buf := make([]byte, 4<<10)
		n, err := from.Read(buf)
		if n > 0 {
			chunks <- chunk{time.Now().Add(d), buf[:n]}
		}
		if err != nil {
			break
		}
	}
	close(chunks)
	<-done
}
