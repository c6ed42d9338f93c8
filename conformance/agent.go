package conformance

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

// childEnv is the environment variable that makes a process a child of the suite.
const childEnv = "HASP_CONFORMANCE_CHILD"

// childMark begins the lines of a child that are for its parent. The program may
// print other lines.
const childMark = "hasp-conformance: "

// childSpec is the content of childEnv.
type childSpec struct {
	Name  string // of the Harness
	Store string
}

// Child reports whether the suite has started this process as a child. In a child
// the next call of Check or Run does not return. A TestMain that starts containers
// can skip that in a child.
func Child() bool { return os.Getenv(childEnv) != "" }

// request is a line from the parent.
type request struct {
	ID    int
	Op    string // "acquire", "wait", "renew", "release"; "lock", "err", "unlock", "min-hold"; "count"
	Claim backend.Claim
	Dir   string // of count
	Times int
}

// reply is a line from the child. The first one has no ID and reports that the
// driver is open.
type reply struct {
	ID    int
	Err   string   `json:",omitempty"`
	Kinds []string `json:",omitempty"` // of Err
}

// kinds are the errors that processes send to each other by name.
var kinds = map[string]error{
	"held": hasp.ErrHeld, "lost": hasp.ErrLost, "released": hasp.ErrReleased, "closed": hasp.ErrClosed,
	"invalid": hasp.ErrInvalid, "unsupported": errors.ErrUnsupported,
}

// remoteError is an error of another process.
type remoteError struct {
	text  string
	kinds []string
}

func (e *remoteError) Error() string { return e.text }

func (e *remoteError) Is(target error) bool {
	return slices.ContainsFunc(e.kinds, func(kind string) bool { return kinds[kind] == target })
}

// fail puts err into r.
func (r *reply) fail(err error) {
	if err == nil {
		return
	}
	r.Err = err.Error()
	for name, kind := range kinds {
		if errors.Is(err, kind) {
			r.Kinds = append(r.Kinds, name)
		}
	}
}

// error returns the error that fail has put into r.
func (r *reply) error() error {
	if r.Err == "" {
		return nil
	}
	return &remoteError{r.Err, r.Kinds}
}

// serveIfChild does not return in a child of this harness.
func serveIfChild(ctx context.Context, h Harness) error {
	text := os.Getenv(childEnv)
	if text == "" {
		return nil
	}
	var spec childSpec
	if err := json.Unmarshal([]byte(text), &spec); err != nil {
		return fmt.Errorf("conformance: %s: %w", childEnv, err)
	}
	if spec.Name != h.Name {
		return fmt.Errorf("conformance: this process is a child of harness %q, not of %q", spec.Name, h.Name)
	}
	if h.Open == nil {
		return errors.New("conformance: Harness.Open is nil")
	}

	h.setDefaults()
	a := &agent{out: os.Stdout, leases: map[string]*hasp.Lease{}}
	os.Exit(a.serve(ctx, h, spec.Store, os.Stdin))
	return nil
}

// agent executes the parent's requests in a child.
type agent struct {
	d      backend.Driver
	client *hasp.Client

	mu     sync.Mutex // guards all below
	out    io.Writer
	leases map[string]*hasp.Lease // by the token of the request that locked
}

// serve answers requests until its input ends. The input also ends with the parent.
// It returns an exit code.
func (a *agent) serve(ctx context.Context, h Harness, store string, in io.Reader) int {
	err := a.open(ctx, h, store)
	a.reply(0, err)
	if err != nil {
		return 1
	}

	lines := bufio.NewScanner(in)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var rq request
		if err := json.Unmarshal(lines.Bytes(), &rq); err != nil {
			return 1
		}

		// A Wait must not delay the requests after it.
		go func() { a.reply(rq.ID, a.do(ctx, rq)) }()
	}
	return 0
}

// open opens a driver, and a Client over another.
func (a *agent) open(ctx context.Context, h Harness, store string) (err error) {
	if a.d, err = h.Open(ctx, store); err != nil {
		return err
	}
	under, err := h.Open(ctx, store)
	if err != nil {
		return err
	}
	a.client = hasp.New(under, &hasp.Options{TTL: h.Term, Timeout: h.Timeout})
	return nil
}

// reply sends the outcome of a request.
func (a *agent) reply(id int, err error) {
	r := reply{ID: id}
	r.fail(err)
	b, err := json.Marshal(r)
	if err != nil {
		panic(err) // of a struct of strings and numbers
	}

	a.mu.Lock()
	defer a.mu.Unlock()
	fmt.Fprintf(a.out, "\n%s%s\n", childMark, b)
}

// do executes a request.
func (a *agent) do(ctx context.Context, rq request) error {
	c := rq.Claim
	switch rq.Op {
	case "acquire":
		return errOf(a.d.Acquire(ctx, c))
	case "wait":
		return errOf(a.d.(backend.Waiter).Wait(ctx, c))
	case "renew":
		return errOf(renewBy(ctx, a.d, c))
	case "release":
		return a.d.Release(ctx, c)
	case "lock":
		return a.lock(ctx, c)
	case "err":
		return a.lease(c).Err()
	case "unlock":
		return a.lease(c).Unlock(ctx)
	case "min-hold":
		return a.lockAndKeep(ctx, c)
	case "count":
		return count(ctx, a.client, c.Key, rq.Dir, rq.Times)
	}

	return fmt.Errorf("unknown operation %q", rq.Op)
}

func (a *agent) lock(ctx context.Context, c backend.Claim) error {
	lease, err := a.client.Lock(ctx, c.Key, hasp.WithTTL(c.TTL))
	if err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.leases[c.Token] = lease
	return nil
}

// lockAndKeep locks with a min hold of c.TTL, and unlocks.
func (a *agent) lockAndKeep(ctx context.Context, c backend.Claim) error {
	lease, err := a.client.Lock(ctx, c.Key, hasp.WithMinHold(c.TTL))
	if err != nil {
		return err
	}
	return lease.Unlock(ctx)
}

// lease returns the lease that the request of c has locked.
func (a *agent) lease(c backend.Claim) *hasp.Lease {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.leases[c.Token]
}

// parseReply decodes a line of a child's output.
func parseReply(line string) (r reply, ok bool) {
	text, ok := strings.CutPrefix(line, childMark)
	return r, ok && json.Unmarshal([]byte(text), &r) == nil
}
