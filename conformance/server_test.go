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

// A client sends heartbeats. A grant to a waiter lasts only for deadAfter, unless the
// waiter confirms it.
const (
	heartbeat = 200 * time.Millisecond
	deadAfter = 20 * heartbeat
)

// session is one client's connection to a server.
type session struct {
	s     *server
	c     net.Conn
	d     *memlock.Driver
	waits map[string]context.CancelFunc // by token
	calls sync.WaitGroup                // of waits
	write sync.Mutex                    // guards writes to c
}

// serve answers one client until its connection ends. It answers in order, except
// for waits, which end with the connection.
func (s *server) serve(c net.Conn, d *memlock.Driver) {
	defer c.Close()
	ss := &session{s: s, c: c, d: d, waits: map[string]context.CancelFunc{}}
	defer ss.calls.Wait()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()

	for lines := bufio.NewScanner(c); ; {
		c.SetReadDeadline(time.Now().Add(deadAfter))
		var m message
		if !lines.Scan() || json.Unmarshal(lines.Bytes(), &m) != nil {
			return
		}
		if m.Op != "ping" {
			m.Claim.Key, m.Claim.Owner = string(m.Key), string(m.Owner)
			s.count(m.Claim.Key)
			ss.handle(ctx, m)
		}
	}
}

func (s *server) count(key string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.commands++
	s.keys[key] = true
}

func (ss *session) handle(ctx context.Context, m message) {
	switch m.Op {
	case "cancel":
		if stop := ss.waits[m.Claim.Token]; stop != nil {
			stop()
		}
	case "wait":
		m.Claim.TTL = min(m.Claim.TTL, deadAfter)
		ctx, stop := context.WithCancel(ctx)
		ss.waits[m.Claim.Token] = stop
		ss.calls.Go(func() {
			defer stop()
			ss.answer(ctx, m)
		})
	default:
		ss.answer(ctx, m)
	}
}

func (ss *session) answer(ctx context.Context, m message) {
	ss.s.do(ctx, ss.d, &m)
	b, _ := json.Marshal(m)
	ss.write.Lock()
	defer ss.write.Unlock()
	ss.c.Write(append(b, '\n'))
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
		var held *backend.HeldError
		m.Shared = errors.As(err, &held) && held.Shared
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
