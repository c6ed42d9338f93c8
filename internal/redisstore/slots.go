package redisstore

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/redisstore/resp"
	"github.com/hasplock/hasp/internal/redisstore/slot"
)

// This file asks the servers of a cluster which slots they have, and whether they can be used.

// span is a range of slots and the address of their server.
type span struct {
	first, last int64
	addr        string
}

// search queries the servers for the slots until one answers. It queries the next server if one has
// failed or is slow.
func (c *cluster) search(ctx context.Context, timeout time.Duration) error {
	answers, errs := askAll(ctx, c.nodes(), hedgeAfter, 0, func(ctx context.Context, s *server) ([]span, error) {
		return c.ask(ctx, s, timeout)
	})
	if len(answers) == 0 {
		return worst(errs, "nodes")
	}
	c.adopt(answers[0])
	return nil
}

// nodes returns the servers to query, in a random order, so that the clients of a cluster do not
// all query the same one.
func (c *cluster) nodes() []*server {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, addr := range c.a.addrs {
		c.serverLocked(addr)
	}

	all := slices.Collect(maps.Values(c.servers))
	rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	return all
}

// ask queries one server for the slots.
func (c *cluster) ask(ctx context.Context, s *server, took time.Duration) ([]span, error) {
	reply := s.Do(ctx, "cluster", "slots")
	if reply.Err != nil {
		return nil, fmt.Errorf("%s: %w", s.addr, diagnose(reply.Err, lockHints(c.a), took))
	}

	var spans []span
	total := int64(0)
	ranges, _ := reply.Value.([]any)
	for _, r := range ranges {
		parts, _ := r.([]any)
		if len(parts) < 3 {
			continue
		}
		first, _ := parts[0].(int64)
		last, ok := parts[1].(int64)
		if who, _ := parts[2].([]any); ok && len(who) > 1 && 0 <= first && first <= last && last < slot.Count {
			host, _ := who[0].(string) // nil if the server does not know its host
			port, _ := who[1].(int64)
			spans = append(spans, span{first, last, hostport(host, strconv.FormatInt(port, 10), s.addr)})
			total += last - first + 1
		}
		// A cluster has only slot.Count slots, so some of these ranges overlap.
		if total > slot.Count {
			return nil, fmt.Errorf("%s: %w", s.addr, resp.Unexpected(reply.Value, c.a.secrets()...))
		}
	}
	if len(spans) == 0 {
		return nil, fmt.Errorf("%s: the cluster is down: no server has a slot", s.addr)
	}
	return spans, nil
}

// adopt replaces the known slots by those of an answer. It closes the pools of servers that have
// had no slot for staleAfter.
func (c *cluster) adopt(spans []span) {
	c.mu.Lock()
	defer c.mu.Unlock()

	c.slots = [slot.Count]*server{}
	used := map[*server]bool{}
	for _, sp := range spans {
		s := c.serverLocked(sp.addr)
		used[s] = true
		for i := sp.first; i <= sp.last; i++ {
			c.slots[i] = s
		}
	}
	c.asked = time.Now()

	for addr, s := range c.servers {
		switch {
		case used[s]:
			s.unused = time.Time{}
		case s.unused.IsZero():
			s.unused = c.asked
		// Close the pool only after staleAfter, because callers that found the server earlier may
		// still use it.
		case c.asked.Sub(s.unused) > staleAfter:
			s.pool.Close()
			delete(c.servers, addr)
		}
	}
}

// probe calls ask for all masters. It returns an error if one of them replies with an error, or if
// none answers. If only some do not answer, it returns nil, because the others can be used.
func (c *cluster) probe(ctx context.Context, ask func(context.Context, *server) error) error {
	answers, errs := askAll(ctx, c.masters(), 0, grace, func(ctx context.Context, s *server) (struct{}, error) {
		return struct{}{}, ask(ctx, s)
	})
	if len(errs) == 0 {
		return nil
	}
	if err := worst(errs, "masters"); len(answers) == 0 || errors.As(err, new(redis.Error)) {
		return err
	}
	return nil
}

// masters returns the servers that have slots.
func (c *cluster) masters() []*server {
	c.mu.Lock()
	defer c.mu.Unlock()
	var all []*server
	for _, s := range c.slots {
		if s != nil && !slices.Contains(all, s) {
			all = append(all, s)
		}
	}
	return all
}
