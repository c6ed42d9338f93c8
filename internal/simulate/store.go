package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/fairlock"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/pubsublock"
	"github.com/hasplock/hasp/redlock"
	"github.com/hasplock/hasp/spinlock"
)

// store is what the Clients of a world share.
type store interface {
	// link returns a driver for a new Client, and the Client's link to the store.
	link(r *rand.Rand, timeout time.Duration) (backend.Driver, link)

	// strike makes a fault happen now. It returns what ends the fault, or nil if
	// the fault ends by itself. If the store loses its holds, it calls forgot.
	strike(r *rand.Rand, forgot func()) (heal func())

	// heal ends the faults that happen without a strike.
	heal()

	// skip lets d pass in the store, while no time passes for the Clients.
	skip(d time.Duration)

	// longest returns the longest term that callers may ask for.
	longest() time.Duration

	// left returns the records of locks that are still in the store.
	left() []string
}

// link is one Client's link to the store.
type link interface {
	// silence stops everything on the link, without an error, until heal is called.
	silence() (heal func())
}

// kinds are the stores, by the name that -kind takes.
var kinds = map[string]func(t *testing.T, r *rand.Rand) store{
	"polled":     func(t *testing.T, r *rand.Rand) store { return newModel(r, false) },
	"waiter":     func(t *testing.T, r *rand.Rand) store { return newModel(r, true) },
	"spinlock":   single(func(rdb redis.UniversalClient) backend.Driver { return spinlock.New(rdb, nil) }),
	"pubsublock": single(func(rdb redis.UniversalClient) backend.Driver { return pubsublock.New(rdb, nil) }),
	"fairlock":   fair(0),
	"turns":      fair(3),
	"redlock3":   quorum(3, 0),
	"redlock5":   quorum(5, 0),
	"leader":     quorum(3, day),
}

// servers are virtual Redis servers: one, or the nodes of a redlock.
type servers struct {
	t     *testing.T
	nodes redistest.VirtualServers
	open  func([]redis.UniversalClient) backend.Driver
	links []*wires
	max   time.Duration // the longest term
}

// single is a strategy on one server.
func single(open func(redis.UniversalClient) backend.Driver) func(*testing.T, *rand.Rand) store {
	return func(t *testing.T, _ *rand.Rand) store {
		return &servers{t: t, nodes: redistest.VirtualNodes(t, 1), max: longTerm, open: func(all []redis.UniversalClient) backend.Driver { return open(all[0]) }}
	}
}

func fair(turns int) func(*testing.T, *rand.Rand) store {
	return single(func(rdb redis.UniversalClient) backend.Driver {
		return fairlock.New(rdb, &fairlock.Options{Window: 2 * time.Second, Turns: turns})
	})
}

// quorum is redlock on n servers. If most is 0, the seed decides whether long
// terms may be asked for. If they may, a restarted server does not vote for as
// long.
func quorum(n int, most time.Duration) func(*testing.T, *rand.Rand) store {
	return func(t *testing.T, r *rand.Rand) store {
		most := most
		if most == 0 {
			most = []time.Duration{shortMax, longTerm}[r.IntN(2)]
		}
		return &servers{t: t, nodes: redistest.VirtualNodes(t, n), max: most, open: func(all []redis.UniversalClient) backend.Driver {
			return redlock.New(all, &redlock.Options{MaxTTL: most})
		}}
	}
}

// wires are one Client's links to all servers.
type wires struct{ proxies []*faultproxy.Proxy }

func (w *wires) silence() (heal func()) {
	for _, p := range w.proxies {
		p.Stall()
	}
	return func() {
		for _, p := range w.proxies {
			p.Flow()
		}
	}
}

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

// heal ends the faults that still wait for a command.
func (s *servers) heal() {
	for _, w := range s.links {
		for _, p := range w.proxies {
			p.Forgive()
		}
	}
}

func (s *servers) skip(d time.Duration) {
	for _, v := range s.nodes {
		v.Skip(d)
	}
}

func (s *servers) longest() time.Duration { return s.max }

// strike disturbs one server, or one Client's link to it.
func (s *servers) strike(r *rand.Rand, forgot func()) (heal func()) {
	node, l := r.IntN(len(s.nodes)), r.IntN(len(s.links))
	v, p := s.nodes[node], s.links[l].proxies[node]
	match := []string{"evalsha", "set", "get", "subscribe", "pttl"}[r.IntN(5)]
	switch r.IntN(11) {
	case 0:
		p.Fail(match, faultproxy.LoseReply)
	case 1:
		p.Fail(match, faultproxy.LoseRequest)
	case 2:
		p.Fail(match, faultproxy.HangReply)
	case 3:
		p.StallReplies()
		return p.Flow
	case 4:
		p.StallRequests()
		return p.Flow
	case 5:
		p.Delay(time.Duration(1+r.IntN(40)) * time.Millisecond)
		return func() { p.Delay(0) }
	case 6:
		p.Cut()
	case 7:
		v.Proxy.Stall()
		return v.Proxy.Flow
	case 8:
		v.Kill()
		return func() { v.Start(true) }
	case 9:
		v.Restart(false)
		if len(s.nodes) == 1 { // otherwise it is a minority, and no lock may be lost
			forgot()
		}
	default:
		s.do(v, func(ctx context.Context, rdb *redis.Client) error { return rdb.ScriptFlush(ctx).Err() })
	}
	return nil
}

// do calls f with a client of a server that no fault affects.
func (s *servers) do(v *redistest.VirtualServer, f func(context.Context, *redis.Client) error) {
	rdb := v.Direct()
	defer rdb.Close()
	if err := f(context.Background(), rdb); err != nil {
		s.t.Error(err)
	}
}

// stranger is the record of a holder that is no Client of the world.
const stranger = "stranger"

// hold makes a stranger hold all free keys on a server.
func (s *servers) hold(v *redistest.VirtualServer) {
	s.do(v, func(ctx context.Context, rdb *redis.Client) (err error) {
		for i := range keyCount {
			err = errors.Join(err, rdb.SetNX(ctx, key(i), stranger, time.Minute).Err())
		}
		return err
	})
}

// free ends the holds of the stranger on a server.
func (s *servers) free(v *redistest.VirtualServer) {
	for i := range keyCount {
		if record, _ := v.Mini.Get(key(i)); record == stranger {
			v.Mini.Del(key(i))
		}
	}
}

func (s *servers) left() (all []string) {
	for i, v := range s.nodes {
		for _, k := range v.Mini.Keys() {
			if !strings.Contains(k, "fence:") && !strings.HasSuffix(k, ":mark") {
				all = append(all, fmt.Sprintf("node %d: %s (%v)", i, k, v.Mini.TTL(k)))
			}
		}
	}
	return all
}

// faults injects some faults, one after another, and heals each.
func (w *world) faults(r *rand.Rand, stay []*client) {
	upTo := func(d time.Duration) time.Duration { return time.Duration(r.Int64N(int64(d))) }
	for range r.IntN(12) {
		time.Sleep(upTo(300 * time.Millisecond))
		if w.suspends && r.IntN(4) == 0 {
			w.suspend(r)
			continue
		}
		if s, ok := w.store.(*servers); ok && len(s.nodes) > 1 && r.IntN(8) == 0 {
			w.majority(s, r)
			continue
		}
		if r.IntN(4) == 0 {
			heal := w.silence(stay[r.IntN(len(stay))])
			most := 800 * time.Millisecond
			if r.IntN(3) == 0 {
				most = 6 * time.Second // until the store's earlier answers no longer count
			}
			time.Sleep(upTo(most))
			heal()
			continue
		}

		w.mu.Lock() // no link is added meanwhile
		heal := w.store.strike(r, w.book.forget)
		w.mu.Unlock()
		if heal != nil {
			time.Sleep(upTo(500 * time.Millisecond))
			heal()
		}
	}
}

// suspend makes the host of all Clients sleep. Its goroutines and Go's clock stand still
// meanwhile, so only the store's time passes, and the time of sleep.
func (w *world) suspend(r *rand.Rand) {
	least, most := time.Duration(0), 500*time.Millisecond // as long as many terms
	switch _, real := w.store.(*servers); r.IntN(3) {
	case 0:
		least, most = longTerm, 2*longTerm // all terms end
	case 1:
		if real { // the model does not shorten the terms that go on
			most = longTerm
		}
	}
	d := least + time.Duration(r.Int64N(int64(most)))
	w.book.slept()
	w.store.skip(d)
	w.asleep.Add(int64(d))
}

// silence stops everything on the link of c until heal is called, and notes when.
func (w *world) silence(c *client) (heal func()) {
	end := c.link.silence()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.quiet[c] = append(w.quiet[c], span{from: time.Now()})
	return func() {
		w.mu.Lock()
		spans := w.quiet[c]
		spans[len(spans)-1].to = time.Now()
		w.mu.Unlock()
		end() // only now, because an answer takes no time
	}
}

// majority stops a majority of the servers for a while. The others have the
// records of a stranger.
func (w *world) majority(s *servers, r *rand.Rand) {
	order := r.Perm(len(s.nodes))
	k := len(s.nodes)/2 + 1
	for _, i := range order[:k] {
		s.nodes[i].Kill()
	}
	w.mu.Lock()
	w.away = append(w.away, span{from: time.Now()})
	w.mu.Unlock()
	for _, i := range order[k:] {
		s.hold(s.nodes[i])
	}
	time.Sleep(time.Duration(r.Int64N(int64(4 * time.Second))))

	w.mu.Lock()
	w.away[len(w.away)-1].to = time.Now()
	w.mu.Unlock()
	for _, i := range order[k:] {
		s.free(s.nodes[i])
	}
	for _, i := range order[:k] {
		s.nodes[i].Start(true)
	}
}

// unheard reports whether the store has sent c nothing since that time: c's link
// is silent, or a majority of the servers is away.
func (w *world) unheard(c *client, since time.Time) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, s := range append(slices.Clone(w.quiet[c]), w.away...) {
		if s.from.Before(since) && (s.to.IsZero() || time.Now().Before(s.to)) {
			return true
		}
	}
	return false
}
