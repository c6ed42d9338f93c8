package strategytest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/conformance"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redistest"
)

// Conform runs the conformance suite in virtual time, on n servers in memory. h has what is
// particular to the strategy, and open makes its drivers.
//
// internal/acceptance runs the whole suite on real servers. Left out here are the clauses over
// several processes, which share no virtual time, and those that count goroutines, because the
// servers have some for each connection. There is no Kick, and no Stop of several servers, because
// go-redis notices only on a socket that an idle connection has ended.
func Conform(t *testing.T, n int, h conformance.Harness, open func(nodes []redis.UniversalClient) backend.Driver) {
	await.Crowd(t)
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := &servers{all: redistest.VirtualNodes(t, n), links: map[string][]redis.UniversalClient{}}
		h.Only = func(clause string) bool {
			return clause != "reach" && !strings.HasPrefix(clause, "process-") && !strings.HasSuffix(clause, "-leaves-nothing")
		}
		h.Open = func(_ context.Context, store string) (backend.Driver, error) { return open(s.clients(store)), nil }
		h.Stop, h.Start, h.Link = s.stop, s.start, s.link
		if n > 1 {
			// Before it votes, a node is asked on all idle connections, each of which has ended.
			h.Stop, h.Start = nil, nil
		}
		h.Flush, h.Commands, h.Entries = s.flush, s.commands, s.entries
		passed := 0
		err := conformance.Check(t.Context(), h, func(r conformance.Result) {
			switch r.Status {
			case conformance.Pass:
				passed++
			case conformance.Skip:
				t.Logf("%s: skipped: %s", r.Name, r.Reason)
			case conformance.Fail:
				t.Errorf("%s: %v (%s)", r.Name, r.Err, r.Why)
			}
		})
		if err != nil {
			t.Error(err)
		}
		t.Logf("%d clauses passed", passed)
	})
}

// servers are the store of a suite in virtual time.
type servers struct {
	all redistest.VirtualServers

	mu    sync.Mutex                         // guards links
	links map[string][]redis.UniversalClient // by the name that link gives the store
}

// clients returns clients of all servers, over the Link that store names, if it names one.
func (s *servers) clients(store string) []redis.UniversalClient {
	s.mu.Lock()
	defer s.mu.Unlock()
	if over := s.links[store]; over != nil {
		return over
	}
	return s.all.Clients()
}

// each calls f for all servers.
func (s *servers) each(f func(v *redistest.VirtualServer) error) error {
	var errs []error
	for _, v := range s.all {
		errs = append(errs, f(v))
	}
	return errors.Join(errs...)
}

func (s *servers) stop(context.Context, string) error {
	return s.each(func(v *redistest.VirtualServer) error { v.Kill(); return nil })
}

func (s *servers) start(_ context.Context, _ string, data bool) error {
	return s.each(func(v *redistest.VirtualServer) error { v.Start(data); return nil })
}

func (s *servers) flush(ctx context.Context, _ string) error {
	return s.each(func(v *redistest.VirtualServer) error { return v.Direct().ScriptFlush(ctx).Err() })
}

func (s *servers) commands(context.Context, string) (int64, error) {
	return redistest.Settled(func() (n int64) {
		for _, v := range s.all {
			n += v.Proxy.Count()
		}
		return n
	}), nil
}

func (s *servers) entries(context.Context, string) (entries []string, _ error) {
	return entries, s.each(func(v *redistest.VirtualServer) error {
		entries = append(entries, Entries(v.Mini.Keys())...)
		return nil
	})
}

// Entries returns what conformance.Harness.Entries lists of the keys of a Redis: all but the
// counters of fences, and the marks of redlock.
func Entries(keys []string) []string {
	return slices.DeleteFunc(keys, func(key string) bool {
		return strings.HasPrefix(key, "hasp:{") && (strings.Contains(key, "}:fence:") || key == "hasp:{redlock}:mark")
	})
}

// link disturbs the connections to all servers at once.
func (s *servers) link(context.Context, string) (*conformance.Link, error) {
	var proxies []*faultproxy.Proxy
	var clients []redis.UniversalClient
	for _, v := range s.all {
		client, proxy := v.Link()
		proxies, clients = append(proxies, proxy), append(clients, client)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	name := fmt.Sprintf("link %d", len(s.links))
	s.links[name] = clients

	state := func(s conformance.LinkState) faultproxy.State {
		at := faultproxy.State{Deaf: s == conformance.Deaf, Stalled: s == conformance.Hung, Down: s == conformance.Down}
		if s == conformance.Slow {
			at.Delay = conformance.Delay
		}
		return at
	}
	return &conformance.Link{
		Store: name,
		Set: func(s conformance.LinkState) {
			for _, p := range proxies {
				p.Set(state(s))
			}
		},
		SetAfter: func(replies int, s conformance.LinkState) {
			for _, p := range proxies {
				p.SetAfter(replies, state(s))
			}
		},
		Close: func() {
			for _, p := range proxies {
				p.Close()
			}
		},
	}, nil
}
