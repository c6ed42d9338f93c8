package conformance_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/memlock"
)

// message is one line between a remote driver and its server, either way.
type message struct {
	ID     uint64
	Op     string `json:",omitempty"`
	Claim  backend.Claim
	Key    []byte // of Claim: any bytes, which JSON strings are not
	Owner  []byte
	Fence  uint64         `json:",omitempty"`
	Status backend.Status `json:",omitzero"`
	Err    string         `json:",omitempty"`
	Kind   string         `json:",omitempty"`
}

var errorKinds = map[string]error{"held": backend.ErrHeld, "lost": backend.ErrLost, "invalid": backend.ErrInvalid}

// server lends a memlock store to other processes, over TCP. While it is
// stopped it ends connections as soon as they are made, and keeps its port.
type server struct {
	addr     string
	listener net.Listener

	mu       sync.Mutex // guards all below
	store    *memlock.Store
	runs     bool
	conns    map[net.Conn]bool
	commands int64
	keys     map[string]bool
	wg       sync.WaitGroup
}

func (s *server) start(data bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !data || s.store == nil {
		s.store, s.keys = memlock.NewStore(), map[string]bool{}
	}
	s.runs, s.conns = true, map[net.Conn]bool{}
	if s.listener != nil {
		return nil
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	s.addr, s.listener = l.Addr().String(), l
	go s.accept()
	return nil
}

func (s *server) accept() {
	for {
		c, err := s.listener.Accept()
		if err != nil {
			return
		}
		s.mu.Lock()
		if s.runs {
			s.conns[c] = true
			d := s.store.Driver()
			s.wg.Go(func() { s.serve(c, d) })
		} else {
			c.Close()
		}
		s.mu.Unlock()
	}
}

func (s *server) stop() {
	s.mu.Lock()
	s.runs = false
	for c := range s.conns {
		c.Close()
	}
	s.mu.Unlock()
	s.wg.Wait()
}

// kick ends all connections.
func (s *server) kick() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.conns {
		c.Close()
	}
}

func (s *server) close() {
	s.listener.Close()
	s.stop()
}

// Clients say that they live, and what is given to a waiter lasts only so long
// unless it says that it has heard.
const (
	heartbeat = 200 * time.Millisecond
	deadAfter = 20 * heartbeat
)

// serve answers one client, in order but for what it waits for. That ends with
// its connection.
func (s *server) serve(c net.Conn, d *memlock.Driver) {
	defer c.Close()
	var write sync.Mutex
	var calls sync.WaitGroup
	defer calls.Wait()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	waits := map[string]context.CancelFunc{}
	lines := bufio.NewScanner(c)
	for {
		c.SetReadDeadline(time.Now().Add(deadAfter))
		var m message
		if !lines.Scan() || json.Unmarshal(lines.Bytes(), &m) != nil {
			return
		}
		if m.Op == "ping" {
			continue
		}
		m.Claim.Key, m.Claim.Owner = string(m.Key), string(m.Owner)
		s.mu.Lock()
		s.commands++
		s.keys[m.Claim.Key] = true
		s.mu.Unlock()
		if m.Op == "cancel" {
			if stop := waits[m.Claim.Token]; stop != nil {
				stop()
			}
			continue
		}
		answer := func(ctx context.Context) {
			s.do(ctx, d, &m)
			b, _ := json.Marshal(m)
			write.Lock()
			defer write.Unlock()
			c.Write(append(b, '\n'))
		}
		if m.Op != "wait" {
			answer(ctx)
			continue
		}
		m.Claim.TTL = min(m.Claim.TTL, deadAfter)
		wctx, stop := context.WithCancel(ctx)
		waits[m.Claim.Token] = stop
		calls.Go(func() {
			defer stop()
			answer(wctx)
		})
	}
}

func (s *server) do(ctx context.Context, d *memlock.Driver, m *message) {
	var g backend.Grant
	var err error
	switch m.Op {
	case "acquire":
		g, err = d.Acquire(ctx, m.Claim)
	case "wait":
		g, err = d.Wait(ctx, m.Claim)
	case "renew":
		d.Renew(ctx, []backend.Claim{m.Claim}, func(_ int, _ backend.Grant, e error) { err = e })
	case "release":
		err = d.Release(ctx, m.Claim)
	case "inspect":
		m.Status, err = d.Inspect(ctx, m.Claim.Key)
	case "break":
		err = d.Break(ctx, m.Claim.Key)
	}
	m.Fence = g.Fence
	if err != nil {
		m.Err = err.Error()
		for kind, e := range errorKinds {
			if errors.Is(err, e) {
				m.Kind = kind
			}
		}
	}
}

func (s *server) entries() (all []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	d := s.store.Driver()
	for key := range s.keys {
		if st, err := d.Inspect(context.Background(), key); err == nil && (st.Held || len(st.Waiters) > 0) {
			all = append(all, fmt.Sprintf("%s: %+v", key, st))
		}
	}
	slices.Sort(all)
	return all
}

// remote is a driver on a server.
type remote struct {
	addr string

	mu     sync.Mutex // guards all below
	conn   net.Conn
	nextID uint64
	calls  map[uint64]chan message
	wg     sync.WaitGroup
}

var errBroken = errors.New("remote: connection broken")

// send writes a message, on a new connection if there is none, and returns
// where the reply will come. The channel is closed if none will.
func (r *remote) send(m message) (<-chan message, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.conn == nil {
		c, err := net.DialTimeout("tcp", r.addr, 10*time.Second)
		if err != nil {
			return nil, err
		}
		calls := map[uint64]chan message{}
		r.conn, r.calls = c, calls
		r.wg.Go(func() { r.read(c, calls) })
		go r.beat(c)
	}
	r.nextID++
	m.ID, m.Key, m.Owner = r.nextID, []byte(m.Claim.Key), []byte(m.Claim.Owner)
	reply := make(chan message, 1)
	r.calls[m.ID] = reply
	b, err := json.Marshal(m)
	if err == nil {
		r.conn.SetWriteDeadline(time.Now().Add(10 * time.Second))
		_, err = r.conn.Write(append(b, '\n'))
	}
	return reply, err
}

func (r *remote) beat(c net.Conn) {
	for err := error(nil); err == nil; time.Sleep(heartbeat) {
		r.mu.Lock()
		_, err = c.Write([]byte("{\"Op\":\"ping\"}\n"))
		r.mu.Unlock()
	}
}

func (r *remote) read(c net.Conn, calls map[uint64]chan message) {
	lines := bufio.NewScanner(c)
	for lines.Scan() {
		var m message
		if json.Unmarshal(lines.Bytes(), &m) != nil {
			break
		}
		r.mu.Lock()
		if reply := calls[m.ID]; reply != nil {
			reply <- m
			delete(calls, m.ID)
		}
		r.mu.Unlock()
	}
	c.Close()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.conn == c {
		r.conn = nil
	}
	for id, reply := range calls {
		close(reply)
		delete(calls, id)
	}
}

func (r *remote) call(ctx context.Context, op string, c backend.Claim) (message, error) {
	if ctx.Err() != nil {
		return message{}, ctx.Err()
	}
	reply, err := r.send(message{Op: op, Claim: c})
	if err != nil {
		return message{}, err
	}
	select {
	case m, ok := <-reply:
		if !ok {
			return m, errBroken
		}
		return m, m.error()
	case <-ctx.Done():
	}
	if op != "wait" {
		return message{}, ctx.Err()
	}
	// The server tells how the wait ended, unless it cannot be reached.
	if _, err := r.send(message{Op: "cancel", Claim: c}); err != nil {
		return message{}, err
	}
	select {
	case m, ok := <-reply:
		if !ok {
			return m, errBroken
		}
		return m, m.error()
	case <-time.After(c.Timeout):
		return message{}, ctx.Err()
	}
}

func (m message) error() error {
	if m.Err == "" {
		return nil
	}
	if e := errorKinds[m.Kind]; e != nil {
		return e
	}
	return errors.New(m.Err)
}

func (r *remote) Traits() backend.Traits {
	return backend.Traits{Ordered: true, Fenced: true, Reach: backend.Network}
}

func (r *remote) Acquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	m, err := r.call(ctx, "acquire", c)
	return backend.Grant{Fence: m.Fence}, err
}

// Wait has its grant confirmed, since it cannot know how long that was on the
// way.
func (r *remote) Wait(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	m, err := r.call(ctx, "wait", c)
	if err != nil {
		return backend.Grant{}, err
	}
	sent := time.Now()
	cctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.Timeout)
	defer cancel()
	if _, err := r.call(cctx, "renew", c); err != nil {
		r.call(cctx, "release", c)
		return backend.Grant{}, errBroken
	}
	return backend.Grant{Fence: m.Fence, Until: sent.Add(c.TTL - backend.Drift(c.TTL))}, nil
}

func (r *remote) Renew(ctx context.Context, cs []backend.Claim, done func(int, backend.Grant, error)) {
	backend.RenewEach(ctx, cs, done, func(ctx context.Context, c backend.Claim) (backend.Grant, error) {
		_, err := r.call(ctx, "renew", c)
		return backend.Grant{}, err
	})
}

func (r *remote) Release(ctx context.Context, c backend.Claim) error {
	_, err := r.call(ctx, "release", c)
	return err
}

func (r *remote) Inspect(ctx context.Context, key string) (backend.Status, error) {
	m, err := r.call(ctx, "inspect", backend.Claim{Key: key})
	return m.Status, err
}

func (r *remote) Break(ctx context.Context, key string) error {
	_, err := r.call(ctx, "break", backend.Claim{Key: key})
	return err
}

func (r *remote) Close() error {
	r.mu.Lock()
	if r.conn != nil {
		r.conn.Close()
	}
	r.mu.Unlock()
	r.wg.Wait()
	return nil
}
