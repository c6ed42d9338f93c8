//go:build unix

package integrations

import (
	"context"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"

	"github.com/hasplock/hasp"
)

// memory is a cache of one process.
type memory struct{ sync.Map }

func (m *memory) Get(_ context.Context, key string) (string, bool) {
	v, ok := m.Load(key)
	s, _ := v.(string)
	return s, ok
}

func (m *memory) Set(_ context.Context, key, value string) { m.Store(key, value) }

func TestRecipes(t *testing.T) {
	t.Parallel()
	url := store(t)
	c := open(t, url, &hasp.Options{Owner: "10.0.0.7:8080"})
	ctx, stop := context.WithCancel(t.Context())
	must(t, hasp.Lead(ctx, c, "leader", func(context.Context, *hasp.Lease) error {
		defer stop()
		if who, err := leader(t.Context(), open(t, url, nil)); who != "10.0.0.7:8080" {
			t.Errorf("the leader is %q, %v", who, err)
		}
		return nil
	}))

	// While a request has the only slot, another one gets 429.
	get := func(h http.Handler) int {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), "GET", "/", nil))
		return w.Code
	}
	inner := limited(open(t, url, nil), 1, http.NotFoundHandler())
	outer := limited(c, 1, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(get(inner))
	}))
	if first, second := get(outer), get(inner); first != http.StatusTooManyRequests || second != http.StatusNotFound {
		t.Errorf("a request beside another one: %d; one alone: %d", first, second)
	}

	// Of many callers, one makes the value. Messages of a customer are never handled at once.
	var all sync.WaitGroup
	var values memory
	made := 0
	handled := 0
	for range 5 {
		all.Go(func() {
			v, err := cached(t.Context(), c, &values, "k", func(context.Context) (string, error) {
				made++
				return "v", nil
			})
			if v != "v" || err != nil {
				t.Errorf("got %q, %v", v, err)
			}
			must(t, inOrder(t.Context(), c, "7", func(context.Context) error {
				handled++
				return nil
			}))
		})
	}
	all.Wait()
	if made != 1 || handled != 5 {
		t.Errorf("made %d times, handled %d of 5", made, handled)
	}
}
