package ui

import (
	"crypto/rand"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"
)

const (
	// maxBrowsers is how many browsers may be connected. Each costs a goroutine.
	maxBrowsers = 64

	// pending is how many messages may wait for a browser. One that is slower is dropped,
	// and connects again.
	pending = 8

	// The last messages are kept for browsers that connect again.
	maxRecent   = 20
	recentBytes = 4 << 20

	heartbeat    = 15 * time.Second // from one message to the next at most
	writeTimeout = 10 * time.Second // for one message
)

// message is one message of the stream.
type message struct {
	seq  int
	data string
}

// subscriber is one browser.
type subscriber struct {
	messages chan message
	dropped  chan struct{} // closed if the browser is too slow
}

// newBoot returns a text that differs between two servers.
func newBoot() string { return rand.Text()[:8] }

// subscribe adds a browser. It returns the messages that the browser must get first, and
// nil if there are too many browsers. last is the ID of the last message that it has.
func (w *watcher) subscribe(last string) (*subscriber, []message) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.subs) >= maxBrowsers {
		return nil, nil
	}
	sub := &subscriber{make(chan message, pending), make(chan struct{})}
	w.subs[sub] = true
	// mu is held, so only one browser closes came.
	select {
	case <-w.came:
	default:
		close(w.came)
	}
	select {
	case w.wake <- struct{}{}:
	default: // Run will wake up anyway
	}

	boot, text, _ := strings.Cut(last, ".")
	seq, err := strconv.Atoi(text)
	if n := w.seq - seq; boot == w.boot && err == nil && n >= 0 && n <= len(w.recent) {
		return sub, w.recent[len(w.recent)-n:]
	}
	// Browsers that come at the same time share the message, which may be large.
	if w.first.data == "" || time.Since(w.made) > 200*time.Millisecond { // it has the time of day
		w.first, w.made = message{w.seq, string(w.whole())}, time.Now()
	}
	return sub, []message{w.first}
}

// unsubscribe removes a browser.
func (w *watcher) unsubscribe(sub *subscriber) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.subs, sub)
}

// broadcast sends a message to all browsers. It waits for none. The caller holds mu.
func (w *watcher) broadcast(data []byte) {
	w.seq++
	m := message{w.seq, string(data)}
	w.first = message{}
	w.recent = append(w.recent, m)
	size := 0
	for i := len(w.recent) - 1; i >= 0; i-- {
		size += len(w.recent[i].data)
		if len(w.recent)-i > maxRecent || size > recentBytes {
			// A new slice, because subscribers may still read the old one.
			w.recent = append([]message(nil), w.recent[i+1:]...)
			break
		}
	}
	for sub := range w.subs {
		select {
		case sub.messages <- m:
		default:
			close(sub.dropped)
			delete(w.subs, sub)
		}
	}
}

// serveEvents sends the messages as server-sent events, until the browser leaves.
func (s *Server) serveEvents(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodGet {
		return // HEAD has no body
	}
	sub, first := s.subscribe(r.Header.Get("Last-Event-ID"))
	if sub == nil {
		w.Header().Set("Retry-After", "30")
		http.Error(w, "too many browsers are connected", http.StatusServiceUnavailable)
		return
	}
	defer s.unsubscribe(sub)

	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("X-Accel-Buffering", "no") // proxies must pass each message on at once
	out := http.NewResponseController(w)
	_ = out.SetReadDeadline(time.Time{}) // a stream outlasts the server's ReadTimeout
	send := func(parts ...string) bool {
		_ = out.SetWriteDeadline(time.Now().Add(writeTimeout)) // a test's writer has none
		for _, part := range parts {
			if _, err := io.WriteString(w, part); err != nil {
				return false
			}
		}
		return out.Flush() == nil
	}
	sendMessage := func(m message) bool {
		return send(fmt.Sprintf("id: %s.%d\ndata: ", s.boot, m.seq), m.data, "\n\n")
	}
	if !send("retry: 1000\n\n") {
		return
	}
	for _, m := range first {
		if !sendMessage(m) {
			return
		}
	}

	beat := time.NewTimer(heartbeat)
	defer beat.Stop()
	for {
		ok := false
		select {
		case m := <-sub.messages:
			ok = sendMessage(m)
		case <-beat.C:
			ok = send(": still here\n\n")
		case <-sub.dropped:
		case <-r.Context().Done():
		}
		if !ok {
			return
		}
		beat.Reset(heartbeat)
	}
}
