// Package ui is the web page of "hasp ui". The page has a live table of the locks in a store, and
// for each key a timeline and its queue. It changes no lock.
//
// A browser asks for the next list as soon as it has received one. One list serves all browsers, so
// the cost for the store does not depend on their number. While no browser asks, the store is not
// listed. If a list takes long, the next one comes later. A watcher compares each list with the one
// before. It records the holders and waiters of each key, in a bounded amount of memory.
package ui

import (
	"context"
	"embed"
	"encoding/base64"
	"encoding/json"
	"iter"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/hasplock/hasp/backend"
)

// Source is a store that can be listed, such as a *hasp.Client.
type Source interface {
	// List yields the keys that are held or waited for.
	List(ctx context.Context, prefix string) iter.Seq2[backend.Entry, error]
}

// Options are the settings of the page.
type Options struct {
	Store   string // the strategy's name
	Prefix  string // only keys with this prefix are listed
	Ordered bool   // waiters are served in order of arrival

	// If Token is not empty, a browser must send it. See guard.
	Token string

	// Listen is the address of the listener, HOST:PORT. Hosts has more names, without a port, that
	// browsers may use for this server.
	Listen string
	Hosts  []string

	// Every is the time from the beginning of one list to the beginning of the next. If it is 0,
	// [Every] is used.
	Every time.Duration

	// Redact removes secrets from the text of an error. If Redact is nil, nothing is removed.
	Redact func(string) string
}

// Every is the default of Options.Every. The page then shows a key within a second after it was
// taken.
const Every = 500 * time.Millisecond

// Server serves the page. It is an http.Handler.
type Server struct {
	guard
	*watcher
	mux http.ServeMux
}

//go:embed page
var files embed.FS

// New returns a Server.
func New(src Source, o Options) *Server {
	if o.Every == 0 {
		o.Every = Every
	}
	if o.Redact == nil {
		o.Redact = func(s string) string { return s }
	}
	s := &Server{guard: newGuard(o), watcher: newWatcher(src, o)}

	// Set the content types here, because the host's table of types may lack them.
	for path, file := range map[string]struct{ name, kind string }{
		"/{$}":      {"index.html", "text/html; charset=utf-8"},
		"/page.css": {"page.css", "text/css; charset=utf-8"},
		"/page.js":  {"page.js", "text/javascript; charset=utf-8"},
		"/icon.svg": {"icon.svg", "image/svg+xml"},
	} {
		s.mux.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", file.kind)
			http.ServeFileFS(w, r, files, "page/"+file.name)
		})
	}

	s.mux.HandleFunc("/locks", s.serveLocks)
	s.mux.HandleFunc("/key", s.serveKey)
	return s
}

// ServeHTTP answers a request, unless the guard refuses it.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if s.admit(w, r) {
		s.mux.ServeHTTP(w, r)
	}
}

// writeTimeout is the longest time for the write of an answer.
const writeTimeout = 10 * time.Second

// Serve serves the page on ln until ctx ends, and then returns nil. If the listener fails, Serve
// returns its error. Serve closes ln.
func (s *Server) Serve(ctx context.Context, ln net.Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	srv := &http.Server{
		Handler:           s,
		BaseContext:       func(net.Listener) context.Context { return ctx }, // ctx ends requests that wait
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       5 * time.Second,
		WriteTimeout:      writeTimeout,
		IdleTimeout:       time.Minute,
		MaxHeaderBytes:    1 << 17,
	}

	ended := make(chan error, 1)
	go func() { ended <- srv.Serve(ln) }()

	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
	}

	within, stop := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer stop()
	if srv.Shutdown(within) != nil {
		srv.Close() // a request is still being answered
	}
	return nil
}

// serveLocks answers with the table as soon as there is a list that the browser does not have. The
// parameter has is the number of the browser's list.
func (s *Server) serveLocks(w http.ResponseWriter, r *http.Request) {
	has, _ := strconv.Atoi(r.URL.Query().Get("has")) // 0 if the browser has no list
	out := http.NewResponseController(w)
	_ = out.SetReadDeadline(time.Time{}) // a list may take longer than the server's ReadTimeout
	s.await(r.Context(), has)
	_ = out.SetWriteDeadline(time.Now().Add(writeTimeout))
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(s.table()) // an error means that the browser has gone
}

// serveKey answers with the detail of one key. The parameter id is the key's ID.
func (s *Server) serveKey(w http.ResponseWriter, r *http.Request) {
	key, err := base64.RawURLEncoding.DecodeString(r.URL.Query().Get("id"))
	if err != nil {
		http.Error(w, "id: "+err.Error(), http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(s.detail(string(key))) // an error means that the browser has gone
}
