package pubsub_test

import (
	"context"
	"os"
	"testing"

	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redisstore"
	"github.com/hasplock/hasp/internal/redistest"
)

func TestMain(m *testing.M) { os.Exit(redistest.Main(m)) }

func open(t *testing.T, node string, params map[string]string) (*redisstore.Store, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), await.Patience)
	defer cancel()
	s, err := redisstore.Open(ctx, node, params)
	if s != nil {
		t.Cleanup(func() { s.Close() })
	}
	return s, err
}

// Shorter names for the helpers of package redistest.
var (
	returns = await.Return
	until   = await.Until
)

// stores runs f with Stores that have a URL of each kind.
func stores(t *testing.T, f func(t *testing.T, s *redisstore.Store, srv *redistest.Server)) {
	redistest.EachURL(t, func(t *testing.T, srv *redistest.Server, params map[string]string) {
		s, err := open(t, srv.URL(), params)
		if err != nil {
			t.Fatal(err)
		}
		f(t, s, srv)
	})
}
