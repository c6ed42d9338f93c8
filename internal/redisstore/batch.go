package redisstore

import (
	"context"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/redisstore/resp"
)

// DoAll sends commands, each once, over one connection. The Store must have a single server. The
// server executes the commands in the given order, but may execute commands of other clients in
// between. If Prepare made the Store, each reply contains the run ID of the server that sent it.
func (s *Store) DoAll(ctx context.Context, commands ...[]string) []Reply {
	at, err := s.servers.find(ctx, "")
	if err != nil {
		replies := make([]Reply, len(commands))
		for i := range replies {
			replies[i].Err = s.fail(err)
		}
		return replies
	}

	var replies []Reply
	if at.pool == nil {
		replies = at.Pipeline(ctx, commands...)
	} else {
		replies = make([]Reply, len(commands))
		if others := at.callers.Add(1) > 1 || s.always; others && !isLarge(commands...) {
			s.share(ctx, at, replies, commands...)
		} else {
			at.pool.Do(ctx, replies, commands...)
		}
		at.callers.Add(-1)
	}
	for i, r := range replies {
		if cancelled(ctx, r.Err) {
			// The outcome is unknown, because the caller has left, and the server may have executed
			// the command.
			replies[i].Err = s.named(at.name, ctx.Err())
			continue
		}
		replies[i].Value, replies[i].Err = s.outcome(at, r)
	}
	return replies
}

// answer is the reply to the call with the index i.
type answer struct {
	i   int
	v   any
	err error
}

// RunEach runs sc once for each call, in one pipeline for each server, and passes each reply to the
// function done, on the caller's goroutine. RunEach returns after all replies were passed, or after
// ctx has ended. The outcome of a call without a reply is unknown.
//
// The pipelines run on goroutines of their own, because a client that the caller passed may end a
// pipeline only at the client's own timeouts, and not when ctx ends.
func (s *Store) RunEach(ctx context.Context, sc *Script, calls []Call, done func(i int, v any, err error)) {
	answers := make(chan answer, len(calls))
	go s.runEach(ctx, sc, calls, answers)
	for range calls {
		select {
		case a := <-answers:
			done(a.i, a.v, a.err)
		case <-ctx.Done():
			select {
			case a := <-answers: // a reply that arrived before ctx ended
				done(a.i, a.v, a.err)
			default:
				return
			}
		}
	}
}

// runEach starts a pipeline for each process, so that a server that hangs does not delay the calls
// on the other servers of the cluster.
func (s *Store) runEach(ctx context.Context, sc *Script, calls []Call, answers chan<- answer) {
	groups := map[resp.Server][]int{}
	at := make([]*server, len(calls))
	for i, c := range calls {
		srv, err := s.servers.find(ctx, c.Keys[0])
		if err != nil {
			answers <- answer{i, nil, s.fail(err)}
			continue
		}
		at[i] = srv
		// Ignore the error, because the process only groups the calls. The client's pipeline finds
		// the process by itself, or fails.
		process, _ := srv.process(ctx, c.Keys[0])
		groups[process] = append(groups[process], i)
	}
	for _, which := range groups {
		go s.runGroup(ctx, at[which[0]], sc, calls, which, answers)
	}
}

// runGroup runs only the calls with the given indexes. It first sends the hash of the script. If
// the server does not know the script, runGroup sends the refused calls again, with the source. If
// the server redirects a call, Run runs that call alone on the other server.
func (s *Store) runGroup(ctx context.Context, at *server, sc *Script, calls []Call, which []int, answers chan<- answer) {
	for _, whole := range []bool{false, true} {
		commands := make([][]string, len(which))
		for j, i := range which {
			commands[j] = sc.appendArgs(make([]string, 0, 8), calls[i], whole)
		}
		replies := s.pipeline(ctx, at, sc.kept, commands...)

		again := which[:0]
		for j, i := range which {
			r := replies[j]
			if to, _ := s.servers.follow(at, calls[i].Keys[0], r.Err); to != nil {
				go func() {
					v, err := s.Run(ctx, sc, calls[i])
					answers <- answer{i, v, err}
				}()
				continue
			}
			v, err := s.outcome(at, r)
			if err != nil && !whole && redis.HasErrorPrefix(err, unknownScript) {
				again = append(again, i)
				continue
			}
			answers <- answer{i, v, err}
		}
		if which = again; len(which) == 0 {
			s.ran.Store(sc, nil)
			return
		}
	}
}
