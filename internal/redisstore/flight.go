package redisstore

import (
	"context"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/redisstore/resp"
)

// flight sends one pipeline after another. One goroutine at a time uses a flight.
type flight struct {
	cmds  []redis.Cmder // for reuse
	spare []*call       // for reuse
	// nil for calls apart, for holds that replicas must confirm, for a cluster, and for a client
	// that the caller passed
	wire  *wire
	doubt time.Time // the connection is made again if it was last used before this time

	// The mutex of the gather guards the fields below.
	batch    []*call   // the pipeline in progress; empty if there is none
	sent     time.Time // when the pipeline in progress was sent
	byCaller bool      // the caller of the only call in the batch uses the flight
	use      int       // if byCaller, the number of the use of the wire
}

// lateAfter is the shortest time without a reply after which a connection may be dead.
const lateAfter = 16 * time.Millisecond

// longest is how long a pipeline may take if its callers have no deadline.
const longest = 3 * time.Second

// send sends the commands of the calls in one pipeline of g, and receives the replies, which the
// commands then contain. The result says what is true of all of them.
func (f *flight) send(g *gather, batch []*call) (r result) {
	s := g.settings
	ctx := batchContext{Context: context.Background()}
	if len(batch) == 1 {
		ctx.Context = batch[0].ctx // a hook sees the values of the only caller
	}
	cmds := f.cmds[:0]
	if s.plain {
		cmds = nil // do not reuse the slice, because a hook may keep it
	}

	// The pipeline may last until the latest of the deadlines.
	for _, p := range batch {
		if p.until.After(ctx.until) {
			ctx.until = p.until
		}
		for _, cmd := range p.cmds {
			cmds = append(cmds, cmd)
		}
	}

	if ctx.until.IsZero() { // no caller has a deadline
		ctx.until = time.Now().Add(longest)
	}

	rdb := g.rdb
	switch {
	case f.wire != nil:
		rdb = f.wire.rdb
	case g.confirm || batch[0].here:
		rdb = g.node // because the client of a cluster may send the commands to other servers
	}

	var wait resp.Command
	if g.confirm {
		wait = resp.NewCommand("wait", strconv.Itoa(s.replicas),
			strconv.FormatInt(patience(ctx.until), 10))
		cmds = append(cmds, wait)
	}

	r.err = f.exec(ctx, s, rdb, cmds)
	if g.confirm {
		r.lost = s.unconfirmed(wait.Reply(r.err))
	}

	if f.wire != nil {
		r.run = f.wire.run
	}
	if r.err != nil {
		f.inquire(&r, cmds)
	}
	clear(cmds)
	f.cmds = cmds
	return r
}

// inquire completes the result of a pipeline that failed. A wire knows whether it has sent a
// command. Without a wire, r.unsent is true only if each command says that it was not sent, because
// a client may send a part of them to another server, and because a hook may fail after the client
// has sent them.
func (f *flight) inquire(r *result, cmds []redis.Cmder) {
	r.unsent = true
	for _, cmd := range cmds {
		r.demoted = r.demoted || resp.IsReadOnly(cmd.Err())
		r.unsent = r.unsent && resp.IsUnsent(cmd.Err())
	}

	if f.wire == nil {
		return
	}
	over, sent := f.wire.state()
	r.unsent = !sent
	if over {
		r.err = errNoReply
	}
}

// isLate reports whether a pipeline has had no reply for so long that its connection may be dead.
// With a wire, this is as long as it took to make the connection. Without a wire, it is twice as
// long as a pipeline usually takes, which is the argument usual.
func (f *flight) isLate(now time.Time, usual time.Duration) bool {
	limit := 2 * usual
	if f.wire != nil {
		if _, sent := f.wire.state(); !sent {
			return false // a flight that still connects says nothing about other connections
		}
		limit = f.wire.setUp()
	}
	return len(f.batch) > 0 && now.Sub(f.sent) >= max(lateAfter, min(limit, lastPause))
}

// exec sends commands in a pipeline, or a single command by Process, which costs less. But it uses
// a pipeline for a single command, too, in two cases. A client that the caller passed has a second
// pool of connections for pipelines, so hasp does not wait behind other commands of the program. On
// a cluster, Process also sends COMMAND, to which the user may have no right.
func (f *flight) exec(ctx context.Context, s *settings, rdb redis.UniversalClient,
	cmds []redis.Cmder) error {
	return resp.Survive(func() error {
		if len(cmds) == 1 && !s.plain && !s.isCluster {
			return rdb.Process(ctx, cmds[0])
		}
		pipe := rdb.Pipeline()
		_ = pipe.BatchProcess(ctx, cmds...) // only queues the commands
		_, err := pipe.Exec(ctx)
		return err
	})
}

// batchContext has a deadline without a timer, because go-redis gives the deadline to the
// connection. It has the values of another context, but does not end with it.
type batchContext struct {
	context.Context
	until time.Time
}

func (c batchContext) Deadline() (time.Time, bool) { return c.until, true }
func (batchContext) Done() <-chan struct{}         { return nil }
func (batchContext) Err() error                    { return nil }
