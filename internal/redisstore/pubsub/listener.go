package pubsub

import (
	"slices"
	"sync/atomic"
	"time"
)

// Listener receives the messages of one channel.
type Listener struct {
	receive func(payload string, again bool)
	sub     *Subscriber
	ch      *channel // nil if the Subscriber was already closed

	settled chan error  // receives the result of Subscribe; has room for one result
	done    bool        // settled has received the result
	closed  atomic.Bool // deliver reads it without mu
}

// Command returns the command that publishes to the Listener, PUBLISH or SPUBLISH. If the
// subscription is not confirmed, or its connection is known to be lost, Command returns "".
func (l *Listener) Command() string {
	l.sub.mu.Lock()
	defer l.sub.mu.Unlock()
	switch {
	case l.ch == nil || l.ch.state != isConfirmed:
		return ""
	case l.sub.isSharded():
		return "SPUBLISH"
	}

	return "PUBLISH"
}

// Close ends the Listener. After the last Listener is closed, the subscription stays for a moment,
// so that the next Listener finds it confirmed.
func (l *Listener) Close() {
	if l.closed.Swap(true) {
		return
	}

	l.sub.mu.Lock()
	defer l.sub.mu.Unlock()
	if l.ch != nil { // the Subscriber was open when the Listener was made
		i := slices.Index(l.ch.listeners, l)
		l.ch.listeners = slices.Delete(l.ch.listeners, i, i+1)
		l.ch.idle = time.Now() // matters if this was the last listener
	}
}

// Relisten replaces the Listener's connection, for a caller that has missed a message. All channels
// of the connection get another one. When a subscription is confirmed again, the functions of its
// Listeners are called with again set to true.
func (l *Listener) Relisten() {
	l.sub.mu.Lock()
	defer l.sub.mu.Unlock()
	if l.ch != nil && l.ch.link != nil {
		l.ch.link.drop(errEnded)
	}
}

// settleLocked decides the result of the call of Subscribe, unless it is decided already.
func (l *Listener) settleLocked(err error) {
	if !l.done {
		l.done = true
		l.settled <- err
	}
}

// deliver calls the functions of the given Listeners. The caller must not hold mu.
func deliver(listeners []*Listener, payload string, again bool) {
	for _, l := range listeners {
		// Skip a Listener that was closed after the slice listeners was made.
		if !l.closed.Load() {
			l.receive(payload, again)
		}
	}
}
