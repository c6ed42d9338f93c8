package main

import (
	"net"
	"os"
	"sync"
	"time"
)

// buffered is a connection with a send buffer, as a socket has: a Write does not wait for
// the other end, and what was written is sent even after a Close.
type buffered struct {
	net.Conn

	mu     sync.Mutex // guards all below
	queue  []byte
	closed bool
	err    error         // of the last write
	more   chan struct{} // has room for one: queue has grown, or closed was set
}

func newBuffered(c net.Conn) *buffered {
	b := &buffered{Conn: c, more: make(chan struct{}, 1)}
	go b.send()
	return b
}

// send writes the queue until the connection is closed here and all is sent, or fails.
func (b *buffered) send() {
	defer b.Conn.Close()
	for range b.more {
		for {
			b.mu.Lock()
			out, closed := b.queue, b.closed
			b.queue = nil
			b.mu.Unlock()
			if len(out) == 0 && closed {
				return
			}
			if len(out) == 0 {
				break
			}
			if _, err := b.Conn.Write(out); err != nil {
				b.mu.Lock()
				b.err = err
				b.mu.Unlock()
				return
			}
		}
	}
}

// wakeLocked wakes send.
func (b *buffered) wakeLocked() {
	select {
	case b.more <- struct{}{}:
	default:
	}
}

func (b *buffered) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.err != nil:
		return 0, b.err
	case b.closed:
		return 0, net.ErrClosed
	}
	b.queue = append(b.queue, p...)
	b.wakeLocked()
	return len(p), nil
}

// Read returns an error at once after a Close.
func (b *buffered) Read(p []byte) (int, error) {
	n, err := b.Conn.Read(p)
	if os.IsTimeout(err) {
		err = net.ErrClosed
	}
	return n, err
}

func (b *buffered) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return nil
	}
	b.closed = true
	_ = b.Conn.SetReadDeadline(time.Unix(1, 0)) // ends a Read
	b.wakeLocked()
	return nil
}

// SetDeadline does nothing. gRPC sets deadlines for what ends by other means.
func (b *buffered) SetDeadline(time.Time) error { return nil }

// SetReadDeadline is as SetDeadline.
func (b *buffered) SetReadDeadline(time.Time) error { return nil }

// SetWriteDeadline is as SetDeadline.
func (b *buffered) SetWriteDeadline(time.Time) error { return nil }
