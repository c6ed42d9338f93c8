package redisstore

import (
	"context"
	"crypto/sha1"
	"encoding/hex"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/redisstore/resp"
)

// Script is a Lua script. A Store runs it by its hash. It sends the source the first
// time, and to a server that does not know the script.
type Script struct {
	src, sha string
	kept     bool // replicas must confirm a run
}

// NewScript returns a script with this source.
func NewScript(src string) *Script {
	sum := sha1.Sum([]byte(src))
	return &Script{src: src, sha: hex.EncodeToString(sum[:])}
}

// NewHold returns a script that takes or extends a hold. If the Store waits for
// replicas and too few confirm a run in time, Run returns an error: the outcome is
// unknown. If the reply is nil, or 0 or less, or an array that begins with one of
// these, then the script took nothing, and no replica needs to confirm that.
func NewHold(src string) *Script {
	sc := NewScript(src)
	sc.kept = true
	return sc
}

// Call has the arguments for one run of a script. There is at least one key, and all
// keys are in one cluster slot.
type Call struct {
	Keys []string
	Args []any
}

// args returns the command that runs s, by its hash or with its source.
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

// isUnknown reports whether a server does not know a script. Then the script has not
// run, so it may be sent again.
func isUnknown(err error) bool { return err != nil && redis.HasErrorPrefix(err, "NOSCRIPT") }

// Run runs sc once and returns its reply as Do does.
func (s *Store) Run(ctx context.Context, sc *Script, c Call) (any, error) {
	// Before the first reply, every run sends the source. By the hash, many concurrent
	// first runs would all be refused, and be sent twice.
	_, ran := s.ran.Load(sc)
	v, err := s.do(ctx, c.Keys[0], sc.args(c, !ran), sc.kept)
	switch {
	case !ran && err == nil:
		s.ran.Store(sc, nil)
	case ran && isUnknown(err):
		return s.do(ctx, c.Keys[0], sc.args(c, true), sc.kept)
	}
	return v, err
}

// reply is the reply to one call of RunEach.
type reply struct {
	i   int // the index of the call
	v   any
	err error
}

// RunEach runs sc once for each of calls, in one pipeline for each server. It passes
// each reply to done. It returns when done has all replies, or when ctx has ended.
// The outcome of a call without a reply is unknown. done runs on the goroutine of the
// caller, so never after RunEach has returned.
//
// The pipelines run on goroutines of their own, because a client that the caller
// passed may not obey ctx. Then they run on until the client's own timeouts.
func (s *Store) RunEach(ctx context.Context, sc *Script, calls []Call, done func(i int, v any, err error)) {
	replies := make(chan reply, len(calls))
	go s.runEach(ctx, sc, calls, replies)
	for range calls {
		select {
		case r := <-replies:
			done(r.i, r.v, r.err)
		case <-ctx.Done():
			for { // the replies that have arrived
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

// runEach starts a pipeline for each server, so that a server of a cluster that hangs
// does not delay the renewals on the others.
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

// part returns a value that is the same for keys on the same process. A server has
// several processes only if the caller passed a cluster client.
func (s *Store) part(ctx context.Context, at *server, key string) any {
	cluster, ok := at.rdb.(*redis.ClusterClient)
	if !ok {
		return at
	}
	// If there is an error, the pipeline gets the same one and reports it.
	client, _ := cluster.MasterForKey(ctx, key)
	return client
}

// pipeline runs the calls whose indexes are in which. It first sends the hash of the
// script. If the server does not know the script for some calls, pipeline sends these
// again with the source. A call that the server redirects runs alone on the other
// server.
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
			if !whole && isUnknown(err) {
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
