package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/fairlock"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/pubsublock"
	"github.com/hasplock/hasp/redlock"
	"github.com/hasplock/hasp/spinlock"
)

// kinds lists all kinds of stores in the order of their names.
var kinds = []Kind{
	{Name: "fairlock", Open: single(fairlock.NewDriver, &fairlock.Options{Window: 2 * time.Second})},
	{Name: "polled", Open: inMemory(false)},
	{Name: "pubsublock", Open: single(pubsublock.NewDriver, nil)},
	{Name: "redlock3", Open: quorum(3), SameFences: true},
	{Name: "redlock5", Open: quorum(5), SameFences: true},
	{Name: "spinlock", Open: single(spinlock.NewDriver, nil)},
	{Name: "waiter", Open: inMemory(true)},
}

// servers is a store on one virtual Redis server, or on the nodes of a redlock.
type servers struct {
	links
	t     *testing.T
	nodes redistest.VirtualServers
	open  func([]redis.UniversalClient) backend.Driver
	max   time.Duration // the longest term
}

// single returns a function that opens a strategy on one server.
func single[O any](
	open func(redis.UniversalClient, *O) (backend.Driver, error), options *O,
) func(*testing.T, *rand.Rand) Store {
	return func(t *testing.T, _ *rand.Rand) Store {
		return &servers{t: t, nodes: redistest.VirtualNodes(t, 1), max: LongTerm,
			open: func(all []redis.UniversalClient) backend.Driver {
				return await.Value(open(all[0], options))
			}}
	}
}

// shortMax is redlock's max_ttl if callers may not ask for long terms.
const shortMax = 2 * time.Second

// quorum returns a function that opens redlock on n servers. The seed decides whether callers may
// ask for long terms. If they may, a restarted server abstains for the duration LongTerm.
func quorum(n int) func(*testing.T, *rand.Rand) Store {
	return func(t *testing.T, r *rand.Rand) Store {
		most := []time.Duration{shortMax, LongTerm}[r.IntN(2)]
		return &masters{servers{t: t, nodes: redistest.VirtualNodes(t, n), max: most,
			open: func(all []redis.UniversalClient) backend.Driver {
				return await.Value(redlock.NewDriver(all, &redlock.Options{MaxTTL: most}))
			}}}
	}
}

// wires are one Client's links to all servers.
type wires struct{ proxies []*faultproxy.Proxy }

func (w *wires) each(do func(*faultproxy.Proxy)) {
	for _, p := range w.proxies {
		do(p)
	}
}

func (w *wires) Silence() (heal func()) {
	w.each((*faultproxy.Proxy).Stall)
	return func() { w.each((*faultproxy.Proxy).Flow) }
}

// Down cuts the link to one server for good.
func (w *wires) Down(r *rand.Rand) { w.proxies[r.IntN(len(w.proxies))].Down() }

// Slow delays the replies of each server.
func (w *wires) Slow(r *rand.Rand) {
	w.each(func(p *faultproxy.Proxy) { p.Delay(time.Duration(r.IntN(40)) * time.Millisecond) })
}

// links contains the wires of each Client.
type links []*wires

// Heal cancels the faults that wait for a command that has not come yet.
func (ls links) Heal() {
	for _, w := range ls {
		w.each((*faultproxy.Proxy).Forgive)
	}
}

// linkFaults is the number of different faults that the function disturb can inject.
const linkFaults = 7

// disturb injects fault number n into a link. The faults 0 to 2 affect the next command that
// contains the string text.
func disturb(r *rand.Rand, p *faultproxy.Proxy, n int, text string) (heal func()) {
	switch n {
	case 0:
		p.Fail(text, faultproxy.LoseReply)
	case 1:
		p.Fail(text, faultproxy.LoseRequest)
	case 2:
		p.Fail(text, faultproxy.HangReply)
	case 3:
		p.StallReplies()
		return p.Flow
	case 4:
		p.StallRequests()
		return p.Flow
	case 5:
		p.Delay(time.Duration(1+r.IntN(40)) * time.Millisecond)
		return func() { p.Delay(0) }
	default:
		p.Cut()
	}

	return nil
}

func (s *servers) Link(*rand.Rand, time.Duration) (backend.Driver, Link) {
	w := &wires{}
	var clients []redis.UniversalClient
	for _, v := range s.nodes {
		rdb, proxy := v.Link()
		clients = append(clients, rdb)
		w.proxies = append(w.proxies, proxy)
	}

	s.links = append(s.links, w)
	return s.open(clients), w
}

func (s *servers) Skip(d time.Duration) {
	for _, v := range s.nodes {
		v.Skip(d)
	}
}

func (s *servers) Longest() time.Duration { return s.max }

// Strike disturbs one server, or one Client's link to that server.
func (s *servers) Strike(r *rand.Rand, forgot func()) (heal func()) {
	node := r.IntN(len(s.nodes))
	l := r.IntN(len(s.links))
	v := s.nodes[node]
	p := s.links[l].proxies[node]
	match := []string{"evalsha", "set", "get", "subscribe", "pttl"}[r.IntN(5)]
	switch n := r.IntN(linkFaults + 5); n - linkFaults {
	case 0:
		v.Proxy.Stall()
		return v.Proxy.Flow
	case 1:
		v.Kill()
		return func() { v.Start(true) }
	case 2:
		v.Restart(false)
		if len(s.nodes) == 1 { // one of several servers is a minority, and then no lock may be lost
			forgot()
		}
	case 3:
		s.do(v, func(ctx context.Context, rdb *redis.Client) error {
			return rdb.ScriptFlush(ctx).Err()
		})
	case 4:
		v.Skew(-time.Millisecond) // less than the drift that any term allows for
		return func() { v.Skew(0) }
	default:
		return disturb(r, p, n, match)
	}

	return nil
}

// do calls f with a client whose link to the server is never disturbed.
func (s *servers) do(v *redistest.VirtualServer, f func(context.Context, *redis.Client) error) {
	rdb := v.Direct()
	defer rdb.Close()
	if err := f(context.Background(), rdb); err != nil {
		s.t.Error(err)
	}
}

// Rob removes a key from a majority of the servers.
func (s *servers) Rob(r *rand.Rand, key string) {
	for _, i := range r.Perm(len(s.nodes))[:len(s.nodes)/2+1] {
		s.nodes[i].Mini.Del(key)
	}
}

// masters are the nodes of a redlock.
type masters struct{ servers }

// Majority kills a majority of the servers. On the other servers a stranger holds the free keys.
func (s *masters) Majority(r *rand.Rand) (heal func()) {
	order := r.Perm(len(s.nodes))
	k := len(s.nodes)/2 + 1
	for _, i := range order[:k] {
		s.nodes[i].Kill()
	}
	for _, i := range order[k:] {
		s.hold(s.nodes[i])
	}
	return func() {
		for _, i := range order[k:] {
			s.free(s.nodes[i])
		}
		for _, i := range order[:k] {
			s.nodes[i].Start(true)
		}
	}
}

// stranger is the record of a holder that is no Client of the world.
const stranger = "stranger"

// hold locks all free keys of a server for a stranger.
func (s *servers) hold(v *redistest.VirtualServer) {
	s.do(v, func(ctx context.Context, rdb *redis.Client) (err error) {
		for i := range KeyCount {
			err = errors.Join(err, rdb.SetNX(ctx, Key(i), stranger, time.Minute).Err())
		}
		return err
	})
}

// free removes the stranger's keys from a server.
func (s *servers) free(v *redistest.VirtualServer) {
	for i := range KeyCount {
		if record, _ := v.Mini.Get(Key(i)); record == stranger {
			v.Mini.Del(Key(i))
		}
	}
}

func (s *servers) Left() (all []string) {
	for i, v := range s.nodes {
		for _, k := range v.Mini.Keys() {
			if !strings.Contains(k, "fence:") && !strings.HasSuffix(k, ":mark") {
				all = append(all, fmt.Sprintf("node %d: %s (%v)", i, k, v.Mini.TTL(k)))
			}
		}
	}

	return all
}
