// Package resp has what hasp adds to the connections of go-redis: calls that end when
// they are cancelled, a guard against replies that are too long, and wires, which many
// callers share.
package resp

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"strconv"
)

// This file has the part of the protocol that a wire needs: it encodes commands
// and decodes replies
// (https://redis.io/docs/latest/develop/reference/protocol-spec/).

// appendCommand appends a command to out. It reports false if an argument has a
// type that strategies do not use. The types that they use are immutable, so the
// caller may leave before its command is encoded.
func appendCommand(out []byte, args []any) ([]byte, bool) {
	out = appendHead(out, '*', len(args))
	var digits [20]byte
	for _, arg := range args {
		switch v := arg.(type) {
		case string:
			out = append(appendHead(out, '$', len(v)), v...)
		case int:
			n := strconv.AppendInt(digits[:0], int64(v), 10)
			out = append(appendHead(out, '$', len(n)), n...)
		case int64:
			n := strconv.AppendInt(digits[:0], v, 10)
			out = append(appendHead(out, '$', len(n)), n...)
		default:
			return nil, false
		}
		out = append(out, '\r', '\n')
	}
	return out, true
}

func appendHead(out []byte, kind byte, n int) []byte {
	return append(strconv.AppendInt(append(out, kind), int64(n), 10), '\r', '\n')
}

// replyError is an error that a server replied.
type replyError string

func (e replyError) Error() string { return string(e) }

// RedisError marks the error as a reply, as go-redis' own errors do: the server answers.
func (replyError) RedisError() {}

// push is a message that is no reply to a command.
type push struct{ value any }

// readReply reads one reply: nil, an int64, a string, a []any, a replyError or a push.
// No command that hasp sends over a wire has a reply of another type. The connection
// below has a guard. It has checked the lengths of lines, strings and arrays, and how
// deep they are nested.
func readReply(in *bufio.Reader) (any, error) {
	line, err := in.ReadSlice('\n')
	if err != nil {
		return nil, err
	}

	kind, text := line[0], line[1:len(line)-2]
	switch kind {
	case '+':
		if string(text) == "OK" {
			return "OK", nil // not allocated
		}
		return string(text), nil
	case '-':
		return replyError(text), nil
	case '_':
		return nil, nil
	case ':', '$', '*', '>':
	default:
		return nil, errProtocol
	}

	// The line has a number: the value itself, or a length. A negative length is nil.
	n, err := strconv.ParseInt(string(text), 10, 64)
	switch {
	case err != nil:
		return nil, fmt.Errorf("%w: %v", errProtocol, err)
	case kind == ':':
		return n, nil
	case n < 0:
		return nil, nil
	case kind == '$':
		return readBulk(in, int(n))
	}

	all, err := readArray(in, int(n))
	if kind == '>' {
		return push{all}, err
	}
	return all, err
}

// readBulk reads a string of n bytes.
func readBulk(in *bufio.Reader, n int) (any, error) {
	// Most strings fit into the buffer, and are copied once. Two more bytes are the CR LF.
	buf, err := in.Peek(n + 2)
	if err == nil {
		// Deferred, because buf is a part of in's buffer until the return copies it.
		defer in.Discard(n + 2)
	} else if err == bufio.ErrBufferFull {
		var all bytes.Buffer // grows with the bytes that arrive, not with the length announced
		_, err = io.CopyN(&all, in, int64(n+2))
		buf = all.Bytes()
	}
	if err != nil {
		return nil, err
	}
	return string(buf[:n]), nil
}

// readArray reads n values.
func readArray(in *bufio.Reader, n int) ([]any, error) {
	// The length is only announced, so memory for all of it is not allocated yet.
	all := make([]any, 0, min(n, 64))
	for range n {
		v, err := readReply(in)
		if err != nil {
			return nil, err
		}
		all = append(all, v)
	}
	return all, nil
}
