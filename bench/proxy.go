package main

import (
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// proxy is a way to a server that can be made slow, hang, or go down.
type proxy struct {
	l     net.Listener
	to    string
	delay atomic.Int64 // of what the server answers
	hung  atomic.Bool  // nothing arrives

	mu    sync.Mutex // guards conns and down
	conns []net.Conn
	down  bool
	wg    sync.WaitGroup
}

func newProxy(to string) (*proxy, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p := &proxy{l: l, to: to}
	p.wg.Go(p.accept)
	return p, nil
}

func (p *proxy) addr() string         { return p.l.Addr().String() }
func (p *proxy) slow(d time.Duration) { p.delay.Store(int64(d)) }
func (p *proxy) hang()                { p.hung.Store(true) }

// close drops all connections, and refuses new ones.
func (p *proxy) close() {
	p.l.Close()
	p.mu.Lock()
	p.down = true
	for _, c := range p.conns {
		c.Close()
	}
	p.conns = nil
	p.mu.Unlock()
	p.wg.Wait()
}

// keep notes a connection that close is to drop.
func (p *proxy) keep(c net.Conn) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.down {
		return errors.Join(net.ErrClosed, c.Close())
	}
	p.conns = append(p.conns, c)
	return nil
}

func (p *proxy) accept() {
	for {
		in, err := p.l.Accept()
		if err != nil || p.keep(in) != nil {
			return
		}
		p.wg.Go(func() {
			defer in.Close()
			out, err := net.Dial("tcp", p.to)
			if err != nil || p.keep(out) != nil {
				return
			}
			defer out.Close()
			p.wg.Go(func() {
				_, _ = io.Copy(unlessHung{p, out}, in)
				out.Close()
			})
			p.answer(in, out)
		})
	}
}

// unlessHung drops what is on its way to a server that hangs.
type unlessHung struct {
	p   *proxy
	out io.Writer
}

func (u unlessHung) Write(text []byte) (int, error) {
	if u.p.hung.Load() {
		return len(text), nil
	}
	return u.out.Write(text)
}

// answer hands on what the server says, so much later, without holding up
// what comes after.
func (p *proxy) answer(in, out net.Conn) {
	type piece struct {
		due  time.Time
		text []byte
	}
	pieces := make(chan piece, 1024)
	p.wg.Go(func() {
		for x := range pieces {
			time.Sleep(time.Until(x.due))
			if _, err := in.Write(x.text); err != nil {
				in.Close()
			}
		}
		in.Close()
	})
	defer close(pieces)
	for {
		buf := make([]byte, 4096)
		n, err := out.Read(buf)
		if n > 0 {
			pieces <- piece{time.Now().Add(time.Duration(p.delay.Load())), buf[:n]}
		}
		if err != nil {
			return
		}
	}
}
