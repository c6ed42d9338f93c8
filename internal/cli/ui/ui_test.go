package ui

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"net/http"
	"net/http/httptest"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp/backend"
)

// source is a store whose content a test sets.
type source struct {
	mu      sync.Mutex // guards the fields below
	entries []backend.Entry
	err     error
	took    time.Duration // how long a list takes
	lists   int
	busy    time.Duration // how long all lists have taken
}

func (s *source) List(ctx context.Context, _ string) iter.Seq2[backend.Entry, error] {
	return func(yield func(backend.Entry, error) bool) {
		s.mu.Lock()
		entries, err, took := s.entries, s.err, s.took
		s.lists++
		s.mu.Unlock()
		began := time.Now()
		defer func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.busy += time.Since(began)
		}()
		select {
		case <-time.After(took):
		case <-ctx.Done():
			err = ctx.Err()
		}
		if err != nil {
			yield(backend.Entry{}, err)
			return
		}
		for _, e := range entries {
			if !yield(e, nil) {
				return
			}
		}
	}
}

// set sets the result of the next lists.
func (s *source) set(err error, entries ...backend.Entry) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.entries, s.err = entries, err
}

func held(key, owner string, left time.Duration, waiters ...string) backend.Entry {
	return backend.Entry{Key: key, Status: backend.Status{Held: true, Owner: owner, TTL: left, Waiters: waiters}}
}

// browser is a page that asks a Server for lists.
type browser struct {
	*Server
	has int
}

// next waits for the next list.
func (b *browser) next(ctx context.Context) table {
	b.await(ctx, b.has)
	t := b.table()
	b.has = t.Number
	return t
}

// A name that was cut must not keep the whole text in memory.
func TestNamesThatAreCutTakeLittleMemory(t *testing.T) {
	memory := func() int64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	before := memory()
	var locks []*lock
	for range 100 {
		locks = append(locks, newLock(held("key", strings.Repeat("o", 1<<20), time.Minute, strings.Repeat("w", 1<<20))))
	}
	if grown := memory() - before; grown > 20<<20 {
		t.Errorf("100 long names take %d MiB", grown>>20)
	}
	runtime.KeepAlive(locks)
}

// ask sends a request with headers "NAME: VALUE", and checks the status of the answer.
func ask(t *testing.T, s *Server, want int, method, path, host string, headers ...string) *http.Response {
	t.Helper()
	r := httptest.NewRequest(method, path, nil)
	r.Host = host
	for _, h := range headers {
		name, value, _ := strings.Cut(h, ": ")
		r.Header.Set(name, value)
	}
	w := httptest.NewRecorder()
	s.ServeHTTP(w, r)
	if w.Code != want {
		t.Errorf("%s %s of %q, %q: got %d, want %d", method, path, host, headers, w.Code, want)
	}
	return w.Result()
}

func TestWhoIsRefused(t *testing.T) {
	t.Parallel()
	const token = "the-token-of-this-test"
	local := Options{Listen: "127.0.0.1:7420"}
	wide := Options{Listen: "0.0.0.0:7420", Token: token, Hosts: []string{"locks.example"}}
	bearer := "Authorization: Bearer " + token
	for _, c := range []struct {
		o       Options
		request string // the method and the host
		headers string // in lines
		want    int
	}{
		{local, "GET 127.0.0.1:7420", "", 200},
		{local, "HEAD localhost:7420", "", 200},
		{local, "GET LocalHost:7420", "", 200},
		{local, "GET [::1]:7420", "", 200},
		{local, "POST 127.0.0.1:7420", "", 405},
		{local, "DELETE 127.0.0.1:7420", "", 405},
		{local, "OPTIONS 127.0.0.1:7420", "Origin: http://evil.example", 405},

		// Another site's name may resolve to this address.
		{local, "GET evil.example:7420", "", 421},
		{local, "GET 127.0.0.1.evil.example:7420", "", 421},
		{local, "GET 192.0.2.1:7420", "", 421},
		{local, "GET ", "", 421},

		{local, "GET 127.0.0.1:7420", "Origin: http://127.0.0.1:7420\nSec-Fetch-Site: same-origin", 200},
		{local, "GET 127.0.0.1:7420", "Sec-Fetch-Site: none", 200},
		{local, "GET 127.0.0.1:7420", "Origin: http://evil.example", 403},
		{local, "GET 127.0.0.1:7420", "Origin: http://127.0.0.1:8080", 403},
		{local, "GET 127.0.0.1:7420", "Origin: null", 403},
		{local, "GET 127.0.0.1:7420", "Sec-Fetch-Site: cross-site", 403},
		{local, "GET 127.0.0.1:7420", "Sec-Fetch-Site: same-site", 403},

		{wide, "GET 192.0.2.1:7420", "", 401},
		{wide, "GET 192.0.2.1:7420", bearer, 200},
		{wide, "GET locks.example", bearer, 200},
		{wide, "GET evil.example", bearer, 421},
		{wide, "GET 192.0.2.1:7420", bearer + "\nOrigin: http://evil.example", 403},
		{wide, "GET 192.0.2.1:7420", bearer + "x", 401},
		{wide, "GET 192.0.2.1:7420", "Authorization: Bearer ", 401},
		{wide, "GET 192.0.2.1:7420", "Cookie: hasp_ui_7420=" + token, 401},
		{wide, "GET 192.0.2.1:7420", "Cookie: hasp_ui_7420=", 401},
	} {
		method, host, _ := strings.Cut(c.request, " ")
		for _, path := range []string{"/", "/page.js", "/key?id=YQ"} {
			h := ask(t, New(&source{}, c.o), c.want, method, path, host, strings.Split(c.headers, "\n")...).Header
			if got := h.Get("Content-Security-Policy"); !strings.HasPrefix(got, "default-src 'none'; script-src 'self'; ") || !strings.Contains(got, "frame-ancestors 'none'") || strings.Contains(got, "unsafe") {
				t.Errorf("%s: policy %q", path, got)
			}
			if h.Get("Access-Control-Allow-Origin") != "" {
				t.Errorf("%s: other sites may read the answer", path)
			}
		}
	}
}

func TestTokenBecomesACookie(t *testing.T) {
	t.Parallel()
	const token = "the-token-of-this-test"
	s := New(&source{}, Options{Listen: "127.0.0.1:7420", Token: token})
	get := func(want int, path, cookie string) *http.Response {
		t.Helper()
		answer := ask(t, s, want, "GET", path, "127.0.0.1:7420", "Cookie: "+cookie)
		if want != 303 && answer.Header.Get("Set-Cookie") != "" {
			t.Errorf("%s sets a cookie", path)
		}
		return answer
	}
	for _, path := range []string{"/", "/?token=", "/?token=" + token[1:], "/locks", "/key?id=YQ", "/icon.svg"} {
		get(401, path, "")
	}

	answer := get(303, "/?token="+token, "")
	c := answer.Cookies()[0]
	if answer.Header.Get("Location") != "/" || !c.HttpOnly || c.SameSite != http.SameSiteStrictMode || strings.Contains(c.Value, token) {
		t.Errorf("to %q with %v", answer.Header.Get("Location"), c)
	}
	get(200, "/", c.Name+"="+c.Value)
	get(401, "/", c.Name+"="+strings.ToUpper(c.Value))
}

// One list serves all browsers. After they have left, there are no lists until the next one comes.
func TestListsOnlyWhileABrowserWatches(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		src := &source{}
		s := New(src, Options{})
		ctx, leave := context.WithTimeout(t.Context(), 10*time.Second+Every/2)
		defer leave()
		for range 10 {
			go func() {
				for b := (&browser{Server: s}); ctx.Err() == nil; {
					b.next(ctx)
				}
			}()
		}
		time.Sleep(time.Hour)
		synctest.Wait()
		n := src.lists
		if n < 19 || n > 21 {
			t.Errorf("%d lists in 10 s for 10 browsers, want 20", n)
		}

		(&browser{Server: s}).next(t.Context())
		if src.lists == n {
			t.Error("the next browser gets a list that is an hour old")
		}
	})
}

// The rest is kept although browsers come and go.
func TestLongListsAreFollowedByLongRests(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		for _, stay := range []time.Duration{2 * time.Minute, time.Second / 2} {
			src := &source{took: 4 * time.Second}
			s := New(src, Options{})
			for began := time.Now(); time.Since(began) < 2*time.Minute; time.Sleep(time.Second / 2) {
				ctx, leave := context.WithTimeout(t.Context(), stay)
				for b := (&browser{Server: s}); ctx.Err() == nil; {
					b.next(ctx)
				}
				leave()
			}
			if src.busy < 20*time.Second || src.busy > 44*time.Second {
				t.Errorf("browsers that stay for %v: the lists take %v of two minutes, want a third", stay, src.busy)
			}
		}
	})
}

func TestOutageIsShownAndEnds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		src := &source{}
		src.set(nil, held("k", "owner", time.Hour))
		s := New(src, Options{Redact: func(s string) string { return strings.ReplaceAll(s, "hunter2", "xxxxx") }})
		b := &browser{Server: s}
		if c := b.next(t.Context()); len(c.Rows) != 1 || c.Status.Error != "" || c.Status.Listed == 0 {
			t.Errorf("before: %+v", c)
		}

		src.set(errors.New("refused hunter2\n\x1b[2J"))
		c := b.next(t.Context())
		for range 6 {
			c = b.next(t.Context())
		}
		if c.Status.Error != `refused xxxxx; \x1b[2J` || time.Since(time.UnixMilli(c.Status.Since)) < 6*Every-time.Millisecond || len(c.Rows) != 1 {
			t.Errorf("during the outage: %+v", c)
		}
		if d := s.detail("k"); d.Row == nil || len(d.Gaps) != 1 || d.Gaps[0].To != 0 {
			t.Errorf("the key during the outage: %+v", d)
		}
		src.set(nil, held("k", "owner", time.Hour))
		for c.Status.Error != "" {
			c = b.next(t.Context())
		}
		if d := s.detail("k"); len(d.Gaps) != 1 || d.Gaps[0].Why != "outage" || d.Gaps[0].To == 0 || len(d.Lanes) != 1 || len(d.Lanes[0].Spans) != 1 {
			t.Errorf("the key after the outage: %+v", d)
		}

		src.set(nil)
		if c = b.next(t.Context()); len(c.Rows) > 0 {
			t.Errorf("when the key is free: %+v", c)
		}
	})
}

func TestMemoryIsBounded(t *testing.T) {
	t.Parallel()
	src := &source{}
	w := newWatcher(src, Options{})
	long := strings.Repeat("x", 2*maxName)
	waiters := slices.Repeat([]string{long}, 2*maxNames)
	for round := range 4 {
		entries := make([]backend.Entry, 0, maxKeys*3/2)
		for i := range maxKeys * 3 / 2 {
			e := held(fmt.Sprint("key", i), fmt.Sprint(round, long), time.Minute)
			if round == 3 && i%30 == 0 {
				e.Waiters = waiters
			}
			entries = append(entries, e)
		}
		src.set(nil, entries...)
		w.listOnce(t.Context(), false)
		bytes := 0
		for key, l := range w.known {
			bytes += len(key) + len(l.Owner) + len(strings.Join(l.Waiters, ""))
			if len(l.Waiters) > maxNames || len(l.Owner) > maxName || l.waiterCount != 0 && l.waiterCount != len(waiters) {
				t.Fatalf("%d waiters of %d, an owner of %d bytes", len(l.Waiters), l.waiterCount, len(l.Owner))
			}
		}
		if len(w.known) > maxKeys || bytes > maxBytes || w.more != len(entries)-len(w.known) {
			t.Fatalf("%d keys, %d bytes, %d more", len(w.known), bytes, w.more)
		}
		if n := len(w.history.spans); n > 2*maxSpans {
			t.Fatalf("%d spans", n)
		}
	}

	for range 2*maxSpans + 1 {
		w.history.add(span{owner: "new"})
	}
	if w.history.spans[0].owner != "new" {
		t.Error("an old span is left after many new ones")
	}
	for range 2 * maxGaps {
		w.history.addGap("outage", time.Now(), time.Now())
	}
	if len(w.history.gaps) != maxGaps {
		t.Errorf("%d gaps", len(w.history.gaps))
	}
}

// Two owners hold a key, and one of them dies.
func TestTimeline(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		src := &source{}
		s := New(src, Options{Ordered: true})
		b := &browser{Server: s}
		at := func(entries ...backend.Entry) { src.set(nil, entries...); b.next(t.Context()) }
		want := func(what string, want ...string) {
			t.Helper()
			var got []string
			for _, l := range s.detail("k").Lanes {
				for _, sp := range l.Spans {
					got = append(got, l.Owner+" "+sp.State+" "+sp.How)
				}
			}
			if !slices.Equal(got, want) {
				t.Errorf("%s: got %q, want %q", what, got, want)
			}
		}

		a := held("k", "a", 6*time.Second, "b", "c")
		a.Since = time.Now()
		at(a)
		want("held", "a holds ", "b waits ", "c waits ")
		second := held("k", "b", 3*time.Second)
		second.Since = time.Now().Add(100 * time.Millisecond)
		at(second)
		want("handed over", "a holds released", "b waits got", "b holds ", "c waits left")
		if l := s.detail("k").Lanes; l[0].Spans[0].To != ms(second.Since) || l[1].Spans[0].To != ms(second.Since) {
			t.Errorf("the hand-over is not at %d: %+v", ms(second.Since), l)
		}

		// b no longer renews.
		for left := 3 * time.Second; left > 0; left -= Every {
			second.TTL = left
			at(second)
		}
		if l := s.detail("k").Lanes; l[1].Spans[1].Stale == 0 || !s.detail("k").Row.Late {
			t.Errorf("b is not shown as late: %+v", l)
		}
		at()
		want("expired", "a holds released", "b waits got", "b holds expired", "c waits left")
		if s.detail("k").Row != nil {
			t.Error("the key is still held")
		}

		// Two owners share the key.
		shared := backend.Entry{Key: "k", Status: backend.Status{Held: true, TTL: time.Minute, Shared: []string{"d", "e"}}}
		at(shared)
		shared.Shared = []string{"e"}
		at(shared)
		want("shared", "a holds released", "b waits got", "b holds expired", "c waits left", "d shares released", "e shares ")
	})
}

func TestTimeWithoutBrowsersIsAGap(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		src := &source{}
		src.set(nil, held("k", "a", time.Minute), held("long", "a", time.Hour))
		s := New(src, Options{})
		b := &browser{Server: s}
		b.next(t.Context())
		time.Sleep(10 * time.Minute)

		src.set(nil, held("k", "b", time.Minute), held("long", "a", time.Hour))
		b.next(t.Context())
		d := s.detail("k")
		if len(d.Gaps) != 1 || d.Gaps[0].Why != "unwatched" || d.Lanes[0].Spans[0].How != ended {
			t.Errorf("got %+v", d)
		}
		if d := s.detail("long"); len(d.Lanes) != 1 || len(d.Lanes[0].Spans) != 1 || d.Lanes[0].Spans[0].To != 0 {
			t.Errorf("the hold that lasts: %+v", d)
		}
	})
}
