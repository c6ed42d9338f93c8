package redisstore

import (
	"context"
	"crypto/sha1"
	"encoding/hex"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/redisstore/resp"
)

// Script is a Lua script that is run by its hash, and sent whole by a Store
// that runs it for the first time, or to a server that does not know it.
type Script struct {
	src, sha string
	kept     bool
}

// NewScript returns a script of that source.
func NewScript(src string) *Script {
	sum := sha1.Sum([]byte(src))
	return &Script{src: src, sha: hex.EncodeToString(sum[:])}
}

// NewHold returns a script that takes or prolongs a hold. Where the Store is to
// wait for replicas, a run of it that they have not confirmed in time is an
// error of unknown outcome. A reply of nil, of 0 or less, or of an array that
// begins with that, says that nothing was taken, and needs nobody's
// confirmation.
func NewHold(src string) *Script {
	sc := NewScript(src)
	sc.kept = true
	return sc
}

// Call is what one run of a script is given. All keys are of one cluster
// slot, and there is at least one.
type Call struct {
	Keys []string
	Args []any
}

// args returns the command that runs s, by hash or whole.
func (s *Script) args(c Call, whole bool) []any {
	all := make([]any, 0, 3+len(c.Keys)+len(c.Args))
	if whole {
		all = append(all, "eval", s.src)
	} else {
		all = append(all, "evalsha", s.sha)
	}
	all = append(all, len(c.Keys))
	for _, k := range c.Keys {
		all = append(all, k)
	}
	return append(all, c.Args...)
}

// unknown reports whether a server refused to run a script that it does not
// know: the run has not happened, so the script may be sent again.
func unknown(err error) bool { return err != nil && redis.HasErrorPrefix(err, "NOSCRIPT") }

// Run runs sc once and returns its reply as Do does.
func (s *Store) Run(ctx context.Context, sc *Script, c Call) (any, error) {
	// Many may be the first: by hash, each of them might have to ask twice.
	_, ran := s.ran.Load(sc)
	v, err := s.do(ctx, c.Keys[0], sc.args(c, !ran), sc.kept)
	switch {
	case !ran && err == nil:
		s.ran.Store(sc, nil)
	case ran && unknown(err):
		return s.do(ctx, c.Keys[0], sc.args(c, true), sc.kept)
	}
	return v, err
}

// reply is the outcome of one call of RunEach.
type reply struct {
	i   int
	v   any
	err error
}

// RunEach runs sc once for each of calls, in one pipeline for each server
// concerned, and tells done the outcomes. It returns when all are told or ctx
// has ended, and calls done from the calling goroutine only, so never later.
// What is left untold is of unknown outcome.
//
// The pipelines run on goroutines of their own, because a client that was
// handed in may not heed ctx: then they end when its own time-outs end them.
func (s *Store) RunEach(ctx context.Context, sc *Script, calls []Call, done func(i int, v any, err error)) {
	replies := make(chan reply, len(calls))
	go s.runEach(ctx, sc, calls, replies)
	for range calls {
		select {
		case r := <-replies:
			done(r.i, r.v, r.err)
		case <-ctx.Done():
			for {
				select {
				case r := <-replies:
					done(r.i, r.v, r.err)
				default:
					return
				}
			}
		}
	}
}

// runEach starts a pipeline for each server: on a cluster one that hangs must
// not hold up the renewals of the others.
func (s *Store) runEach(ctx context.Context, sc *Script, calls []Call, replies chan<- reply) {
	groups := map[any][]int{}
	at := make([]*server, len(calls))
	for i, c := range calls {
		srv, err := s.servers.find(ctx, c.Keys[0])
		if err != nil {
			replies <- reply{i, nil, s.fail(err)}
			continue
		}
		at[i] = srv
		part := s.part(ctx, srv, c.Keys[0])
		groups[part] = append(groups[part], i)
	}
	for _, which := range groups {
		go s.pipeline(ctx, at[which[0]], sc, calls, which, replies)
	}
}

// part tells the parts of a server from one another that may hang by
// themselves. Only a cluster whose client was handed in has any.
func (s *Store) part(ctx context.Context, at *server, key string) any {
	cluster, ok := at.rdb.(*redis.ClusterClient)
	if !ok {
		return at
	}
	// An error is told by the pipeline, which asks the same again.
	client, _ := cluster.MasterForKey(ctx, key)
	return client
}

// pipeline runs the calls that which lists, by hash, and once more in whole
// those that the server did not know. Those that it has no more are run one by
// one where they are.
func (s *Store) pipeline(ctx context.Context, at *server, sc *Script, calls []Call, which []int, replies chan<- reply) {
	within, end := s.begin(ctx)
	defer end()
	for _, whole := range []bool{false, true} {
		cmds := make([]*resp.Command, len(which))
		for j, i := range which {
			cmds[j] = resp.NewCommand(within, sc.args(calls[i], whole))
		}
		short := s.send(within, at, false, sc.kept, cmds...)
		again := which[:0]
		for j, i := range which {
			if to, _ := s.servers.follow(at, calls[i].Keys[0], cmds[j].Err()); to != nil {
				go func() {
					v, err := s.Run(ctx, sc, calls[i])
					replies <- reply{i, v, err}
				}()
				continue
			}
			v, err := s.result(at, cmds[j], short)
			if !whole && unknown(err) {
				again = append(again, i)
				continue
			}
			replies <- reply{i, v, err}
		}
		if which = again; len(which) == 0 {
			s.ran.Store(sc, nil)
			return
		}
	}
}
