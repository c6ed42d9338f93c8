package resp

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"strconv"
)

// What a server may say at most. The longest reply that hasp asks for tells who
// waits for a key; none is near these.
const (
	maxReply = 64 << 20 // bytes in a reply
	maxItems = 1 << 18  // values in a reply
	maxLine  = 64 << 10 // bytes in a line
	maxDepth = 32       // of arrays in arrays
)

var (
	errProtocol = errors.New("that is not the protocol of Redis")
	errTooMuch  = errors.New("a reply that is longer than any that hasp asks for")
)

// guard is a connection whose reader takes the server at its word: go-redis
// makes room for what a reply announces before it comes, and reads a line for
// as long as it lasts. So what is no reply, or too much of one, is not passed
// on, and nothing after it: the connection is of no use any more.
type guard struct {
	net.Conn
	replies replies
	err     error
}

// Guard returns c with a guard on what it reads.
func Guard(c net.Conn) net.Conn { return &guard{Conn: c} }

func (g *guard) Read(p []byte) (int, error) {
	if g.err != nil {
		return 0, g.err
	}
	n, err := g.Conn.Read(p)
	if g.err = g.replies.pass(p[:n]); g.err != nil {
		return 0, g.err
	}
	return n, err
}

// NetConn is what is below, which go-redis asks whether there is something to
// read.
func (g *guard) NetConn() net.Conn { return g.Conn }

// replies follows a stream of replies, without keeping any of it.
type replies struct {
	head   []byte // how the line begins that is under way
	length int    // of that line
	last   byte   // of what has come of that line
	bulk   int    // bytes of a string to come, with the end of its line
	open   []int  // values to come, of each array that is not over, after the reply itself

	// Of the reply under way.
	bytes, items int
}

// maxHead is how much of a line is looked at. No number of values or bytes is
// longer.
const maxHead = 16

// pass takes what has come, and returns why it is not to be passed on.
func (r *replies) pass(b []byte) error {
	for len(b) > 0 {
		n := r.bulk
		if n > 0 {
			n = min(n, len(b))
			if !r.isBulk(b[:n]) {
				return errProtocol
			}
			if r.bulk -= n; r.bulk == 0 {
				r.over()
			}
		} else {
			n = bytes.IndexByte(b, '\n') + 1
			whole := n > 0
			if !whole {
				n = len(b)
			}
			r.head = append(r.head, b[:min(n, maxHead-len(r.head))]...)
			if r.length += n; r.length > maxLine {
				return errTooMuch
			}
			if !whole {
				r.last = b[n-1]
				break
			}
			if n > 1 {
				r.last = b[n-2]
			}
			if err := r.line(); err != nil {
				return err
			}
		}
		b = b[n:]
	}
	return nil
}

// isBulk reports whether b may be the next bytes of a string, which a line
// ends.
func (r *replies) isBulk(b []byte) bool {
	const end = "\r\n"
	for i := range end {
		if at := r.bulk - len(end) + i; at < len(b) && at >= 0 && b[at] != end[i] {
			return false
		}
	}
	return true
}

// line takes a line that has come, of which last is the byte before its end.
func (r *replies) line() error {
	kind, length, text := r.head[0], r.length, r.head[1:]
	r.head, r.length = r.head[:0], 0
	if length < 3 || r.last != '\r' {
		return errProtocol
	}
	if len(r.open) == 0 {
		r.open, r.bytes, r.items = append(r.open, 1), 0, 0
	}
	r.bytes += length
	r.items++
	switch kind {
	case '+', '-', ':', '_', '#', ',', '(':
		r.over()
		return r.within()
	case '$', '=', '!', '*', '~', '>', '%', '|':
	default:
		return errProtocol
	}
	if length > maxHead {
		return errProtocol
	}
	n, err := strconv.Atoi(string(bytes.TrimSuffix(text, []byte("\r\n"))))
	switch {
	case n == -1 && (kind == '$' || kind == '*'):
		r.over()
		return nil
	case err != nil || n < 0:
		return errProtocol
	}
	switch kind {
	case '$', '=', '!':
		r.bulk = n + 2
		r.bytes += min(n, 2*maxReply)
		return r.within()
	case '|': // a value follows, whose place it does not take
		r.open[len(r.open)-1]++
		fallthrough
	case '%':
		n *= 2
	}
	r.items += min(n, 2*maxItems)
	if r.open = append(r.open, n); n == 0 {
		r.open = r.open[:len(r.open)-1]
		r.over()
	}
	return r.within()
}

// over ends a value, and the arrays that it is the last of.
func (r *replies) over() {
	for i := len(r.open) - 1; i >= 0; i-- {
		if r.open[i]--; r.open[i] > 0 {
			return
		}
		r.open = r.open[:i]
	}
}

func (r *replies) within() error {
	if r.bytes > maxReply || r.items > maxItems || len(r.open) > maxDepth+1 {
		return fmt.Errorf("%w: more than %d bytes, %d values or %d levels", errTooMuch, maxReply, maxItems, maxDepth)
	}
	return nil
}
