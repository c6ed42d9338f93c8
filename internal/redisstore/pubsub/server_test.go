package pubsub_test

import (
	"context"
	"os"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redisstore"
	"github.com/hasplock/hasp/internal/redistest"
)

// publisher is the method Publish or SPublish of a client.
type publisher func(ctx context.Context, channel string, message any) *redis.IntCmd

// getsSoon publishes until e gets a message.
func getsSoon(t *testing.T, publish publisher, e *recorder, name string) {
	t.Helper()
	until(t, "a message on "+name, func() bool {
		publish(t.Context(), name, "x")
		return strings.Contains(e.take(), "x")
	})
}

// Listen works over every kind of client that a caller may pass.
func TestListenByAnyClient(t *testing.T) {
	t.Parallel()
	srv := redistest.Start(t, redistest.Own)
	direct := srv.Client()
	o := srv.ClientOptions()
	o.ReadTimeout, o.WriteTimeout = -2, -2
	without := redis.NewClient(o)
	defer without.Close()
	for name, rdb := range map[string]redis.UniversalClient{
		"default":      srv.Client(),
		"no timeouts":  without,
		"autopipeline": await.Value(srv.Client().AutoPipeline()),
	} {
		s := redisstore.New(rdb)
		if s.Sharded(t.Context(), "a") {
			t.Errorf("%s: sharded", name)
		}
		for _, channel := range []string{name + "a", name + "b"} {
			getsSoon(t, direct.Publish, listenTo(t, s, channel), channel)
		}
		s.Close()
		until(t, name+": the end of the connection", func() bool {
			return len(direct.PubSubChannels(t.Context(), name+"*").Val()) == 0
		})
	}
}

// The first Listen makes the connection. If the server hangs, it ends with its context, and so
// does a later one.
func TestListenByURL(t *testing.T) {
	stores(t, func(t *testing.T, s *redisstore.Store, srv *redistest.Server) {
		end := func(when string, e *recorder) {
			t.Helper()
			srv.Pause()
			defer srv.Resume()
			for _, end := range redistest.Endings {
				returns(t, end.Name, func() {
					ctx, cancel := end.Start(t.Context())
					defer cancel()
					channel := when + end.Name
					if _, err := s.Listen(ctx, channel, channel, e.record); !end.Match(err) {
						t.Errorf("%s, %s: got %v", when, end.Name, err)
					}
				})
			}
		}
		end("first", &recorder{})
		e := listenTo(t, s, "ch")
		getsSoon(t, srv.Client().Publish, e, "ch")
		end("later", e)
		getsSoon(t, srv.Client().Publish, e, "ch")
		srv.Pause()
		defer srv.Resume()
		returns(t, "Close", func() { s.Close() })
		returns(t, "all goroutines", s.Subscriber.Wait)
	})
}

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
		s := await.Value(open(t, srv.URL(), params))
		f(t, s, srv)
	})
}
