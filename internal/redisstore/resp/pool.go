package resp

import (
	"context"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// Pool has the connections to one server.
type Pool struct {
	Addr string // for errors
	dial func(context.Context) (*Conn, error)
	room chan struct{} // has an element for each connection that is in use or being made

	open context.Context // ends with the Pool
	end  context.CancelFunc

	mu   sync.Mutex     // guards the fields below
	idle []*Conn        // the one that was used last is at the end
	all  map[*Conn]bool // those in use and idle, and those of Connect
}

// NewPool returns a Pool of up to size connections. dial makes one. The Pool ends with ctx. The
// caller must run CloseAtEnd on a goroutine.
func NewPool(ctx context.Context, addr string, size int, dial func(context.Context) (*Conn, error)) *Pool {
	p := &Pool{Addr: addr, dial: dial, room: make(chan struct{}, size), all: map[*Conn]bool{}}
	p.open, p.end = context.WithCancel(ctx)
	return p
}

// Close ends the Pool.
func (p *Pool) Close() { p.end() }

// CloseAtEnd waits until the Pool has ended. Then it closes all connections, also those that
// are in use.
func (p *Pool) CloseAtEnd() {
	<-p.open.Done()
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.all {
		c.Close()
	}
}

// Do sends commands over a connection of the Pool, as [Conn.Do] does. If it returns
// redis.ErrClosed, the Pool was closed and nothing was sent.
func (p *Pool) Do(ctx context.Context, replies []Reply, commands ...[]string) {
	c, err := p.Get(ctx)
	if err != nil {
		for i := range replies {
			replies[i].Err = err
		}
		return
	}
	p.Put(c, c.Do(ctx, replies, commands...))
}

// Get returns a connection for one caller, which returns it by Put.
func (p *Pool) Get(ctx context.Context) (*Conn, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if p.open.Err() != nil {
		return nil, redis.ErrClosed
	}
	select {
	case p.room <- struct{}{}:
	default:
		select {
		case p.room <- struct{}{}:
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-p.open.Done():
			return nil, redis.ErrClosed
		}
	}

	for c := p.takeIdle(); c != nil; c = p.takeIdle() {
		if c.isUsable() {
			return c, nil
		}
		p.Drop(c)
	}
	return p.getNew(ctx)
}

// takeIdle takes an idle connection. It returns nil if there is none.
func (p *Pool) takeIdle() *Conn {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := len(p.idle) - 1
	if n < 0 {
		return nil
	}
	c := p.idle[n]
	p.idle[n], p.idle = nil, p.idle[:n]
	return c
}

// staleTime is how long a dial goes on after its caller has left. It is short, because the dial
// uses room that other callers need, and may never get a reply.
const staleTime = time.Second

// getNew makes a connection. If the caller leaves, the next caller receives it. Otherwise callers
// with short deadlines would never get a connection to a distant server.
func (p *Pool) getNew(ctx context.Context) (*Conn, error) {
	type result struct {
		*Conn
		error
	}
	made := make(chan result)
	within, cancel := context.WithCancel(p.open)
	go func() {
		defer cancel()
		c, err := p.Connect(within)
		if err != nil {
			<-p.room
		}
		select {
		case made <- result{c, err}:
		case <-ctx.Done():
			if err == nil {
				p.Put(c, true)
			}
		}
	}()
	select {
	case r := <-made:
		return r.Conn, r.error
	case <-ctx.Done():
		time.AfterFunc(staleTime, cancel)
		return nil, ctx.Err()
	}
}

// Put takes back a connection that Get returned. good is false if it must not be used again.
func (p *Pool) Put(c *Conn, good bool) {
	if good {
		c.used = time.Now()
		p.mu.Lock()
		p.idle = append(p.idle, c)
		p.mu.Unlock()
	} else {
		p.Drop(c)
	}
	<-p.room // only now, so that the next caller finds c
}

// Connect makes a connection that does not count against the Pool's size. Drop closes it.
func (p *Pool) Connect(ctx context.Context) (*Conn, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(p.open, cancel)()
	c, err := p.dial(ctx)

	p.mu.Lock()
	defer p.mu.Unlock()
	if p.open.Err() != nil { // CloseAtEnd may not find c
		if err == nil {
			c.Close()
		}
		return nil, redis.ErrClosed
	}
	if err == nil {
		c.addr = p.Addr
		p.all[c] = true
		_ = c.base.SetDeadline(time.Time{}) // the deadline of the login would end a subscription
	}
	return c, err
}

// Drop closes a connection, and removes it from the Pool.
func (p *Pool) Drop(c *Conn) {
	c.Close()
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.all, c)
}

// Count returns how many connections there are, and how many are idle, for tests.
func (p *Pool) Count() (all, idle int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.all), len(p.idle)
}
