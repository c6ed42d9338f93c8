package acceptance

import (
	"context"
	"errors"
	"net"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/conformance"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/internal/redistest/container"
	"github.com/hasplock/hasp/internal/strategytest"
)

// servers are independent servers, each with a proxy in front of it, which counts commands.
type servers struct {
	all     []server
	proxies []*faultproxy.Proxy
}

// server is a Redis that writes each command to a file, so that its data survives a kill.
type server struct {
	addr  string
	stop  func(ctx context.Context) error
	start func(ctx context.Context, data bool) error
}

// startServers starts n servers: containers in runs with containers, else processes.
func startServers(t *testing.T, n int) (*servers, error) {
	m := &servers{}
	for range n {
		var srv server
		if os.Getenv(redistest.Env) == "container" {
			c := container.Start(t)
			srv = server{c.Addr, c.Kill, c.Start}
		} else {
			p := redistest.Start(t, &redistest.Options{Own: true, Real: true, Keep: true})
			srv = server{p.Addr, func(context.Context) error { return p.Stop() }, func(_ context.Context, data bool) error { return p.Start(data) }}
		}
		proxy, err := faultproxy.Listen(func() (net.Conn, error) { return net.Dial("tcp", srv.addr) })
		if err != nil {
			return nil, err
		}
		t.Cleanup(proxy.Close)
		m.all, m.proxies = append(m.all, srv), append(m.proxies, proxy)
	}
	return m, nil
}

// url returns the URL of all servers through their proxies.
func (m *servers) url() string {
	addrs := make([]string, len(m.proxies))
	for i, p := range m.proxies {
		addrs[i] = p.Addr()
	}
	return "redis://" + strings.Join(addrs, ",")
}

// each calls f for all servers at once.
func (m *servers) each(f func(srv server) error) error {
	failed := make(chan error, len(m.all))
	for _, srv := range m.all {
		go func() { failed <- f(srv) }()
	}
	var errs []error
	for range m.all {
		errs = append(errs, <-failed)
	}
	return errors.Join(errs...)
}

// command calls f with a client of each server.
func (m *servers) command(f func(rdb *redis.Client) error) error {
	return m.each(func(srv server) error {
		rdb := redis.NewClient(&redis.Options{Addr: srv.addr, ContextTimeoutEnabled: true})
		defer rdb.Close()
		return f(rdb)
	})
}

// inRedis starts n servers. The suite may stop, start and cut off all of them together.
func inRedis(n int, cost conformance.Cost) func(t *testing.T, h *conformance.Harness) {
	return func(t *testing.T, h *conformance.Harness) {
		var m *servers
		h.Store = func(context.Context) (_ string, _ func(), err error) {
			if m, err = startServers(t, n); err != nil {
				return "", nil, err
			}
			return m.url(), func() {}, nil
		}
		h.Stop = func(ctx context.Context, _ string) error {
			return m.each(func(srv server) error { return srv.stop(ctx) })
		}
		h.Start = func(ctx context.Context, _ string, data bool) error {
			return m.each(func(srv server) error { return srv.start(ctx, data) })
		}
		h.Flush = func(ctx context.Context, _ string) error {
			return m.command(func(rdb *redis.Client) error { return rdb.ScriptFlush(ctx).Err() })
		}
		h.Kick = func(ctx context.Context, _ string) error {
			return m.command(func(rdb *redis.Client) error {
				return errors.Join(rdb.ClientKillByFilter(ctx, "type", "pubsub").Err(),
					rdb.ClientKillByFilter(ctx, "type", "normal", "skipme", "yes").Err())
			})
		}
		h.Link = link
		h.Cost = cost
		h.Commands = func(context.Context, string) (int64, error) {
			return redistest.Settled(func() (total int64) {
				for _, p := range m.proxies {
					total += p.Count()
				}
				return total
			}), nil
		}
		h.Entries = func(ctx context.Context, _ string) (entries []string, _ error) {
			var mu sync.Mutex // guards entries
			err := m.command(func(rdb *redis.Client) error {
				all, err := rdb.Keys(ctx, "*").Result()
				mu.Lock()
				defer mu.Unlock()
				entries = append(entries, strategytest.Entries(all)...)
				return err
			})
			return entries, err
		}
	}
}

// link disturbs the connections to all servers of a URL without a user at once.
func link(_ context.Context, store string) (*conformance.Link, error) {
	var links []*conformance.Link
	all := &conformance.Link{
		Set: func(s conformance.LinkState) {
			for _, l := range links {
				l.Set(s)
			}
		},
		SetAfter: func(replies int, s conformance.LinkState) {
			for _, l := range links {
				l.SetAfter(replies, s)
			}
		},
		Close: func() {
			for _, l := range links {
				l.Close()
			}
		},
	}
	var addrs []string
	for addr := range strings.SplitSeq(strings.TrimSuffix(strings.TrimPrefix(store, "redis://"), "/0"), ",") {
		l, err := conformance.TCP(addr)
		if err != nil {
			all.Close()
			return nil, err
		}
		links, addrs = append(links, l), append(addrs, l.Store)
	}
	all.Store = "redis://" + strings.Join(addrs, ",")
	return all, nil
}
