package conformance

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"sync"
	"sync/atomic"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/crew"
)

// child is this program, running as a child process.
type child struct {
	e *env
	*crew.Process
	log tail

	next    atomic.Int64
	replies sync.Map // the channels of errors of requests without a reply, by their IDs
}

// spawn starts a child and waits until it has opened a driver of its own. The end
// of the try kills it.
func (e *env) spawn() *child {
	spec, err := json.Marshal(childSpec{e.h.Name, e.store, e.long, e.timeout})
	must(err)
	args := e.childArgs
	if args == nil {
		args = os.Args[1:]
	}

	// The first reply may come at once, so expect it before the process starts.
	p, hello := &child{e: e}, make(chan error, 1)
	p.replies.Store(int64(0), hello)
	p.Process, err = crew.StartProgram(&p.log, args, childRole, string(spec))
	must(err)
	read := make(chan struct{})
	go func() {
		defer close(read)
		p.read()
	}()

	e.onEnd(func() {
		p.Kill()
		<-read
		p.Wait()
	})

	err = e.try(func() { must(e.arrives("the start of this program as a child", hello)) })
	if err != nil {
		fail("%w; does it come to this Check or Run with the arguments %q? It printed:\n%s", err, args, &p.log)
	}
	return p
}

// spawnMany starts n children at once.
func (e *env) spawnMany(n int) []*child {
	children := make([]*child, n)
	must(e.each(n, func(i int) { children[i] = e.spawn() }))
	return children
}

// read hands out replies until the child ends.
func (p *child) read() {
	for r := (reply{}); p.Receive(&r) == nil; r = (reply{}) {
		if c, ok := p.replies.LoadAndDelete(r.ID); ok {
			c.(chan error) <- r.error()
		}
	}

	// No reply will come to requests that are still open. Later ones cannot be sent.
	for _, c := range p.replies.Range {
		c.(chan error) <- errors.New("the child process has ended")
	}
}

// begin sends a request and returns the channel of its error.
func (p *child) begin(rq request) <-chan error {
	rq.ID = p.next.Add(1)
	done := make(chan error, 1)
	p.replies.Store(rq.ID, done)
	must(p.Send(rq))
	return done
}

// do makes one call in the child.
func (p *child) do(op string, c backend.Claim) error {
	return p.e.arrives(op+" in another process", p.begin(request{Op: op, Claim: c}))
}

// tail keeps the last bytes that are written to it.
type tail struct {
	mu sync.Mutex // guards b
	b  []byte
}

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.b = append(t.b, p...)
	if over := len(t.b) - 4096; over > 0 {
		t.b = bytes.Clone(t.b[over:])
	}
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.b)
}
