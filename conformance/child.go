package conformance

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"sync"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/crew"
)

// child is this program, running as a child process.
type child struct {
	e *env
	*crew.Process
	log tail

	mu      sync.Mutex // guards all below
	next    int
	waiting map[int]chan error // the replies to requests, by their IDs
	gone    bool               // the process has ended
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
	p := &child{e: e, waiting: map[int]chan error{}}
	hello := p.expect(0)
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

// expect returns the channel of the error that a reply will bring.
func (p *child) expect(id int) <-chan error {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := make(chan error, 1)
	if p.gone {
		c <- errGone
	} else {
		p.waiting[id] = c
	}
	return c
}

// read hands out replies until the child ends.
func (p *child) read() {
	for r := (reply{}); p.Receive(&r) == nil; r = (reply{}) {
		p.mu.Lock()
		if c := p.waiting[r.ID]; c != nil {
			c <- r.error()
			delete(p.waiting, r.ID)
		}
		p.mu.Unlock()
	}

	// No reply will come to requests that are still open, nor to later ones.
	p.mu.Lock()
	defer p.mu.Unlock()
	p.gone = true
	for _, c := range p.waiting {
		c <- errGone
	}
}

var errGone = errors.New("the child process has ended")

// begin sends a request and returns the channel of its error.
func (p *child) begin(rq request) <-chan error {
	p.mu.Lock()
	p.next++
	rq.ID = p.next
	p.mu.Unlock()
	done := p.expect(rq.ID)

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
