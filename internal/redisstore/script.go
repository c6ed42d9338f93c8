package redisstore

import (
	"context"
	"crypto/sha1"
	"encoding/hex"

	"github.com/redis/go-redis/v9"
)

// Script is a Lua script that is run by its hash, and sent whole to a server
// that does not know it yet.
type Script struct{ src, sha string }

// NewScript returns a script of that source.
func NewScript(src string) *Script {
	sum := sha1.Sum([]byte(src))
	return &Script{src, hex.EncodeToString(sum[:])}
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
func unknown(err error) bool { return redis.HasErrorPrefix(err, "NOSCRIPT") }

// Run runs sc once and returns its reply as Do does.
func (s *Store) Run(ctx context.Context, sc *Script, c Call) (any, error) {
	v, err := s.Do(ctx, sc.args(c, false)...)
	if unknown(err) {
		return s.Do(ctx, sc.args(c, true)...)
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
	cluster, ok := s.rdb.(*redis.ClusterClient)
	if !ok {
		all := make([]int, len(calls))
		for i := range all {
			all[i] = i
		}
		s.pipeline(ctx, sc, calls, all, replies)
		return
	}
	groups := map[*redis.Client][]int{}
	for i, c := range calls {
		// An error is told by the pipeline, which asks the same again.
		node, _ := cluster.MasterForKey(ctx, c.Keys[0])
		groups[node] = append(groups[node], i)
	}
	for _, which := range groups {
		go s.pipeline(ctx, sc, calls, which, replies)
	}
}

// pipeline runs the calls that which lists, by hash, and once more in whole
// those that the server did not know.
func (s *Store) pipeline(ctx context.Context, sc *Script, calls []Call, which []int, replies chan<- reply) {
	ctx, end := s.begin(ctx)
	defer end()
	for _, whole := range []bool{false, true} {
		pipe := s.rdb.Pipeline()
		cmds := make([]*once, len(which))
		for j, i := range which {
			cmds[j] = newOnce(ctx, sc.args(calls[i], whole))
			_ = pipe.Process(ctx, cmds[j])
		}
		_, execErr := pipe.Exec(ctx)
		again := which[:0]
		for j, i := range which {
			v, err := s.result(cmds[j])
			if err == nil && v == nil && execErr != nil {
				err = s.fail(execErr) // a hook of the client stopped the batch
			}
			if !whole && unknown(err) {
				again = append(again, i)
				continue
			}
			replies <- reply{i, v, err}
		}
		if which = again; len(which) == 0 {
			return
		}
	}
}
