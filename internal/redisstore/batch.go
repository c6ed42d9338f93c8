package redisstore

import (
	"context"

	"github.com/redis/go-redis/v9"
)

// DoAll sends commands, each once, over one connection. The Store must have a single server. The
// server executes the commands in the given order, but may execute commands of other clients in
// between. If Prepare made the Store, each reply contains the run ID of the server that sent it.
func (s *Store) DoAll(ctx context.Context, commands ...[]string) []Reply {
	at, err := s.ready(ctx, "")
	if err != nil {
		replies := make([]Reply, len(commands))
		for i := range replies {
			replies[i].Err = err
		}
		return replies
	}

	replies := make([]Reply, len(commands))
	at.calls.do(ctx, replies, commands...)
	for i, r := range replies {
		replies[i].Value, replies[i].Err = s.outcome(ctx, at, r)
	}
	return replies
}

// answer is the reply to the call with the index i.
type answer struct {
	i   int
	v   any
	err error
}

// RunEach runs sc once for each call, in one pipeline for each server, and passes each reply, or the
// error in its place, to the function done, on the caller's goroutine. A call ends when ctx ends.
func (s *Store) RunEach(ctx context.Context, sc *Script, calls []Call, done func(i int, v any, err error)) {
	answers := make(chan answer, len(calls))
	go s.runEach(ctx, sc, calls, answers)
	for range calls {
		a := <-answers
		done(a.i, a.v, a.err)
	}
}

// runEach starts a pipeline for each process.
func (s *Store) runEach(ctx context.Context, sc *Script, calls []Call, answers chan<- answer) {
	groups := map[*server][]int{}
	for i, c := range calls {
		srv, err := s.find(ctx, c.Keys[0])
		if err != nil {
			answers <- answer{i, nil, s.fail(err)}
			continue
		}
		groups[srv] = append(groups[srv], i)
	}
	for at, which := range groups {
		go s.runGroup(ctx, at, sc, calls, which, answers)
	}
}

// runGroup runs only the calls with the given indexes. It first sends the hash of the script. If
// the server does not know the script, runGroup sends the refused calls again, with the source. If
// the server redirects a call, Run runs that call alone on the other server.
func (s *Store) runGroup(ctx context.Context, at *server, sc *Script, calls []Call, which []int, answers chan<- answer) {
	if err := s.checked(ctx, at); err != nil {
		for _, i := range which {
			answers <- answer{i, nil, err}
		}
		return
	}
	for _, whole := range []bool{false, true} {
		commands := make([][]string, len(which))
		for j, i := range which {
			commands[j] = sc.appendArgs(make([]string, 0, 8), calls[i], whole)
		}
		replies := at.ask(ctx, false, sc.kept, commands...)

		again := which[:0]
		for j, i := range which {
			r := replies[j]
			if redirects(r.Err) && s.isCluster || s.isDemoted(r.Err) {
				go func() {
					v, err := s.Run(ctx, sc, calls[i])
					answers <- answer{i, v, err}
				}()
				continue
			}
			v, err := s.outcome(ctx, at, r)
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
