package redisstore

import (
	"context"
	"slices"
	"strconv"

	"github.com/hasplock/hasp/internal/redisstore/pubsub"
	"github.com/hasplock/hasp/internal/redisstore/resp"
)

// Reply is the reply to one command of a pipeline, or its error.
type Reply = resp.Reply

// pipeline sends commands to a server, each once, in one pipeline. If asking is true, ASKING
// precedes each. If kept is true, pipeline also waits for the replicas. If too few confirm in time,
// it returns an error for each command that took a hold. Other replies and errors are unchanged;
// outcome interprets them.
func (s *Store) pipeline(ctx context.Context, at *server, asking, kept bool, commands ...[]string) []Reply {
	n, all := len(commands), commands
	if asking {
		all = nil
		for _, args := range commands {
			all = append(all, []string{"asking"}, args)
		}
	}
	if kept {
		// WAIT must be in the same pipeline, because it covers only writes of its own connection.
		all = append(slices.Clip(all), []string{"wait", strconv.Itoa(s.replicas), strconv.FormatInt(patience(ctx), 10)})
	}

	replies := at.Pipeline(ctx, all...)

	wait := replies[len(replies)-1]
	if asking {
		for i := range n {
			replies[i] = replies[2*i+1]
		}
	}
	replies = replies[:n]
	if kept {
		s.confirm(replies, wait)
	}
	return replies
}

// DoAll sends commands, each once, over one connection. The Store must have a single server. The
// server executes the commands in this order, but may execute commands of other clients in between.
// If Prepare made the Store, each reply names the run of the server that gave it.
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
		s.exchange(ctx, at, at.callers.Add(1) > 1, replies, commands)
		at.callers.Add(-1)
	}
	for i, r := range replies {
		if cancelled(ctx, r.Err) {
			// The outcome is unknown: the caller has left, and the server may have executed the
			// command.
			replies[i].Err = s.named(at.name, ctx.Err())
			continue
		}
		replies[i].Value, replies[i].Err = s.outcome(at, r)
	}
	return replies
}

// answerer passes on the reply to the call with the index i.
type answerer func(i int, v any, err error)

// RunEach runs sc once for each of calls, in one pipeline for each server, and passes each reply to
// done, on the caller's goroutine. It returns when done has received all replies, or when ctx has
// ended. The outcome of a call without a reply is unknown.
//
// The pipelines run on goroutines of their own, because a client that the caller passed may end a
// pipeline at its own timeouts and not with ctx.
func (s *Store) RunEach(ctx context.Context, sc *Script, calls []Call, done func(i int, v any, err error)) {
	answers := make(chan func(), len(calls))
	go s.runEach(ctx, sc, calls, func(i int, v any, err error) {
		answers <- func() { done(i, v, err) }
	})
	for range calls {
		select {
		case answer := <-answers:
			answer()
		case <-ctx.Done():
			select {
			case answer := <-answers: // a reply that arrived before ctx ended
				answer()
			default:
				return
			}
		}
	}
}

// runEach starts a pipeline for each process, so that one server of a cluster that hangs does not
// delay the calls on the others.
func (s *Store) runEach(ctx context.Context, sc *Script, calls []Call, answer answerer) {
	groups := map[pubsub.Server][]int{}
	at := make([]*server, len(calls))
	for i, c := range calls {
		srv, err := s.servers.find(ctx, c.Keys[0])
		if err != nil {
			answer(i, nil, s.fail(err))
			continue
		}
		at[i] = srv
		// If this fails, process is nil, and the client's pipeline finds the process itself, or
		// fails.
		process, _ := srv.process(ctx, c.Keys[0])
		groups[process] = append(groups[process], i)
	}
	for _, which := range groups {
		go s.runGroup(ctx, at[which[0]], sc, calls, which, answer)
	}
}

// runGroup runs the calls whose indexes are in which. It first sends the hash of the script. If the
// server does not know the script, runGroup sends the calls that it refused again, with the source.
// If the server redirects a call, Run runs that call alone on the other server.
func (s *Store) runGroup(ctx context.Context, at *server, sc *Script, calls []Call, which []int, answer answerer) {
	kept := sc.kept && s.replicas > 0
	for _, whole := range []bool{false, true} {
		commands := make([][]string, len(which))
		for j, i := range which {
			commands[j] = sc.appendArgs(nil, calls[i], whole)
		}
		replies := s.pipeline(ctx, at, false, kept, commands...)

		again := which[:0]
		for j, i := range which {
			r := replies[j]
			if to, _ := s.servers.follow(at, calls[i].Keys[0], r.Err); to != nil {
				go func() {
					v, err := s.Run(ctx, sc, calls[i])
					answer(i, v, err)
				}()
				continue
			}
			v, err := s.outcome(at, r)
			if !whole && isUnknown(err) {
				again = append(again, i)
				continue
			}
			answer(i, v, err)
		}
		if which = again; len(which) == 0 {
			s.ran.Store(sc, nil)
			return
		}
	}
}
