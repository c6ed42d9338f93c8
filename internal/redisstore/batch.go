package redisstore

import (
	"context"
	"slices"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/redisstore/resp"
)

// Reply is the reply to one command of a pipeline, or its error.
type Reply struct {
	Value any
	Err   error
}

// pipeline sends commands to a server, each once, in one pipeline. If asking is true,
// ASKING precedes each. If kept is true, pipeline also waits for the replicas, and short
// is an error if too few have confirmed. The replies and errors are as go-redis returns
// them; outcome interprets them.
func (s *Store) pipeline(ctx context.Context, at *server, asking, kept bool, commands ...[]any) (replies []Reply, short error) {
	within, end := s.calls.Begin(ctx)
	defer end()
	replies = make([]Reply, len(commands))
	// A client that the caller passed gets a pipeline even for one command, because it
	// has a second pool, for pipelines. There a renewal does not queue behind callers
	// that want locks.
	if len(commands) == 1 && !asking && !kept && s.calls != nil {
		replies[0].Value, replies[0].Err = resp.Do(within, at.rdb, commands[0])
		return replies, nil
	}

	pipe := at.rdb.Pipeline()
	add := func(cmd *resp.Command, args ...any) {
		cmd.Cmd = redis.NewCmd(within, args...)
		_ = pipe.Process(within, cmd) // only queues the command; Exec sets its error
	}
	cmds := make([]resp.Command, len(commands))
	for i, args := range commands {
		if asking {
			add(new(resp.Command), "asking")
		}
		if s.calls == nil {
			// A hook of the caller's client may change the arguments, and other
			// pipelines may send the same slice.
			args = slices.Clone(args)
		}
		add(&cmds[i], args...)
	}
	var wait *resp.Command
	if kept {
		// WAIT must travel in the same pipeline, because it covers only writes of
		// its own connection.
		wait = new(resp.Command)
		add(wait, "wait", s.replicas, patience(ctx))
	}

	err := resp.Survive(func() error { _, err := pipe.Exec(within); return err })
	for i, cmd := range cmds {
		if err != nil && cmd.Err() == nil && cmd.Val() == nil {
			cmd.SetErr(err) // a hook of the client has stopped the pipeline
		}
		replies[i].Value, replies[i].Err = cmd.Result()
	}
	return replies, s.confirmed(wait)
}

// DoAll sends commands, each once, over one connection. The Store must be one
// server. The server executes them in their order; commands of other clients can
// come between them.
func (s *Store) DoAll(ctx context.Context, commands ...[]any) []Reply {
	at, err := s.servers.find(ctx, "")
	if err != nil {
		replies := make([]Reply, len(commands))
		for i := range replies {
			replies[i].Err = s.fail(err)
		}
		return replies
	}

	replies, _ := s.pipeline(ctx, at, false, false, commands...)
	for i, r := range replies {
		if cancelled(ctx, r.Err) {
			// The caller has left. The server may have executed the command.
			replies[i].Err = s.named(at.name, ctx.Err())
			continue
		}
		replies[i].Value, replies[i].Err = s.outcome(at, r.Value, r.Err, nil)
	}
	return replies
}

// answer is the reply to one of the calls that RunEach runs.
type answer struct {
	i int // the index of the call
	Reply
}

// RunEach runs sc once for each of calls, in one pipeline for each server. It passes
// each reply to done. It returns when done has all replies, or when ctx has ended.
// The outcome of a call without a reply is unknown. done runs on the goroutine of the
// caller, so never after RunEach has returned.
//
// The pipelines run on goroutines of their own, because a client that the caller
// passed may not obey ctx. Then they run on until the client's own timeouts.
func (s *Store) RunEach(ctx context.Context, sc *Script, calls []Call, done func(i int, v any, err error)) {
	answers := make(chan answer, len(calls))
	go s.runEach(ctx, sc, calls, answers)
	for range calls {
		var a answer
		select {
		case a = <-answers:
		case <-ctx.Done():
			select {
			case a = <-answers: // one that has arrived
			default:
				return
			}
		}
		done(a.i, a.Value, a.Err)
	}
}

// runEach starts a pipeline for each process, so that a server of a cluster that hangs
// does not delay the renewals on the others.
func (s *Store) runEach(ctx context.Context, sc *Script, calls []Call, answers chan<- answer) {
	groups := map[redis.UniversalClient][]int{}
	at := make([]*server, len(calls))
	for i, c := range calls {
		srv, err := s.servers.find(ctx, c.Keys[0])
		if err != nil {
			answers <- answer{i, Reply{nil, s.fail(err)}}
			continue
		}
		at[i] = srv
		// After an error, client is nil. The pipeline finds the client itself, or reports
		// why it cannot.
		client, _ := srv.client(ctx, c.Keys[0])
		groups[client] = append(groups[client], i)
	}
	for _, which := range groups {
		go s.runGroup(ctx, at[which[0]], sc, calls, which, answers)
	}
}

// runGroup runs the calls whose indexes are in which. It first sends the hash of the
// script. If the server does not know the script for some calls, runGroup sends these
// again with the source. A call that the server redirects runs alone on the other
// server.
func (s *Store) runGroup(ctx context.Context, at *server, sc *Script, calls []Call, which []int, answers chan<- answer) {
	kept := sc.kept && s.replicas > 0
	for _, whole := range []bool{false, true} {
		commands := make([][]any, len(which))
		for j, i := range which {
			commands[j] = sc.args(calls[i], whole)
		}
		replies, short := s.pipeline(ctx, at, false, kept, commands...)

		again := which[:0]
		for j, i := range which {
			r := replies[j]
			if to, _ := s.servers.follow(at, calls[i].Keys[0], r.Err); to != nil {
				go func() {
					v, err := s.Run(ctx, sc, calls[i])
					answers <- answer{i, Reply{v, err}}
				}()
				continue
			}
			v, err := s.outcome(at, r.Value, r.Err, short)
			if !whole && isUnknown(err) {
				again = append(again, i)
				continue
			}
			answers <- answer{i, Reply{v, err}}
		}
		if which = again; len(which) == 0 {
			s.ran.Store(sc, nil)
			return
		}
	}
}
