package redisstore

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redisstore/slot"
	"github.com/hasplock/hasp/internal/redistest"
)

// This file has what several tests of this package use.

func TestMain(m *testing.M) { os.Exit(redistest.Main(m)) }

// Shorter names for the helpers of package await.
const soon = await.Patience

var returns, until = await.Return, await.Until

// hour is so long that a call ends before it only because of its context.
const hour = time.Hour

// secret is the password in each URL of a test. No error may contain it.
const secret = "hunter2"

// deadPort is an address where no server listens. Port 1 belongs to tcpmux, and the
// kernel gives it to no socket by chance.
const deadPort = "127.0.0.1:1"

// numbered returns n keys that begin with prefix.
func numbered(prefix string, n int) []string {
	keys := make([]string, n)
	for i := range keys {
		keys[i] = fmt.Sprint(prefix, i)
	}
	return keys
}

var (
	// counting adds its argument to its key, which so shows how often it ran.
	counting = NewScript(`return redis.call('INCRBY', KEYS[1], ARGV[1])`)

	// taking takes a hold, or reports that the key is held.
	taking = NewHold(`
if redis.call('EXISTS', KEYS[1]) == 1 then return {0, 'held'} end
redis.call('SET', KEYS[1], ARGV[1], 'PX', 600000)
return {1, 'taken'}`)
	taken = []any{int64(1), "taken"}
	held  = []any{int64(0), "held"}
)

// on returns the call of a script for one key.
func on(key string) Call { return Call{Keys: []string{key}, Args: []string{"1"}} }

func reply(v any, err error) Reply { return Reply{Value: v, Err: err} }

// each runs a script for several keys by one RunEach.
func each(ctx context.Context, s *Store, sc *Script, keys ...string) []Reply {
	calls := make([]Call, len(keys))
	for i, key := range keys {
		calls[i] = on(key)
	}
	replies := make([]Reply, len(keys))
	s.RunEach(ctx, sc, calls, func(i int, v any, err error) { replies[i] = reply(v, err) })
	return replies
}

// ways are the ways to send a command. Each adds 1 to the number under a key.
var ways = []struct {
	name string
	add  func(ctx context.Context, s *Store, key string) Reply
}{
	{"Do", func(ctx context.Context, s *Store, key string) Reply {
		return reply(s.Do(ctx, "incrby", key, "1"))
	}},
	{"DoAll", func(ctx context.Context, s *Store, key string) Reply {
		return s.DoAll(ctx, []string{"incrby", key, "1"})[0]
	}},
	{"Run", func(ctx context.Context, s *Store, key string) Reply {
		return reply(s.Run(ctx, counting, on(key)))
	}},
	{"RunEach", func(ctx context.Context, s *Store, key string) Reply {
		return each(ctx, s, counting, key)[0]
	}},
}

// wants fails the test unless the reply is the value want.
func wants(t *testing.T, what string, want any, got Reply) {
	t.Helper()
	if !reflect.DeepEqual(got.Value, want) || got.Err != nil {
		t.Errorf("%s: got %v, %v; want %v", what, got.Value, got.Err, want)
	}
}

// wantsText fails the test unless the text of err has all parts of want, in this order. The sign …
// separates the parts.
func wantsText(t *testing.T, err error, want string) {
	t.Helper()
	rest := fmt.Sprint(err)
	for part := range strings.SplitSeq(want, " … ") {
		_, after, found := strings.Cut(rest, part)
		if !found {
			t.Errorf("%q does not say %q", fmt.Sprint(err), part)
		}
		rest = after
	}
	for e := err; e != nil; e = errors.Unwrap(e) {
		if strings.Contains(fmt.Sprintf("%v %+v", e, e), secret) {
			t.Errorf("%q shows the password", e)
		}
	}
}

// wantsOutage is wantsText for an outage, whose text is one short line.
func wantsOutage(t *testing.T, err error, want string) {
	t.Helper()
	wantsText(t, err, want)
	if text := fmt.Sprint(err); strings.Contains(text, "\n") || len(text) > 250 {
		t.Errorf("%q is not one short line", text)
	}
	for _, kind := range []error{backend.ErrHeld, backend.ErrInvalid, backend.ErrLost} {
		if errors.Is(err, kind) {
			t.Errorf("%q is not an outage", err)
		}
	}
}

// withParams separates a URL from the parameters after its question mark.
func withParams(text string) (node string, params map[string]string) {
	node, query, _ := strings.Cut(text, "?")
	params = map[string]string{}
	for name, values := range await.Value(url.ParseQuery(query)) {
		params[name] = values[0]
	}
	return node, params
}

func open(t *testing.T, node string, params map[string]string) (*Store, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	s, err := Open(ctx, node, params)
	if s != nil {
		t.Cleanup(func() { s.Close() })
	}
	return s, err
}

// opened returns the open Store, or stops the test.
func opened(t *testing.T, node string, params map[string]string) *Store {
	t.Helper()
	return await.Value(open(t, node, params))
}

// prepared returns a Store that has not called its server, and its probe.
func prepared(t *testing.T, node string) (*Store, func(context.Context) error) {
	t.Helper()
	node, params := withParams(node)
	s, probe, err := Prepare(node, params, 0)
	await.Must(t, err)
	t.Cleanup(func() { s.Close() })
	return s, probe
}

// through returns a Store that has a URL, or one with a client of the caller.
func through(t *testing.T, addr string, byURL bool) *Store {
	if byURL {
		return opened(t, "redis://"+addr, nil)
	}
	// This client reads for as long as its ReadTimeout, whatever the context says.
	rdb := redis.NewClient(&redis.Options{Addr: addr, ReadTimeout: hour})
	t.Cleanup(func() { rdb.Close() })
	return New(rdb)
}

// clusterOf returns a client of a cluster that has one server.
func clusterOf(o *redis.Options) redis.UniversalClient {
	return redis.NewClusterClient(&redis.ClusterOptions{
		Password: o.Password, ReadTimeout: o.ReadTimeout, ContextTimeoutEnabled: true,
		MinRetryBackoff: o.MinRetryBackoff, MaxRetries: o.MaxRetries, MaxRedirects: o.MaxRetries,
		ClusterSlots: func(context.Context) ([]redis.ClusterSlot, error) {
			nodes := []redis.ClusterNode{{Addr: o.Addr}}
			return []redis.ClusterSlot{{End: slot.Count - 1, Nodes: nodes}}, nil
		},
	})
}

// pings stops the test unless the server answers a command.
func pings(t *testing.T, s *Store) {
	t.Helper()
	if v, err := s.Do(t.Context(), "ping"); v != "PONG" {
		t.Fatalf("ping: got %v, %v", v, err)
	}
}

// expect waits until a command gets a reply.
func expect(t *testing.T, s *Store, what string, want any, args ...string) {
	t.Helper()
	await.Success(t, what, func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		v, err := s.Do(ctx, args...)
		if err == nil && v != want {
			err = fmt.Errorf("got %v, want %v", v, want)
		}
		return err
	})
}

// busy returns how many goroutines run methods of this package. Only a test that is not parallel
// can use it.
func busy() int {
	buf := make([]byte, 4<<20)
	n := 0
	for stack := range strings.SplitSeq(string(buf[:runtime.Stack(buf, true)]), "\n\n") {
		if strings.Contains(stack, "redisstore.(*") {
			n++
		}
	}
	return n
}

// progress returns how many flights are under way, and how many calls wait for one.
func progress(g *gather) (flights, waiting int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.flights), len(g.waiting)
}

// allFlights reports whether as many flights are under way as there can be, and each has its calls.
// A flight that has just started would also take a later call.
func allFlights(s *Store) bool {
	g := s.one.calls
	g.mu.Lock()
	defer g.mu.Unlock()
	isEmpty := func(f *flight) bool { return len(f.batch) == 0 }
	return len(g.flights) == mostFlights && !slices.ContainsFunc(g.flights, isEmpty)
}
