package resp

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"strconv"
)

// Limits of a reply. The longest reply that hasp asks for lists the waiters of a
// key. It is far below these limits.
const (
	maxReply = 64 << 20 // bytes in a reply
	maxItems = 1 << 18  // values in a reply
	maxLine  = 64 << 10 // bytes in a line
	maxDepth = 32       // of arrays in arrays
)

var (
	errProtocol = errors.New("the server does not speak the protocol of Redis")
	errTooMuch  = errors.New("the reply is longer than any that hasp asks for")
)

// guard is a connection that protects its reader from the server. go-redis
// allocates the length that a reply announces before the reply arrives, and reads
// a line of any length. If bytes are not a reply, or a reply is too long, the
// guard returns an error and passes nothing on from then.
type guard struct {
	net.Conn
	replies replies
	err     error // why nothing is passed on any more
}

// Guard returns c with a guard on its reads.
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

// NetConn returns the connection below. go-redis checks on it whether there are
// bytes to read.
func (g *guard) NetConn() net.Conn { return g.Conn }

// replies parses a stream of replies, without keeping them.
type replies struct {
	head   []byte // the beginning of the current line
	length int    // how many bytes of the current line have arrived
	last   byte   // the last of these bytes
	bulk   int    // how many bytes of a string are missing, with its CR LF
	open   []int  // how many values are missing: of the reply, then of each array that has begun

	bytes, items int // so far, of the current reply
}

// maxHead is how much of a line replies keeps. No valid length is longer.
const maxHead = 16

// pass parses the bytes that have arrived. It returns an error if they must not be
// passed on.
func (r *replies) pass(b []byte) error {
	for len(b) > 0 {
		parse := r.passLine
		if r.bulk > 0 {
			parse = r.passBulk
		}
		n, err := parse(b)
		if err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}

// passBulk parses the next bytes of a string, and returns how many of b they are.
func (r *replies) passBulk(b []byte) (int, error) {
	n := min(r.bulk, len(b))
	if !r.isBulk(b[:n]) {
		return 0, errProtocol
	}
	if r.bulk -= n; r.bulk == 0 {
		r.endValue()
	}
	return n, nil
}

// passLine parses the next bytes of a line, and returns how many of b they are.
func (r *replies) passLine(b []byte) (int, error) {
	n := bytes.IndexByte(b, '\n') + 1
	whole := n > 0
	if !whole {
		n = len(b)
	}

	r.head = append(r.head, b[:min(n, maxHead-len(r.head))]...)
	if r.length += n; r.length > maxLine {
		return 0, errTooMuch
	}
	if !whole {
		r.last = b[n-1]
		return n, nil
	}

	if n > 1 {
		r.last = b[n-2]
	}
	return n, r.endLine()
}

// isBulk reports whether b can be the next bytes of a string, which ends in CR LF.
func (r *replies) isBulk(b []byte) bool {
	const end = "\r\n"
	for i := range end {
		if at := r.bulk - len(end) + i; at < len(b) && at >= 0 && b[at] != end[i] {
			return false
		}
	}
	return true
}

// endLine parses a line that has arrived. r.last is the byte before its LF.
func (r *replies) endLine() error {
	kind, length, text := r.head[0], r.length, r.head[1:]
	r.head, r.length = r.head[:0], 0
	if length < 3 || r.last != '\r' {
		return errProtocol
	}

	if len(r.open) == 0 { // a new reply begins
		r.open, r.bytes, r.items = append(r.open, 1), 0, 0
	}
	r.bytes += length
	r.items++

	switch kind {
	case '+', '-', ':', '_', '#', ',', '(':
		r.endValue()
		return r.checkLimits()
	case '$', '=', '!', '*', '~', '>', '%', '|':
	default:
		return errProtocol
	}
	if length > maxHead {
		return errProtocol
	}
	n, err := strconv.Atoi(string(bytes.TrimSuffix(text, []byte("\r\n"))))
	switch {
	case n == -1 && (kind == '$' || kind == '*'): // nil
		r.endValue()
		return nil
	case err != nil || n < 0:
		return errProtocol
	}
	return r.begin(kind, n)
}

// begin begins a string of n bytes or an array of n values, or of n pairs.
func (r *replies) begin(kind byte, n int) error {
	switch kind {
	case '$', '=', '!':
		r.bulk = n + 2
		r.bytes += min(n, 2*maxReply)
		return r.checkLimits()
	case '|': // attributes do not count as a value: the value follows them
		r.open[len(r.open)-1]++
		fallthrough
	case '%':
		n *= 2
	}

	r.items += min(n, 2*maxItems)
	if r.open = append(r.open, n); n == 0 {
		r.open = r.open[:len(r.open)-1]
		r.endValue()
	}
	return r.checkLimits()
}

// endValue ends a value, and each array whose last value it is.
func (r *replies) endValue() {
	for i := len(r.open) - 1; i >= 0; i-- {
		if r.open[i]--; r.open[i] > 0 {
			return
		}
		r.open = r.open[:i]
	}
}

// checkLimits returns an error if the current reply is too long.
func (r *replies) checkLimits() error {
	if r.bytes > maxReply || r.items > maxItems || len(r.open) > maxDepth+1 {
		return fmt.Errorf("%w: more than %d bytes, %d values or %d levels", errTooMuch, maxReply, maxItems, maxDepth)
	}
	return nil
}
