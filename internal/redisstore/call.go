package redisstore

import (
	"context"
	"fmt"
	"os"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/internal/calls"
	"github.com/hasplock/hasp/internal/redisstore/resp"
)

// call holds the commands of one caller. The field met is set when the replies have arrived or the
// caller has left. If the replies arrive first, the caller receives them.
type call struct {
	apart bool // in a pipeline that no other caller shares
	here  bool // see gather.doApart
	cmds  []resp.Command
	room  [1]resp.Command // usually the array of cmds
	texts []string        // the arguments of all commands
	args  []any           // the same for go-redis

	ctx  context.Context // of the caller
	quit context.Context // when it ends, the caller leaves within a tick
	// the deadline of the caller, or zero; after it, the caller leaves within a tick
	until time.Time

	met    atomic.Bool
	done   chan struct{} // receives a signal when result is set
	result result
}

// result is the result of a pipeline.
type result struct {
	err error // of the pipeline
	// in place of each reply that grants a hold, because too few replicas have confirmed it
	lost    error
	unsent  bool   // certainly no command was sent
	demoted bool   // a replica has refused a command
	run     string // the run ID of the server, if the Store asks for it
}

// maxShared limits the bytes in the arguments of a call in a common pipeline, because a server
// closes the connection if an argument is too long.
const maxShared = 64 << 10

// errNoReply means that no reply arrived before the caller left. The outcome is unknown.
var errNoReply = fmt.Errorf("no answer yet: %w", os.ErrDeadlineExceeded)

// fill stores the commands and the context of a caller. If plain is false, go-redis gets pointers
// to the arguments, which need no memory of their own. A hook would see these pointers, and may
// keep them, so plain is true for a client that the caller of hasp passed. The caller leaves as
// soon as the result parent ends. The method tick watches the rest of ctx, which is quit and until.
func (p *call) fill(ctx context.Context, plain bool, commands [][]string) (parent context.Context) {
	n := 0
	bytes := 0
	for _, args := range commands {
		n += len(args)
		for _, arg := range args {
			bytes += len(arg)
		}
	}

	p.apart = p.apart || bytes > maxShared

	// Make slices that have room for all arguments, because p.args points into p.texts, which must
	// not grow. With plain, do not reuse the old ones, because a hook may have kept them.
	if n > cap(p.texts) || plain {
		p.texts = make([]string, 0, n)
		p.args = make([]any, 0, n)
	}

	p.cmds = p.room[:0]
	for _, args := range commands {
		from := len(p.args)
		for _, arg := range args {
			if plain {
				p.args = append(p.args, arg)
				continue
			}
			p.texts = append(p.texts, arg)
			p.args = append(p.args, &p.texts[len(p.texts)-1])
		}
		p.cmds = append(p.cmds, resp.NewCommand(p.args[from:]...))
	}

	p.ctx = ctx
	parent, p.quit, p.until = calls.Split(ctx)
	return parent
}

// wait returns when the call was answered, or when parent ends.
func (p *call) wait(parent context.Context) {
	select {
	case <-p.done:
	case <-parent.Done():
		if !p.met.Swap(true) { // nobody has answered, and nobody will
			p.result.err = errNoReply
			return
		}
		<-p.done // an answer came first
	}
}

// answer gives a call its result, unless the caller has left or has a result already.
func (p *call) answer(r result) {
	if !p.met.Swap(true) {
		p.result = r
		p.done <- struct{}{}
	}
}

// unreached is errNoReply if the last attempt to connect has failed. It shows the cause, but does
// not wrap it, because the cause would say that the command was not sent, and it may have been.
type unreached struct{ cause error }

func (u unreached) Error() string {
	return fmt.Sprintf("%v; could not connect: %v", errNoReply, u.cause)
}

func (u unreached) Unwrap() error { return errNoReply }

// store stores the replies of a call that has ended in the slice replies.
func (p *call) store(replies []Reply) {
	r := p.result
	for i, cmd := range p.cmds {
		if r.err == errNoReply { // a flight may still write to cmd
			replies[i] = Reply{Err: errNoReply}
			continue
		}
		reply := cmd.Reply(r.err)
		reply.Run = r.run
		switch {
		case reply.Err != nil && r.unsent:
			reply.Err = resp.NotSent(reply.Err)
		case reply.Err == nil && r.lost != nil && !tookNothing(reply.Value):
			// The reply grants a hold that too few replicas have confirmed.
			reply = Reply{Err: r.lost}
		}
		replies[i] = reply
	}
}

// forget prepares a call to wait again after a pipeline that failed.
func (p *call) forget() {
	for _, cmd := range p.cmds {
		// Process keeps an old error even if the next attempt succeeds.
		cmd.SetErr(nil)
	}
}

// isOver reports whether the caller must leave, because its deadline has passed or quit has ended.
func (p *call) isOver(now time.Time) bool {
	return !p.until.IsZero() && !now.Before(p.until) || p.quit.Err() != nil
}
