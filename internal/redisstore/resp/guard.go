package resp

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"strconv"
)

// Limits of a reply. The longest reply that hasp asks for lists the waiters of a
// key. It is far below these limits. The longest line is an error, of a few hundred
// bytes. A value in an array counts twice towards maxItems: when the array announces it,
// and when it arrives.
const (
	maxReply = 64 << 20 // bytes in a reply
	maxItems = 1 << 18  // values in a reply
	maxLine  = 32 << 10 // bytes in a line
	maxDepth = 32       // of arrays in arrays
)

var (
	errProtocol = errors.New("the server does not speak the protocol of Redis")
	errTooMuch  = errors.New("the reply is longer than any that hasp asks for")
)

// guard is a connection that protects its reader from the server. go-redis
// allocates the length that a reply announces before the reply arrives, and reads
// a line of any length. If bytes are not a reply, or a reply is too long, the
// guard returns an error, and from then on it passes on nothing.
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
	// The bytes are parsed before the reader sees them. If they are refused, the reader
	// sees nothing of this read.
	n, err := g.Conn.Read(p)
	for b := p[:n]; len(b) > 0; {
		parse := g.replies.passLine
		if g.replies.bulk > 0 {
			parse = g.replies.passBulk
		}
		var m int
		if m, g.err = parse(b); g.err != nil {
			return 0, g.err
		}
		b = b[m:]
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

// maxHead is how many bytes of a line are kept. No valid line that announces a length is
// longer.
const maxHead = 16

// passBulk parses the next bytes of a string, and returns how many of b they are.
func (r *replies) passBulk(b []byte) (int, error) {
	n := min(r.bulk, len(b))
	const end = "\r\n"
	for i := range end {
		// The end may arrive in two parts. Look only at what is in this one.
		if at := r.bulk - len(end) + i; 0 <= at && at < n && b[at] != end[i] {
			return 0, errProtocol
		}
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

	// A line may arrive in parts. Only its beginning is kept, and its length.
	r.head = append(r.head, b[:min(n, maxHead-len(r.head))]...)
	if r.length += n; r.length > maxLine {
		return 0, errTooMuch
	}
	if !whole {
		r.last = b[n-1]
		return n, nil
	}

	// If the LF came alone, the byte before it is the last of the part before.
	if n > 1 {
		r.last = b[n-2]
	}
	return n, r.endLine()
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
	case '+', '-', ':', '_', '#', ',', '(': // the line is the value
		r.endValue()
	case '$', '=', '!', '*', '~', '>', '%', '|': // the line announces a length
		if length > maxHead {
			return errProtocol
		}
		n, err := strconv.Atoi(string(bytes.TrimSuffix(text, []byte("\r\n"))))
		switch {
		case n == -1 && (kind == '$' || kind == '*'): // nil
			r.endValue()
		case err != nil || n < 0:
			return errProtocol
		default:
			r.begin(kind, n)
		}
	default:
		return errProtocol
	}

	if r.bytes > maxReply || r.items > maxItems || len(r.open) > maxDepth+1 {
		return fmt.Errorf("%w: more than %d bytes, %d values or %d levels", errTooMuch, maxReply, maxItems, maxDepth)
	}
	return nil
}

// begin begins a string of n bytes or an array of n values, or of n pairs.
func (r *replies) begin(kind byte, n int) {
	switch kind {
	case '$', '=', '!':
		r.bulk = n + 2
		r.bytes += min(n, 2*maxReply)
		return
	case '|': // attributes do not count as a value: the value follows them
		r.open[len(r.open)-1]++
		fallthrough
	case '%':
		n *= 2
	}

	// min, so that the sum does not overflow. An array of no values ends at once.
	r.items += min(n, 2*maxItems)
	if n == 0 {
		r.endValue()
		return
	}
	r.open = append(r.open, n)
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
