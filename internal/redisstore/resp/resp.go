// Package resp makes hasp's own connections to Redis. One caller uses a Conn at a time, and a Pool
// holds the Conns to one server. Many callers share a Wire. A call ends when its context ends. The
// package also has hasp's additions to a go-redis client that the caller passed.
package resp

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"strconv"
)

// This file has the part of the protocol that hasp needs: it encodes commands
// and decodes replies
// (https://redis.io/docs/latest/develop/reference/protocol-spec/).

// appendCommand appends a command to out.
func appendCommand(out []byte, args []string) []byte {
	out = strconv.AppendInt(append(out, '*'), int64(len(args)), 10)
	for _, arg := range args {
		out = strconv.AppendInt(append(out, "\r\n$"...), int64(len(arg)), 10)
		out = append(append(out, "\r\n"...), arg...)
	}
	return append(out, "\r\n"...)
}

// ReplyError is an error that a server replied, or that hasp found in its replies.
type ReplyError string

func (e ReplyError) Error() string { return string(e) }

// RedisError marks the error as a reply, as go-redis marks its own: the server answers.
func (ReplyError) RedisError() {}

// Limits of a reply. The longest reply, a list of a key's waiters, is far below these limits. A
// line must also fit into the reader's buffer. The longest line is an error of a few hundred bytes.
const (
	maxReply = 64 << 20 // bytes in a reply
	maxItems = 1 << 18  // values in a reply
	maxDepth = 32       // of arrays in arrays
)

var (
	errProtocol = errors.New("the server does not speak the protocol of Redis")
	errTooMuch  = fmt.Errorf("the reply is longer than any that hasp asks for: more than %d bytes, %d values or %d levels, or a long line",
		maxReply, maxItems, maxDepth)
)

// reader decodes replies. Because a server may announce any length, it allocates memory only for
// what arrives, and limits each reply.
type reader struct {
	*bufio.Reader
	bytes, items int // what is left of the limits for the current reply
}

func newReader(r io.Reader, size int) *reader {
	return &reader{Reader: bufio.NewReaderSize(r, size)}
}

// reply reads one reply: nil, an int64, a string, a []any or the error that the server replied.
// Connections begin with RESP2, which has no other replies. If no reply arrives, err says why, and
// so does the Reply.
func (r *reader) reply() (Reply, error) {
	r.bytes, r.items = maxReply, maxItems
	v, err := r.value(maxDepth)
	if refused, ok := v.(ReplyError); ok {
		return Reply{Err: refused}, nil
	}
	return Reply{Value: v, Err: err}, err
}

// value reads a value. depth is how many levels of arrays it may have.
func (r *reader) value(depth int) (any, error) {
	line, err := r.ReadSlice('\n') // a part of the buffer
	switch {
	case err == bufio.ErrBufferFull:
		return nil, errTooMuch
	case err != nil:
		return nil, err
	}
	line, ok := bytes.CutSuffix(line, []byte("\r\n"))
	if !ok || len(line) == 0 {
		return nil, errProtocol
	}
	r.bytes, r.items = r.bytes-len(line), r.items-1
	if r.bytes < 0 || r.items < 0 {
		return nil, errTooMuch
	}

	kind, text := line[0], line[1:]
	switch kind {
	case '+':
		if string(text) == "OK" {
			return "OK", nil // without an allocation
		}
		return string(text), nil
	case '-':
		return ReplyError(text), nil
	case ':', '$', '*':
	default:
		return nil, errProtocol
	}

	// The line has a number: the value itself, or a length. The length -1 means nil.
	n, err := strconv.ParseInt(string(text), 10, 64)
	switch {
	case err != nil || n < -1 && kind != ':':
		return nil, errProtocol
	case kind == ':':
		return n, nil
	case n == -1:
		return nil, nil
	case kind == '$' && n <= int64(r.bytes):
		return r.bulk(int(n))
	case kind == '*' && n <= int64(r.items) && depth > 0:
		return r.array(int(n), depth-1)
	}
	return nil, errTooMuch
}

// bulk reads a string of n bytes.
func (r *reader) bulk(n int) (any, error) {
	r.bytes -= n
	// Most strings fit into the buffer, and are copied once. The CR LF needs two more bytes.
	buf, err := r.Peek(n + 2)
	if err == nil {
		// Discard only after the return has copied buf, which is a part of the buffer.
		defer r.Discard(n + 2)
	} else if err == bufio.ErrBufferFull {
		var all bytes.Buffer // grows with the bytes that arrive, not with the length announced
		_, err = io.CopyN(&all, r, int64(n+2))
		buf = all.Bytes()
	}
	switch {
	case err != nil:
		return nil, err
	case string(buf[n:]) != "\r\n":
		return nil, errProtocol
	}
	return string(buf[:n]), nil
}

// array reads n values.
func (r *reader) array(n, depth int) (any, error) {
	// Do not allocate memory for all of the announced length yet.
	all := make([]any, 0, min(n, 64))
	for range n {
		v, err := r.value(depth)
		if err != nil {
			return nil, err
		}
		all = append(all, v)
	}
	return all, nil
}
