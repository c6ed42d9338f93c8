package conformance

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/crew"
)

// child is another process of this program. The suite starts it and sends it requests, one after
// another.
type child struct {
	e *env
	*crew.Process
	asking sync.Mutex // held from the send of a request until its reply has arrived
}

// spawn starts a child and waits until the child has opened a driver. The child is killed at the
// end of the try.
func (e *env) spawn() *child {
	spec, err := json.Marshal(childSpec{e.h.Name, e.store, e.long, e.timeout})
	must(err)
	args := e.childArgs
	if args == nil {
		args = os.Args[1:]
	}

	log, err := os.CreateTemp("", "hasp-conformance-")
	must(err)
	e.onEnd(func() {
		log.Close()
		os.Remove(log.Name())
	})

	p := &child{e: e}
	p.Process, err = crew.StartProgram(log, args, childRole, string(spec))
	must(err)
	e.onEnd(func() {
		p.Kill()

		// Wait must follow the last Receive. If a goroutine is in Receive, it holds p.asking, and
		// Kill makes Receive fail.
		p.asking.Lock()
		defer p.asking.Unlock()
		p.Wait()
	})

	// The child sends the first reply without a request. The inner try catches a timeout, so that
	// the error below can say what the child has printed.
	err = e.try(func() {
		must(e.arrives("the start of this program as a child", e.begin(p.reply)))
	})

	if err != nil {
		printed, _ := os.ReadFile(log.Name())
		fail("%w; does it come to this Check or Run with the arguments %q? It printed:\n%s", err,
			args, printed)
	}

	return p
}

// reply waits for the next reply of the child.
func (p *child) reply() error {
	p.asking.Lock()
	defer p.asking.Unlock()
	return p.replyLocked()
}

// replyLocked does the same as the method reply, for a caller that holds p.asking.
func (p *child) replyLocked() error {
	var r reply
	if p.Receive(&r) != nil {
		return errors.New("the child process has ended")
	}
	return r.error()
}

// begin sends a request. The channel that it returns receives the error of the reply.
func (p *child) begin(rq request) <-chan error {
	return p.e.begin(func() error {
		p.asking.Lock()
		defer p.asking.Unlock()
		must(p.Send(rq))
		return p.replyLocked()
	})
}

// do lets the child execute one operation, and returns the error of the reply.
func (p *child) do(op string, c backend.Claim) error {
	return p.e.arrives(op+" in another process", p.begin(request{Op: op, Claim: c}))
}

const childRole = "conformance"

// childSpec is the argument of a child process, in JSON.
type childSpec struct {
	Name          string // the Harness's Name
	Store         string
	Long, Timeout time.Duration // the TTL and the Timeout of the child's Client
}

// Child reports whether the suite has started this process as a child. In a child the next call of
// Check or Run does not return, and a TestMain need not start servers.
func Child() bool {
	role, _ := crew.Role()
	return role == childRole
}

// request is a message from the parent.
type request struct {
	Op    string // the operation; see the method do of agent
	Claim backend.Claim
	Dir   string // for "turns": where the holder makes a directory
	Times int
}

// reply is a message from the child. The first reply reports whether the child has opened its
// driver.
type reply struct {
	Err  string
	Kind int // the index of the matching error in kinds; -1 if none matches
}

// kinds lists the errors that the parent can match with errors.Is. Of other errors the parent
// receives only the text.
var kinds = []error{hasp.ErrHeld, hasp.ErrLost}

// replyOf returns the reply to a request that ended with err.
func replyOf(err error) reply {
	r := reply{Kind: slices.IndexFunc(kinds, func(kind error) bool { return errors.Is(err, kind) })}
	if err != nil {
		r.Err = err.Error()
	}
	return r
}

// error returns the error that r reports, or nil.
func (r reply) error() error {
	switch {
	case r.Err == "":
		return nil
	case r.Kind < 0:
		return errors.New(r.Err)
	}
	return fmt.Errorf("%w (%s)", kinds[r.Kind], r.Err)
}

// serveIfChild serves the parent, and does not return, if this process is a child of harness h. If
// this process is no child, serveIfChild returns nil. If it is a child of another harness, or if h
// cannot serve, serveIfChild returns an error.
func serveIfChild(ctx context.Context, h Harness) error {
	if !Child() {
		return nil
	}

	var spec childSpec
	_, args := crew.Role()
	if json.Unmarshal([]byte(strings.Join(args, "")), &spec) != nil {
		return fmt.Errorf("conformance: a child gets %q", args)
	}

	if spec.Name != h.Name {
		return fmt.Errorf("conformance: this process is a child of harness %q, not of %q",
			spec.Name, h.Name)
	}

	if h.Open == nil {
		return errors.New("conformance: Harness.Open is nil")
	}

	a := &agent{parent: crew.Parent(), leases: map[string]*hasp.Lease{}}
	os.Exit(a.serve(ctx, h, spec))
	return nil // not reached
}

// agent executes the parent's requests in a child.
type agent struct {
	parent *crew.Pipe
	d      backend.Driver
	client *hasp.Client
	leases map[string]*hasp.Lease // by the token of each request "lock"
}

// serve answers requests until the parent stops sending or has ended. It returns an exit code.
func (a *agent) serve(ctx context.Context, h Harness, spec childSpec) int {
	err := a.open(ctx, h, spec)
	a.parent.Send(replyOf(err))
	if err != nil {
		return 1
	}

	for {
		var rq request
		if a.parent.Receive(&rq) != nil {
			return 0
		}
		a.parent.Send(replyOf(a.do(ctx, rq)))
	}
}

// open opens a driver, and creates a Client over it.
func (a *agent) open(ctx context.Context, h Harness, spec childSpec) (err error) {
	a.d, err = h.Open(ctx, spec.Store)
	if err != nil {
		return err
	}
	a.client, err = hasp.New(a.d, &hasp.Options{TTL: spec.Long, Timeout: spec.Timeout})
	return err
}

// do executes one request. The operation "lock" keeps its lease, so that later requests with the
// same claim can ask for the lease's error ("err") or unlock it ("unlock").
func (a *agent) do(ctx context.Context, rq request) error {
	c := rq.Claim
	switch rq.Op {
	case "acquire":
		return errOf(a.d.Acquire(ctx, c))
	case "lock":
		lease, err := a.client.Lock(ctx, c.Key, hasp.WithTTL(c.TTL))
		if err == nil {
			a.leases[c.Token] = lease
		}

		return err
	case "err":
		return a.leases[c.Token].Err()
	case "unlock":
		return a.leases[c.Token].Unlock(ctx)
	case "turns":
		return turns(ctx, a.client, c.Key, rq.Dir, rq.Times, c.TTL)
	}

	return fmt.Errorf("unknown operation %q", rq.Op)
}
