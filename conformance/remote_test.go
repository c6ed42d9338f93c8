package conformance_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"net"
	"sync"
	"time"

	"github.com/hasplock/hasp/backend"
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
	Shared bool           `json:",omitempty"` // a shared hold refused the claim
}

var errorKinds = map[string]error{"held": backend.ErrHeld, "lost": backend.ErrLost, "invalid": backend.ErrInvalid}

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
	// The server replies how the wait ended, unless it cannot be reached.
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
	if m.Shared {
		return &backend.HeldError{Shared: true}
	}
	if e := errorKinds[m.Kind]; e != nil {
		return e
	}
	return errors.New(m.Err)
}

func (r *remote) Traits() backend.Traits {
	return backend.Traits{Ordered: true, Fenced: true, Keeps: true, Shared: true, Reach: backend.Network}
}

func (r *remote) Acquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	m, err := r.call(ctx, "acquire", c)
	return backend.Grant{Fence: m.Fence}, err
}

// Wait renews a grant before it returns it, because it does not know how old the
// grant is.
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
