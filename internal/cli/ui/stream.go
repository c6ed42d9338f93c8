package ui

import (
	"io"
	"net/http"
	"time"
)

const (
	// maxBrowsers bounds the number of connected browsers, because each costs a goroutine.
	maxBrowsers = 64

	// pending is how many messages may wait for a browser to read them. If there are more, the
	// browser is disconnected, and will connect again.
	pending = 8

	heartbeat    = 15 * time.Second // the longest time between two messages
	writeTimeout = 10 * time.Second // the longest time for a write
)

// subscriber receives the messages for one browser. If the browser is too slow, it is closed.
type subscriber chan []byte

// subscribe adds a browser. It also returns the browser's first message, which has all keys. If
// there are too many browsers, it returns nil.
func (w *watcher) subscribe() (subscriber, []byte) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.subs) >= maxBrowsers {
		return nil, nil
	}
	sub := make(subscriber, pending)
	w.subs[sub] = true
	w.first.Do(func() { close(w.came) })
	select {
	case w.wake <- struct{}{}:
	default: // a signal for Run is already there
	}

	return sub, w.whole()
}

func (w *watcher) unsubscribe(sub subscriber) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.subs, sub)
}

// broadcast sends a message to all browsers. It disconnects browsers that are too slow. The caller
// holds mu.
func (w *watcher) broadcast(m []byte) {
	for sub := range w.subs {
		select {
		case sub <- m:
		default:
			close(sub)
			delete(w.subs, sub)
		}
	}
}

// serveEvents sends messages to a browser as server-sent events until the browser leaves.
func (s *Server) serveEvents(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodGet {
		return // HEAD has no body
	}
	sub, first := s.subscribe()
	if sub == nil {
		w.Header().Set("Retry-After", "30")
		http.Error(w, "too many browsers are connected", http.StatusServiceUnavailable)
		return
	}
	defer s.unsubscribe(sub)

	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("X-Accel-Buffering", "no") // tells proxies to pass each message on immediately
	out := http.NewResponseController(w)
	_ = out.SetReadDeadline(time.Time{}) // a stream outlasts the server's ReadTimeout
	send := func(field string, m []byte) bool {
		_ = out.SetWriteDeadline(time.Now().Add(writeTimeout))
		for _, part := range []string{field, string(m), "\n\n"} {
			if _, err := io.WriteString(w, part); err != nil {
				return false
			}
		}
		return out.Flush() == nil
	}

	beat := time.NewTimer(heartbeat)
	defer beat.Stop()
	for ok := send("retry: 1000\ndata: ", first); ok; beat.Reset(heartbeat) {
		var m []byte
		select {
		case m, ok = <-sub:
			ok = ok && send("data: ", m)
		case <-beat.C:
			ok = send(": still here", nil)
		case <-r.Context().Done():
			ok = false
		}
	}
}
