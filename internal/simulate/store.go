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
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/memlock"
	"github.com/hasplock/hasp/pubsublock"
	"github.com/hasplock/hasp/redlock"
	"github.com/hasplock/hasp/spinlock"
)

// store is what the Clients of a world share, and what can go wrong with it.
type store interface {
	// link returns a driver for one more Client, and that Client's link.
	link(r *rand.Rand, timeout time.Duration) (backend.Driver, link)

	// strike makes one fault happen now, reports it in words, and returns what
	// ends it, or nil if that is over. A store that forgets holds calls forgot.
	strike(r *rand.Rand, forgot func()) (what string, heal func())

	// heal ends what goes wrong by itself.
	heal()

	// longest is the longest term that callers may ask for.
	longest() time.Duration

	// left returns the records of locks that are still there.
	left() []string
}

// link is one Client's way to the store.
type link interface {
	// silence lets nothing through, without a sign, until heal is called.
	silence() (heal func())
}

// kinds are the stores, by the name that -kind takes.
var kinds = map[string]func(t *testing.T, r *rand.Rand) store{
	"polled":     func(t *testing.T, r *rand.Rand) store { return newModel(r, false) },
	"waiter":     func(t *testing.T, r *rand.Rand) store { return newModel(r, true) },
	"spinlock":   single(func(rdb redis.UniversalClient) backend.Driver { return spinlock.New(rdb, nil) }),
	"pubsublock": single(func(rdb redis.UniversalClient) backend.Driver { return pubsublock.New(rdb, nil) }),
	"fairlock": single(func(rdb redis.UniversalClient) backend.Driver {
		return fairlock.New(rdb, &fairlock.Options{Window: 2 * time.Second})
	}),
	"turns": single(func(rdb redis.UniversalClient) backend.Driver {
		return fairlock.New(rdb, &fairlock.Options{Window: 2 * time.Second, Turns: 3})
	}),
	"redlock3": quorum(3, 0),
	"redlock5": quorum(5, 0),
	"leader":   quorum(3, month),
}

// model is a store in memory whose links are bad.
type model struct {
	mem    *memlock.Store
	waits  bool
	bad    float64
	traits backend.Traits
	links  []*lossy
}

func newModel(r *rand.Rand, waits bool) store {
	m := &model{mem: memlock.NewStore(), waits: waits, bad: r.Float64() * 0.3}
	m.traits = backend.Traits{Fenced: true, Reach: backend.Network, Ordered: waits && r.IntN(2) == 0}
	return m
}

func (m *model) link(r *rand.Rand, timeout time.Duration) (backend.Driver, link) {
	l := &lossy{Driver: m.mem.Driver(), traits: m.traits, timeout: timeout, r: r, bad: m.bad}
	l.traits.Ends = backend.Ends(r.IntN(3))
	m.links = append(m.links, l)
	if m.waits {
		return waits{l}, l
	}
	return polled{l}, l
}

// strike makes one link silent: the rest goes wrong by itself.
func (m *model) strike(r *rand.Rand, _ func()) (string, func()) {
	i := r.IntN(len(m.links))
	return fmt.Sprintf("link %d is silent", i), m.links[i].silence()
}

func (m *model) heal() {
	for _, l := range m.links {
		l.well()
	}
}

func (m *model) longest() time.Duration { return longTerm }

func (m *model) left() []string {
	var held []string
	for i := range keyCount {
		if st, err := m.mem.Driver().Inspect(context.Background(), key(i)); err != nil || st.Held || len(st.Waiters) > 0 {
			held = append(held, fmt.Sprintf("%s: %+v, %v", key(i), st, err))
		}
	}
	return held
}

// servers are virtual Redis servers, one or a quorum's, whose links go through
// proxies.
type servers struct {
	t     *testing.T
	nodes redistest.VirtualServers
	open  func([]redis.UniversalClient) backend.Driver
	links []*wires
	max   time.Duration
}

// wires are one Client's links to all servers.
type wires struct{ proxies []*faultproxy.Proxy }

func (w *wires) silence() func() {
	for _, p := range w.proxies {
		p.Stall()
	}
	return func() {
		for _, p := range w.proxies {
			p.Flow()
		}
	}
}

func single(open func(redis.UniversalClient) backend.Driver) func(*testing.T, *rand.Rand) store {
	return func(t *testing.T, _ *rand.Rand) store {
		return &servers{t: t, nodes: redistest.VirtualNodes(t, 1), max: longTerm, open: func(all []redis.UniversalClient) backend.Driver { return open(all[0]) }}
	}
}

// quorum is redlock on n servers. If max is 0, the seed decides whether long
// terms may be asked for, and so whether a restarted server votes again soon.
func quorum(n int, max time.Duration) func(*testing.T, *rand.Rand) store {
	return func(t *testing.T, r *rand.Rand) store {
		max := max
		if max == 0 {
			max = []time.Duration{shortMax, longTerm}[r.IntN(2)]
		}
		return &servers{t: t, nodes: redistest.VirtualNodes(t, n), max: max, open: func(all []redis.UniversalClient) backend.Driver {
			return redlock.New(all, &redlock.Options{MaxTTL: max})
		}}
	}
}

func (s *servers) heal() {}

func (s *servers) longest() time.Duration { return s.max }

func (s *servers) link(*rand.Rand, time.Duration) (backend.Driver, link) {
	w := &wires{}
	var clients []redis.UniversalClient
	for _, v := range s.nodes {
		rdb, proxy := v.Link()
		clients, w.proxies = append(clients, rdb), append(w.proxies, proxy)
	}
	s.links = append(s.links, w)
	return s.open(clients), w
}

func (s *servers) strike(r *rand.Rand, forgot func()) (string, func()) {
	node, l := r.IntN(len(s.nodes)), r.IntN(len(s.links))
	v, p := s.nodes[node], s.links[l].proxies[node]
	match := []string{"evalsha", "set", "get", "subscribe", "pttl"}[r.IntN(5)]
	name := fmt.Sprintf("node %d, link %d", node, l)
	switch r.IntN(11) {
	case 0:
		p.Fail(match, faultproxy.LoseReply)
		return name + ": a reply is lost", nil
	case 1:
		p.Fail(match, faultproxy.LoseRequest)
		return name + ": a request is lost", nil
	case 2:
		p.Fail(match, faultproxy.HangReply)
		return name + ": a reply never comes", nil
	case 3:
		p.StallReplies()
		return name + ": replies are stalled", p.Flow
	case 4:
		p.StallRequests()
		return name + ": requests are stalled", p.Flow
	case 5:
		p.Delay(time.Duration(1+r.IntN(40)) * time.Millisecond)
		return name + ": slow", func() { p.Delay(0) }
	case 6:
		p.Cut()
		return name + ": cut", nil
	case 7:
		v.Proxy.Stall()
		return fmt.Sprintf("node %d hangs", node), v.Proxy.Flow
	case 8:
		v.Kill()
		return fmt.Sprintf("node %d is down", node), func() { v.Start(true) }
	case 9:
		if len(s.nodes) == 1 {
			v.Restart(false)
			forgot()
			return "the server has lost its data", nil
		}
		v.Restart(false) // a minority of one: no lock may be lost
		return fmt.Sprintf("node %d has lost its data", node), nil
	default:
		if err := v.Direct().ScriptFlush(context.Background()).Err(); err != nil {
			s.t.Error(err)
		}
		return fmt.Sprintf("node %d has lost its scripts", node), nil
	}
}

// strangers has a stranger hold all keys on a server, or none of them.
func (s *servers) strangers(v *redistest.VirtualServer, hold bool) {
	rdb := v.Direct()
	defer rdb.Close()
	const record = "stranger"
	for i := range keyCount {
		var err error
		if hold {
			err = rdb.SetNX(context.Background(), key(i), record, time.Minute).Err()
		} else if rdb.Get(context.Background(), key(i)).Val() == record {
			err = rdb.Del(context.Background(), key(i)).Err()
		}
		if err != nil {
			s.t.Error(err)
		}
	}
}

// remove removes a key from a server.
func (s *servers) remove(v *redistest.VirtualServer, key string) {
	rdb := v.Direct()
	defer rdb.Close()
	if err := rdb.Del(context.Background(), key).Err(); err != nil {
		s.t.Error(err)
	}
}

func (s *servers) left() []string {
	var all []string
	for i, v := range s.nodes {
		rdb := v.Direct()
		for _, k := range v.Mini.Keys() {
			if strings.Contains(k, "fence:") || strings.HasSuffix(k, ":mark") {
				continue
			}
			ttl, err := rdb.PTTL(context.Background(), k).Result()
			if errors.Is(err, redis.Nil) {
				continue
			}
			all = append(all, fmt.Sprintf("node %d: %s (%v)", i, k, ttl))
		}
		rdb.Close()
	}
	return all
}
