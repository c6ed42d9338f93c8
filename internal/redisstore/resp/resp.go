// Package resp is hasp's part of a connection of go-redis: calls that end when
// they are cancelled, a guard against replies that are too long, and wires, which
// many callers share.
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

// RedisError marks a reply, by go-redis' convention: the server is well.
func (replyError) RedisError() {}

// push is a message that is no reply to a command.
type push struct{ value any }

// readReply reads one reply: nil, an int64, a string, a []any or a replyError. With
// RESP3 it can also be a bool, a float64 or a push. A map is read as an array of
// its keys and values.
func readReply(in *bufio.Reader) (any, error) { return readValue(in, maxDepth) }

// readValue reads one value in which arrays may be nested to a depth.

func readValue(in *bufio.Reader, depth int) (any, error) {
	line, err := readLine(in)
	if err != nil {
		return nil, err
	}
	kind, text := line[0], line[1:]
	switch kind {
	case '+', '(':
		if string(text) == "OK" {
			return "OK", nil
		}
		return string(text), nil
	case '-':
		return replyError(text), nil
	case ':':
		n, err := strconv.ParseInt(string(text), 10, 64)
		return n, protocolError(err)
	case '_':
		return nil, nil
	case '#':
		return string(text) == "t", nil
	case ',':
		f, err := strconv.ParseFloat(string(text), 64)
		return f, protocolError(err)
	}

	n, err := strconv.Atoi(string(text)) // all other kinds have a length
	switch {
	case err != nil, n < -1, n > maxReply, depth == 0:
		return nil, errProtocol
	case n < 0 && (kind == '$' || kind == '*'):
		return nil, nil
	case n < 0:
		return nil, errProtocol
	}

	switch kind {
	case '$', '=', '!':
		return readBulk(in, kind, n)
	case '*', '~':
		return readArray(in, n, depth)
	case '%':
		return readArray(in, 2*n, depth)
	case '>':
		all, err := readArray(in, n, depth)
		return push{all}, err
	case '|': // attributes of the value that follows
		if _, err := readArray(in, 2*n, depth); err != nil {
			return nil, err
		}
		return readValue(in, depth-1)
	}
	return nil, errProtocol
}

// readLine returns a line without CR LF. The line is valid until the next read.
func readLine(in *bufio.Reader) ([]byte, error) {
	line, err := in.ReadSlice('\n')
	if err == bufio.ErrBufferFull { // the line is longer than the buffer
		var long []byte
		for err == bufio.ErrBufferFull && len(long) < maxLine {
			long = append(long, line...)
			line, err = in.ReadSlice('\n')
		}
		line = append(long, line...)
	}
	if err != nil {
		return nil, err
	}
	if len(line) < 3 || line[len(line)-2] != '\r' {
		return nil, errProtocol
	}
	return line[:len(line)-2], nil
}

// readBulk reads a string of n bytes.
func readBulk(in *bufio.Reader, kind byte, n int) (any, error) {
	buf, err := in.Peek(n + 2)
	if err == nil {
		defer in.Discard(n + 2)
	} else if err == bufio.ErrBufferFull {
		var all bytes.Buffer // grows with the bytes that arrive, not with the length announced
		_, err = io.CopyN(&all, in, int64(n+2))
		buf = all.Bytes()
	}
	switch {
	case err != nil:
		return nil, err
	case buf[n] != '\r' || buf[n+1] != '\n':
		return nil, errProtocol
	case kind == '=' && n >= 4:
		return string(buf[4:n]), nil // after "txt:"
	case kind == '!':
		return replyError(buf[:n]), nil
	}
	return string(buf[:n]), nil
}

// readArray reads n values.
func readArray(in *bufio.Reader, n, depth int) (any, error) {
	all := make([]any, 0, min(n, 64))
	for range n {
		v, err := readValue(in, depth-1)
		if err != nil {
			return nil, err
		}
		all = append(all, v)
	}
	return all, nil
}

// protocolError returns err as an error of the protocol, and nil for nil.
func protocolError(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%w: %v", errProtocol, err)
}
