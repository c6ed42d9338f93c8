package faultproxy

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// conn is one connection through a proxy.
type conn struct {
	p      *Proxy
	client net.Conn
	server net.Conn
	over   chan struct{} // closed when the connection has ended
	ended  atomic.Bool
	fault  atomic.Int32 // the Fault of the last command that was passed on

	forgotten atomic.Bool // set by Proxy.Forget

	part []byte // the beginning of a promise's place, if the last read ended within that place

	more     chan struct{} // receives a signal when queue has grown; capacity 1
	mu       sync.Mutex    // guards the fields below
	queue    []reply       // what to send to the client
	promised []promise
}

// promise is an answer that the proxy itself gives. The server echoes the random text in the field
// place. The client receives the field reply instead, so the answer comes in the order of replies.
type promise struct {
	reply string
	place string
}

// reply is a chunk of bytes for the client.
type reply struct {
	bytes []byte    // nil ends the connection
	due   time.Time // the earliest time to send bytes
}

// serve passes bytes between a client and the server until either ends.
func (p *Proxy) serve(client net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.down {
		client.Close()
		return
	}

	p.wg.Go(func() {
		server, err := p.dial()
		if err != nil {
			client.Close()
			return
		}

		c := &conn{p: p, client: client, server: server, over: make(chan struct{}),
			more: make(chan struct{}, 1)}
		ahead := make(chan []byte, 64)
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.down { // Down was called during the dial
			c.close()
			return
		}

		p.conns[c] = true
		p.wg.Go(func() { c.readAhead(ahead) })
		p.wg.Go(func() { c.requests(&reader{chunks: ahead}) })
		p.wg.Go(c.replies)
		p.wg.Go(c.deliver)
	})
}

func (c *conn) close() {
	if !c.ended.Swap(true) {
		close(c.over)
		c.client.Close()
		c.server.Close()
	}
}

// remove closes the connection and removes it from the proxy.
func (c *conn) remove() {
	c.close()
	c.p.mu.Lock()
	defer c.p.mu.Unlock()
	delete(c.p.conns, c)
}

// readAhead reads what the client sends. Therefore a client can write while the server hangs, even
// on a pipe, which unlike a socket has no buffer.
func (c *conn) readAhead(to chan<- []byte) {
	defer close(to)
	for {
		b := make([]byte, 4<<10)
		n, err := c.client.Read(b)
		if err != nil {
			return
		}

		select {
		case to <- b[:n]:
		case <-c.over:
			return
		}
	}
}

// reader is an io.Reader of the chunks.
type reader struct {
	chunks <-chan []byte
	rest   []byte
}

func (r *reader) Read(b []byte) (int, error) {
	if len(r.rest) == 0 {
		r.rest = <-r.chunks
	}
	n := copy(b, r.rest)
	r.rest = r.rest[n:]
	if n == 0 {
		return 0, io.EOF
	}
	return n, nil
}

func (c *conn) requests(client io.Reader) {
	defer c.remove()
	in := bufio.NewReader(client)
	// If a stream does not begin with a command, as with TLS, its later bytes are no commands
	// either, even if some look like one.
	first, err := in.Peek(1)
	read := readCommand
	if err == nil && first[0] != '*' {
		read = readBytes
	}

	for {
		raw, args, err := read(in)
		if err != nil && c.forgotten.Load() {
			<-c.over // the server does not learn that the client has closed the connection
		}
		if err != nil || !c.open(&c.p.in) {
			return
		}

		switch r := c.p.judge(args); r.fault {
		case LoseRequest:
			return
		case LoseReply, HangReply:
			c.fault.Store(int32(r.fault))
		case answer:
			// Make the server echo the place, so that the answer comes in the order of replies.
			raw = fmt.Appendf(nil, "*2\r\n$4\r\necho\r\n%s", c.promise(r))
		case HoldRequest:
			<-r.release // even if the client disconnects meanwhile
		}

		if c.forgotten.Load() {
			continue
		}
		if _, err := c.server.Write(raw); err != nil {
			return
		}
	}
}

// The method replies reads all replies without delay, even those that the client must not receive,
// because miniredis holds locks while it writes.
func (c *conn) replies() {
	buf := make([]byte, 32<<10)
	for {
		n, err := c.server.Read(buf)
		if err == nil && c.p.replied() {
			c.fault.Store(int32(deaf))
		}

		f := Fault(c.fault.Load())
		silent := f == HangReply || c.forgotten.Load()
		switch {
		case silent && err != nil:
			<-c.over // the client does not learn that the server has closed the connection
			return
		case silent, f == deaf && err == nil:
		case err != nil:
			c.send(nil)
			return
		case f == LoseReply:
			c.send(nil)
		default:
			if b := c.kept(buf[:n]); len(b) > 0 {
				c.send(b)
			}
		}
	}
}

// promise registers the answer of r, and returns the place that the server must echo.
func (c *conn) promise(r rule) (place string) {
	p := promise{r.reply, fmt.Sprintf("$26\r\n%s\r\n", rand.Text())}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.promised = append(c.promised, p)
	return p.place
}

// The method kept returns the server's bytes, but with the proxy's answers instead of the echoes.
func (c *conn) kept(read []byte) (all []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	read = append(c.part, read...)
	c.part = nil

	for len(c.promised) > 0 {
		p := c.promised[0]
		before, after, ok := bytes.Cut(read, []byte(p.place))
		if !ok {
			// If the read ends within a place, keep the beginning of the place for the next read.
			n := min(len(p.place)-1, len(read))
			for !bytes.HasSuffix(read, []byte(p.place[:n])) {
				n--
			}

			end := len(read) - n
			c.part = bytes.Clone(read[end:])
			read = read[:end]
			break
		}

		all = append(append(all, before...), p.reply...)
		read = after
		c.promised = c.promised[1:]
	}

	return append(all, read...)
}

// send queues b for the client. If b is nil, it queues the end of the connection.
func (c *conn) send(b []byte) {
	c.p.mu.Lock()
	delay := c.p.delay
	c.p.mu.Unlock()
	c.mu.Lock()
	c.queue = append(c.queue, reply{b, time.Now().Add(delay)})
	c.mu.Unlock()
	select {
	case c.more <- struct{}{}:
	default:
	}
}

func (c *conn) deliver() {
	defer c.close()
	for {
		select {
		case <-c.more:
		case <-c.over:
			return
		}

		c.mu.Lock()
		queue := c.queue
		c.queue = nil
		c.mu.Unlock()
		for _, r := range queue {
			if r.bytes == nil {
				return
			}
			if left := time.Until(r.due); left > 0 {
				time.Sleep(left)
			}
			if !c.open(&c.p.out) {
				return
			}
			if c.forgotten.Load() {
				continue
			}
			if _, err := c.client.Write(r.bytes); err != nil {
				return
			}
		}
	}
}

// open waits while the direction way of the proxy is stalled. It reports whether the connection is
// still open.
func (c *conn) open(way *chan struct{}) bool {
	c.p.mu.Lock()
	flow := *way
	c.p.mu.Unlock()
	select {
	case <-flow:
	case <-c.over:
	}
	return !c.ended.Load()
}

// readBytes returns the bytes that have arrived. It waits for the first byte.
func readBytes(in *bufio.Reader) (raw []byte, args []string, err error) {
	if _, err := in.Peek(1); err != nil {
		return nil, nil, err
	}
	raw = make([]byte, in.Buffered())
	_, err = io.ReadFull(in, raw)
	return raw, nil, err
}

func readCommand(in *bufio.Reader) (raw []byte, args []string, err error) {
	line, err := in.ReadString('\n')
	if err != nil {
		return nil, nil, err
	}

	raw = append(raw, line...)
	n, err := count(line, '*')
	if err != nil || n == 0 {
		return nil, nil, fmt.Errorf("not a command: %q", line)
	}

	for range n {
		if line, err = in.ReadString('\n'); err != nil {
			return nil, nil, err
		}

		size, err := count(line, '$')
		if err != nil {
			return nil, nil, err
		}

		arg := make([]byte, size+2)
		if _, err := io.ReadFull(in, arg); err != nil {
			return nil, nil, err
		}

		raw = append(append(raw, line...), arg...)
		args = append(args, string(arg[:size]))
	}

	return raw, args, nil
}

// count returns the number in a header line such as "*3".
func count(line string, kind byte) (int, error) {
	line = strings.TrimRight(line, "\r\n")
	if len(line) < 2 || line[0] != kind {
		return 0, fmt.Errorf("not a header: %q", line)
	}
	return strconv.Atoi(line[1:])
}
