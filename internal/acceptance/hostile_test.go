package acceptance

import (
	"context"
	"crypto/rand"
	"errors"
	"maps"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/fairlock"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/internal/strategytest"
	"github.com/hasplock/hasp/pubsublock"
	"github.com/hasplock/hasp/redlock"
	"github.com/hasplock/hasp/spinlock"
)

// garbage is a wrong reply. Its fields name the calls that it is a valid reply to.
type garbage struct {
	reply  string
	held   bool // a valid reply to SET, for a key that is held
	crowd  bool // a valid reply to a release of redlock or pubsublock, which counts receivers
	record bool // a valid reply to an inspection
	hangs  bool // the rest of the reply never comes
	apart  bool // in a pipeline, the second reply would be that to the next command
}

// replies are wrong for every command and script of hasp.
var replies = map[string]string{
	"status":                   "+FINE\r\n",
	"negative number":          ":-7\r\n",
	"not a number":             ",nan\r\n",
	"big number":               "(123456789012345678901234567890\r\n",
	"empty string":             "$0\r\n\r\n",
	"empty array":              "*0\r\n",
	"array of nothing":         "*3\r\n$-1\r\n*0\r\n_\r\n",
	"array of an error":        "*2\r\n-ERR no\r\n:1\r\n",
	"map":                      "%2\r\n:1\r\n$1\r\n5\r\n:2\r\n:3\r\n",
	"a fence that is a number": "*2\r\n:1\r\n:5\r\n",
	"a fence that is none":     "*2\r\n:1\r\n$3\r\nabc\r\n",
	"a negative fence":         "*2\r\n:1\r\n$2\r\n-5\r\n",
	"a term below none":        "*3\r\n:0\r\n:-9223372036854775808\r\n$0\r\n\r\n",
	"a state of wrong types":   "*7\r\n:1\r\n$1\r\n1\r\n:0\r\n:5\r\n:5\r\n:5\r\n:1\r\n",
	"ten of all":               "*10\r\n" + strings.Repeat(":1\r\n", 10),
	"an attribute":             "|1\r\n+a\r\n:1\r\n+FINE\r\n",

	"error":          "-ERR no\r\n",
	"blob error":     "!5\r\nERR x\r\n",
	"unknown script": "-NOSCRIPT no\r\n",
	"moved nowhere":  "-MOVED 1 nowhere\r\n",
	"moved":          "-MOVED\r\n",
	"ask":            "-ASK 1 :\r\n",
	"read only":      "-READONLY \r\n",
	"long error":     "-ERR " + strings.Repeat("x", 1<<20) + "\r\n",

	"a page":                 "HTTP/1.1 400 Bad Request\r\n\r\n",
	"bytes":                  "\x00\xff\r\n",
	"line feed":              "+OK\n",
	"length below none":      "$-7\r\n",
	"string without its end": "$1\r\nabcdef\r\n",
	"length beyond an int":   "$9223372036854775806\r\n",
}

// oddReplies are wrong too, except for the calls that their fields name. Some of them hang, or are
// two replies.
var oddReplies = map[string]garbage{
	"nil":         {reply: "$-1\r\n", held: true},
	"nil array":   {reply: "*-1\r\n", held: true},
	"huge number": {reply: ":9223372036854775807\r\n", crowd: true},
	"a fence beyond all": {reply: "*3\r\n:1\r\n$20\r\n99999999999999999999\r\n$0\r\n\r\n",
		record: true},
	"no fence and no term":  {reply: "*3\r\n:0\r\n$1\r\nx\r\n$1\r\ny\r\n", record: true},
	"deep":                  {reply: strings.Repeat("*1\r\n", 100_000), hangs: true},
	"reply that breaks off": {reply: "*2\r\n:1\r\n$5\r\nab", hangs: true},
	"two replies":           {reply: "+FINE\r\n+OK\r\n", apart: true},

	// With RESP2, go-redis takes a push for a reply, so these are two replies as well.
	"a push first":         {reply: ">2\r\n+invalidate\r\n*0\r\n+FINE\r\n", apart: true},
	"a push that is a lie": {reply: ">3\r\n+message\r\n+x\r\n+y\r\n+FINE\r\n", apart: true},
}

// hostile is a driver whose server sends the replies of a test.
type hostile struct {
	strategy string
	d        backend.Driver
	p        *faultproxy.Proxy
	witness  backend.Claim // the claim of a hold that must survive the garbage
	close    func() error  // closes the client of the driver
}

// hostiles opens each strategy by a URL and over a client.
func hostiles(t *testing.T) map[string]*hostile {
	t.Helper()
	all := map[string]*hostile{}
	for _, strategy := range []string{"spinlock", "pubsublock", "fairlock", "redlock"} {
		type opens = func(h *hostile, srv *redistest.Server) (backend.Driver, error)
		for way, open := range map[string]opens{
			"URL": (*hostile).byURL, "client": (*hostile).overClient,
		} {
			srv := redistest.Start(t, redistest.Own)
			h := &hostile{strategy: strategy, p: srv.Proxy(), witness: strategytest.Claim("known")}
			h.d = await.Value(open(h, srv))
			t.Cleanup(func() {
				h.d.Close()
				if h.close != nil {
					h.close()
				}
			})

			h.witness.TTL = time.Hour
			await.Value(h.d.Acquire(t.Context(), h.witness))
			all[strategy+" by "+way] = h
		}
	}
	return all
}

func (h *hostile) byURL(*redistest.Server) (backend.Driver, error) {
	c := hasp.Config{Strategy: h.strategy, Nodes: []string{"redis://" + h.p.Addr()}}
	if h.strategy == "redlock" {
		c.Params = map[string]string{"allow_unsafe_nodes": "true", "max_ttl": "1h"}
	}
	return c.Driver(context.Background())
}

func (h *hostile) overClient(srv *redistest.Server) (backend.Driver, error) {
	o := srv.ClientOptions()
	o.Addr = h.p.Addr()
	o.ContextTimeoutEnabled = true
	rdb := redis.NewClient(o)
	h.close = rdb.Close

	switch h.strategy {
	case "spinlock":
		return spinlock.NewDriver(rdb, nil)
	case "pubsublock":
		return pubsublock.NewDriver(rdb, nil)
	case "fairlock":
		return fairlock.NewDriver(rdb, nil)
	}
	unsafe := &redlock.Options{AllowUnsafeNodes: true, MaxTTL: time.Hour}
	return redlock.NewDriver([]redis.UniversalClient{rdb}, unsafe)
}

// ops has all calls of a driver. With garbage, none of them may succeed.
var ops = []string{"acquire", "acquire fenced", "wait", "renew", "release", "inspect"}

// call makes one call. If the driver has no such call, the error is errNoWaiter.
func (h *hostile) call(ctx context.Context, op, key string) error {
	c := strategytest.Claim(key)
	switch op {
	case "acquire":
		return strategytest.ErrOf(h.d.Acquire(ctx, c))
	case "acquire fenced":
		return strategytest.ErrOf(h.d.Acquire(ctx, strategytest.Fenced(key)))
	case "wait":
		w, ok := h.d.(backend.Waiter)
		if !ok {
			return errNoWaiter
		}
		ctx, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
		defer cancel()
		return strategytest.ErrOf(w.Wait(ctx, strategytest.Fenced(key)))
	case "renew":
		err := errors.New("not answered")
		h.d.Renew(ctx, []backend.Claim{c}, func(_ int, _ backend.Grant, e error) { err = e })
		return err
	case "release":
		return h.d.Release(ctx, c)
	}
	return strategytest.ErrOf(h.d.(backend.Inspector).Inspect(ctx, key))
}

var errNoWaiter = errors.New("the driver is no Waiter")

// Garbage counts as an outage. No call is granted or refused, every call ends, and bytes that are
// left on a connection are never taken for the reply to another call.
func TestGarbageIsAnOutage(t *testing.T) {
	for name, h := range hostiles(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h.isToldGarbage(t)
		})
	}
}

func (h *hostile) isToldGarbage(t *testing.T) {
	all := maps.Clone(oddReplies)
	for what, reply := range replies {
		all[what] = garbage{reply: reply}
	}
	for what, g := range all {
		if g.apart && h.strategy == "redlock" {
			continue // its clean-ups of earlier keys share pipelines with other calls
		}
		for _, got := range h.ask(t, "k-"+strings.ReplaceAll(what, " ", "-"), g) {
			if !strategytest.IsOutage(got.err) && !h.valid(g, got) {
				t.Errorf("%s, %s: got %.200v, want an outage", what, got.op, got.err)
			}
		}
		h.recovers(t, what)
	}
	await.Must(t, h.d.Close())
}

// answer is the outcome of one of the calls.
type answer struct {
	op  string
	err error
}

// valid reports whether g is a valid reply to a command of the call, and a its meaning.
func (h *hostile) valid(g garbage, a answer) bool {
	switch {
	case g.held: // spinlock and redlock send SET
		sends := h.strategy == "spinlock" || h.strategy == "redlock"
		return sends && errors.Is(a.err, backend.ErrHeld)
	case g.crowd:
		counts := h.strategy == "pubsublock" || h.strategy == "redlock"
		return a.err == nil && a.op == "release" && counts
	case g.record && a.op == "renew": // redlock reads the record
		return errors.Is(a.err, backend.ErrLost) && h.strategy == "redlock"
	}
	return g.record && a.err == nil && a.op == "inspect"
}

// ask makes all calls, and lets the server answer each with g. It makes them one after another, and
// then all together.
func (h *hostile) ask(t *testing.T, key string, g garbage) (got []answer) {
	t.Helper()
	patience := 5 * time.Second
	if g.hangs {
		patience = 300 * time.Millisecond // the outcome is the same after a longer time
	}
	h.p.Answer(key, g.reply)
	defer h.p.Forgive()

	var mu sync.Mutex // guards got
	call := func(op string) {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		began := time.Now()
		err := h.call(ctx, op, key)
		if took := time.Since(began); took > patience+20*time.Second {
			t.Errorf("%s, %s took %v", key, op, took)
		}
		mu.Lock()
		defer mu.Unlock()
		got = append(got, answer{op, err})
	}

	var together sync.WaitGroup
	for _, op := range ops {
		if !g.hangs {
			call(op)
		}
	}
	for _, op := range ops {
		if !g.apart {
			together.Go(func() { call(op) })
		}
	}
	together.Wait()
	return got
}

// recovers fails the test unless the driver works again when the server sends right replies.
func (h *hostile) recovers(t *testing.T, after string) {
	t.Helper()
	eventually(t, "after "+after, func() error {
		s, err := h.d.(backend.Inspector).Inspect(t.Context(), h.witness.Key)
		if err != nil {
			return err // try again: a connection has ended, or redlock does not trust a node yet
		}

		if !s.Held || s.Owner != h.witness.Owner {
			t.Fatalf("after %s: the reply to another call: %+v", after, s)
		}
		c := strategytest.Fenced(rand.Text()) // a failed try may have its key
		g, err := h.d.Acquire(t.Context(), c)
		if err != nil {
			return err
		}
		if g.Fence == 0 {
			t.Errorf("after %s: no fence", after)
		}
		return h.d.Release(t.Context(), c)
	})
}
