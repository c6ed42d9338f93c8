package acceptance

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/conformance"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/internal/redistest/container"
	"github.com/hasplock/hasp/internal/strategytest"
)

// masters are independent containers.
type masters struct {
	servers []*container.Server
	addrs   []string // by which drivers reach them
}

func startMasters(t *testing.T, n int) *masters {
	m := &masters{}
	for range n {
		srv := container.Start(t)
		m.servers, m.addrs = append(m.servers, srv), append(m.addrs, srv.Addr)
	}
	return m
}

// proxy makes drivers reach server i through a proxy.
func (m *masters) proxy(t *testing.T, i int) (*faultproxy.Proxy, error) {
	p, err := faultproxy.Listen(func() (net.Conn, error) { return net.Dial("tcp", m.servers[i].Addr) })
	if err == nil {
		t.Cleanup(p.Close)
		m.addrs[i] = p.Addr()
	}
	return p, err
}

func (m *masters) url() string { return "redis://" + strings.Join(m.addrs, ",") }

// each calls f for all servers at once and returns the first error.
func (m *masters) each(f func(srv *container.Server) error) error {
	errs := make(chan error, len(m.servers))
	for _, srv := range m.servers {
		go func() { errs <- f(srv) }()
	}
	var first error
	for range m.servers {
		if err := <-errs; first == nil {
			first = err
		}
	}
	return first
}

// splits are clauses that redlock cannot keep, with the reason.
var splits = map[string]string{
	"history-refusals": "rivals that ask at the same moment may split the vote, and are refused although the key is free",
}

// overRedlock opens redlock with parameters of its own.
func overRedlock(p hasp.Params) func(ctx context.Context, store string) (backend.Driver, error) {
	return func(ctx context.Context, store string) (backend.Driver, error) {
		return hasp.Config{Strategy: "redlock", Nodes: []string{store}, Params: p}.Driver(ctx)
	}
}

// onThree starts three containers, which write every command to disk at once. The
// suite may stop, start and cut off all of them together.
func onThree(t *testing.T, h *conformance.Harness) {
	var m *masters
	var proxies []*faultproxy.Proxy
	h.Store = func(context.Context) (string, func(), error) {
		m = startMasters(t, 3)
		for i := range m.servers {
			p, err := m.proxy(t, i)
			if err != nil {
				return "", nil, err
			}
			proxies = append(proxies, p)
		}
		return m.url(), func() {}, nil
	}
	h.Open = overRedlock(hasp.Params{"durable": "true"})
	h.Stop = func(ctx context.Context, _ string) error {
		return m.each(func(srv *container.Server) error { return srv.Kill(ctx) })
	}
	h.Start = func(ctx context.Context, _ string, data bool) error {
		return m.each(func(srv *container.Server) error { return srv.Start(ctx, data) })
	}
	h.Link = strategytest.Link
	h.Cost = conformance.Cost{Acquire: 10.5, Renew: 4.5, Release: 3, Waiting: 36} // as in redlock's own test
	h.Commands = func(context.Context, string) (int64, error) {
		return redistest.Settled(func() (total int64) {
			for _, p := range proxies {
				total += p.Count()
			}
			return total
		}), nil
	}
	h.Cannot = splits
}

// onFive starts five containers. They need not write to disk, because they are
// never all stopped. Without the minority, one is down and one is slow.
func onFive(minority bool) func(t *testing.T, h *conformance.Harness) {
	return func(t *testing.T, h *conformance.Harness) {
		h.Store = func(ctx context.Context) (string, func(), error) {
			m := startMasters(t, 5)
			err := m.each(func(srv *container.Server) error {
				return command(srv, func(rdb *redis.Client) error { return rdb.ConfigSet(ctx, "appendonly", "no").Err() })
			})
			if err == nil && !minority {
				err = m.leaveThree(ctx, t)
			}
			if err != nil {
				return "", nil, err
			}
			return m.url(), func() {}, nil
		}
		h.Open = overRedlock(nil)
		h.Link = strategytest.Link
		h.Cannot = splits
		if !minority {
			h.Only = func(clause string) bool {
				return !slices.ContainsFunc(sameForAll, func(prefix string) bool { return strings.HasPrefix(clause, prefix) })
			}
		}
	}
}

// leaveThree leaves a bare majority of five. First all five vote once, which makes
// the set new: without that, the missing nodes might have seen other locks.
func (m *masters) leaveThree(ctx context.Context, t *testing.T) error {
	d, err := overRedlock(nil)(ctx, m.url())
	if err != nil {
		return err
	}
	defer d.Close()
	for i := 0; ; i++ {
		c := backend.Claim{Key: "mark", Token: fmt.Sprint("mark", i), TTL: time.Second, Timeout: 3 * time.Second}
		if _, err := d.Acquire(ctx, c); err == nil {
			_ = d.Release(ctx, c)
		}
		unmarked := m.each(func(srv *container.Server) error {
			return command(srv, func(rdb *redis.Client) error { return rdb.Get(ctx, "hasp:{redlock}:mark").Err() })
		})
		if unmarked == nil {
			break
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("a new set: %w", unmarked)
		case <-time.After(10 * time.Millisecond):
		}
	}
	slow, err := m.proxy(t, 4)
	if err != nil {
		return err
	}
	slow.Delay(200 * time.Millisecond)
	return m.servers[3].Kill(ctx)
}

// command calls f with a client of srv.
func command(srv *container.Server, f func(rdb *redis.Client) error) error {
	rdb := redis.NewClient(&redis.Options{Addr: srv.Addr, ContextTimeoutEnabled: true})
	defer rdb.Close()
	return f(rdb)
}

// TestRedlockConformsOnFive is TestEveryStrategyConforms on five nodes. It repeats
// the clauses that a minority could disturb with one node down and one node that
// takes 200 ms.
func TestRedlockConformsOnFive(t *testing.T) {
	needContainers(t)
	t.Parallel()
	for name, minority := range map[string]bool{"all well": true, "one down and one slow": false} {
		t.Run(name, func(t *testing.T) {
			var h conformance.Harness
			onFive(minority)(t, &h)
			conformance.Run(t, h)
		})
	}
}

// sameForAll are the begins of the names of clauses that do not depend on the
// number of nodes.
var sameForAll = []string{"keys-", "token-", "owners-", "traits-", "reentry", "reach", "process-"}
