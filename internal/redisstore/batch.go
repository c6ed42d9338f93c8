package redisstore

import (
	"context"

	"github.com/redis/go-redis/v9"
)

// answer is the reply to the call with the index i.
type answer struct {
	i   int
	v   any
	err error
}

// batch is one call of RunEach.
type batch struct {
	s       *Store
	sc      *Script
	calls   []Call
	answers chan answer // has room for one answer to each call
}

// run groups the calls by server, and starts the calls of each group. Each call gets one answer.
func (b batch) run(ctx context.Context) {
	groups := map[*server][]int{}
	for i, c := range b.calls {
		at, err := b.s.find(ctx, c.Keys[0])
		if err != nil {
			b.answers <- answer{i, nil, b.s.fail(err)}
			continue
		}
		groups[at] = append(groups[at], i)
	}

	for at, which := range groups {
		go b.runGroup(ctx, at, which)
	}
}

// runGroup runs only the calls with the given indexes, on the server at. It first sends the hash of
// the script. If the server does not know the script, runGroup sends the refused calls again, with
// the source. A call that another server must execute is sent alone.
func (b batch) runGroup(ctx context.Context, at *server, which []int) {
	s := b.s
	if err := s.check(ctx, at); err != nil {
		for _, i := range which {
			b.answers <- answer{i, nil, err}
		}
		return
	}

	for _, whole := range []bool{false, true} {
		commands := make([][]string, len(which))
		for j, i := range which {
			commands[j] = b.sc.appendArgs(make([]string, 0, 8), b.calls[i], whole)
		}
		replies := at.ask(ctx, false, b.sc.confirm, commands...)

		again := which[:0] // reuses the array, whose indexes were read before they are replaced
		for j, i := range which {
			r := replies[j]
			isRedirected := redirects(r.Err) && s.isCluster
			if isRedirected || s.isDemoted(r.Err) {
				go b.runAlone(ctx, i)
				continue
			}
			v, err := s.outcome(ctx, at, r)
			if err != nil && !whole && redis.HasErrorPrefix(err, unknownScript) {
				again = append(again, i)
				continue
			}
			b.answers <- answer{i, v, err}
		}

		which = again
		if len(which) == 0 { // the server lacked the script for no call
			s.ran.Store(b.sc, nil)
			return
		}
	}
}

// runAlone runs the call with the index i by Store.Run, which finds the right server.
func (b batch) runAlone(ctx context.Context, i int) {
	v, err := b.s.Run(ctx, b.sc, b.calls[i])
	b.answers <- answer{i, v, err}
}
