package acceptance

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"regexp"
	"runtime"
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

// garbage has replies that are wrong for every command and script of hasp, except where a field
// names a call for which the reply is valid.
var garbage = map[string]struct {
	reply  string
	held   bool // a valid reply to SET, for a key that is held
	crowd  bool // a valid reply to a release of redlock or pubsublock, which counts receivers
	record bool // a valid reply to an inspection
	hangs  bool // the rest of the reply never comes
	huge   bool // go-redis would allocate the announced length
	apart  bool // in a pipeline, the second reply would be that to the next command
}{
	"nil":                      {reply: "$-1\r\n", held: true},
	"nil array":                {reply: "*-1\r\n", held: true},
	"status":                   {reply: "+FINE\r\n"},
	"negative number":          {reply: ":-7\r\n"},
	"huge number":              {reply: ":9223372036854775807\r\n", crowd: true},
	"not a number":             {reply: ",nan\r\n"},
	"big number":               {reply: "(123456789012345678901234567890\r\n"},
	"empty string":             {reply: "$0\r\n\r\n"},
	"empty array":              {reply: "*0\r\n"},
	"array of nothing":         {reply: "*3\r\n$-1\r\n*0\r\n_\r\n"},
	"array of an error":        {reply: "*2\r\n-ERR no\r\n:1\r\n"},
	"map":                      {reply: "%2\r\n:1\r\n$1\r\n5\r\n:2\r\n:3\r\n"},
	"a fence that is a number": {reply: "*2\r\n:1\r\n:5\r\n"},
	"a fence that is none":     {reply: "*2\r\n:1\r\n$3\r\nabc\r\n"},
	"a negative fence":         {reply: "*2\r\n:1\r\n$2\r\n-5\r\n"},
	"a fence beyond all":       {reply: "*3\r\n:1\r\n$20\r\n99999999999999999999\r\n$0\r\n\r\n", record: true},
	"no fence and no term":     {reply: "*3\r\n:0\r\n$1\r\nx\r\n$1\r\ny\r\n", record: true},
	"a term below none":        {reply: "*3\r\n:0\r\n:-9223372036854775808\r\n$0\r\n\r\n"},
	"a state of wrong types":   {reply: "*7\r\n:1\r\n$1\r\n1\r\n:0\r\n:5\r\n:5\r\n:5\r\n:1\r\n"},
	"ten of all":               {reply: "*10\r\n" + strings.Repeat(":1\r\n", 10)},
	"an attribute":             {reply: "|1\r\n+a\r\n:1\r\n+FINE\r\n"},

	"error":          {reply: "-ERR no\r\n"},
	"blob error":     {reply: "!5\r\nERR x\r\n"},
	"unknown script": {reply: "-NOSCRIPT no\r\n"},
	"moved nowhere":  {reply: "-MOVED 1 nowhere\r\n"},
	"moved":          {reply: "-MOVED\r\n"},
	"ask":            {reply: "-ASK 1 :\r\n"},
	"read only":      {reply: "-READONLY \r\n"},
	"long error":     {reply: "-ERR " + strings.Repeat("x", 1<<20) + "\r\n"},

	"a page":                 {reply: "HTTP/1.1 400 Bad Request\r\n\r\n"},
	"bytes":                  {reply: "\x00\xff\r\n"},
	"line feed":              {reply: "+OK\n"},
	"length below none":      {reply: "$-7\r\n"},
	"string without its end": {reply: "$1\r\nabcdef\r\n"},
	"deep":                   {reply: strings.Repeat("*1\r\n", 100_000), hangs: true},
	"length beyond an int":   {reply: "$9223372036854775806\r\n"},
	"length of gigabytes":    {reply: "$2147483647\r\nabc", huge: true},
	"array of gigabytes":     {reply: "*2147483647\r\n:1\r\n", huge: true},
	"trickle":                {reply: "$629145600\r\n" + strings.Repeat("x", 100), huge: true},
	"line without an end":    {reply: "+" + strings.Repeat("x", 2<<20), huge: true},
	"reply that breaks off":  {reply: "*2\r\n:1\r\n$5\r\nab", hangs: true},
	"two replies":            {reply: "+FINE\r\n+OK\r\n", apart: true},

	// With RESP2, go-redis takes a push for a reply, so these are two replies as well.
	"a push first":         {reply: ">2\r\n+invalidate\r\n*0\r\n+FINE\r\n", apart: true},
	"a push that is a lie": {reply: ">3\r\n+message\r\n+x\r\n+y\r\n+FINE\r\n", apart: true},
}

// hostile is a driver whose server sends the replies of a test.
type hostile struct {
	d       backend.Driver
	p       *faultproxy.Proxy
	witness backend.Claim // the claim of a hold that must survive the garbage
}

// hostiles opens each strategy by a URL and over a client.
func hostiles(t testing.TB) map[string]*hostile {
	t.Helper()
	all := map[string]*hostile{}
	for _, strategy := range []string{"spinlock", "pubsublock", "fairlock", "redlock"} {
		for _, way := range []string{"URL", "client"} {
			h := &hostile{witness: strategytest.Claim("known-" + strategy + way)}
			srv := redistest.Start(t, &redistest.Options{Own: true})
			h.p = srv.Proxy()
			if way == "URL" {
				h.d = byURL(t, strategy, h.p.Addr())
			} else {
				o := srv.ClientOptions()
				o.Addr, o.ContextTimeoutEnabled = h.p.Addr(), true
				rdb := redis.NewClient(o)
				t.Cleanup(func() { rdb.Close() })
				h.d = overClient(strategy, rdb)
			}
			t.Cleanup(func() { h.d.Close() })
			h.witness.TTL = time.Hour
			if _, err := h.d.Acquire(t.Context(), h.witness); err != nil {
				t.Fatalf("%s, %s: %v", strategy, way, err)
			}
			all[strategy+" by "+way] = h
		}
	}
	return all
}

func byURL(t testing.TB, strategy, addr string) backend.Driver {
	t.Helper()
	c := hasp.Config{Strategy: strategy, Nodes: []string{"redis://" + addr}}
	if strategy == "redlock" {
		c.Params = map[string]string{"allow_unsafe_nodes": "true", "max_ttl": "1h"}
	}
	return await.Value(c.Driver(t.Context()))
}

func overClient(strategy string, rdb redis.UniversalClient) backend.Driver {
	switch strategy {
	case "spinlock":
		return await.Value(spinlock.NewDriver(rdb, nil))
	case "pubsublock":
		return await.Value(pubsublock.NewDriver(rdb, nil))
	case "fairlock":
		return await.Value(fairlock.NewDriver(rdb, nil))
	}
	return await.Value(redlock.NewDriver([]redis.UniversalClient{rdb}, &redlock.Options{AllowUnsafeNodes: true, MaxTTL: time.Hour}))
}

// calls has all calls of a driver. With garbage, none of them may succeed.
var calls = map[string]func(ctx context.Context, h *hostile, key string) error{
	"acquire": func(ctx context.Context, h *hostile, key string) error {
		_, err := h.d.Acquire(ctx, strategytest.Claim(key))
		return err
	},
	"acquire fenced": func(ctx context.Context, h *hostile, key string) error {
		_, err := h.d.Acquire(ctx, strategytest.Fenced(key))
		return err
	},
	"wait": func(ctx context.Context, h *hostile, key string) error {
		w, ok := h.d.(backend.Waiter)
		if !ok {
			return errors.ErrUnsupported
		}
		_, err := w.Wait(ctx, strategytest.Fenced(key))
		return err
	},
	"renew": func(ctx context.Context, h *hostile, key string) error {
		err := errors.New("not answered")
		h.d.Renew(ctx, []backend.Claim{strategytest.Claim(key)}, func(_ int, _ backend.Grant, e error) { err = e })
		return err
	},
	"release": func(ctx context.Context, h *hostile, key string) error {
		return h.d.Release(ctx, strategytest.Claim(key))
	},
	"inspect": func(ctx context.Context, h *hostile, key string) error {
		_, err := h.d.(backend.Inspector).Inspect(ctx, key)
		return err
	},
}

// Garbage counts as an outage. No call is granted or refused, every call ends, and bytes that are
// left on a connection are never taken for the reply to another call.
func TestGarbageIsAnOutage(t *testing.T) {
	all := hostiles(t)
	t.Run("strategies", func(t *testing.T) {
		for name, h := range all {
			t.Run(name, func(t *testing.T) { t.Parallel(); h.isToldGarbage(t, name) })
		}
	})
	noGoroutineIsLeft(t)
}

func (h *hostile) isToldGarbage(t *testing.T, name string) {
	for what, g := range garbage {
		if g.huge {
			continue // go-redis reads replies of any length
		}
		if g.apart && strings.Contains(name, "redlock") {
			continue // its clean-ups of earlier keys share pipelines with other calls
		}
		key := "k-" + strings.ReplaceAll(what, " ", "-")
		for _, got := range h.ask(t, key, g.reply, g.hangs, g.apart || strings.Contains(name, "URL"), !g.apart) {
			op, err := got.op, got.err
			switch {
			case err == nil && g.record && op == "inspect":
			case errors.Is(err, backend.ErrLost) && g.record && op == "renew" && strings.Contains(name, "redlock"): // it reads the record
			case err == nil && g.crowd && op == "release" && (strings.Contains(name, "redlock") || strings.Contains(name, "pubsub")):
			case errors.Is(err, backend.ErrHeld) && g.held && (strings.Contains(name, "spin") || strings.Contains(name, "redlock")):
			case op == "wait" && errors.Is(err, errors.ErrUnsupported):
			case err == nil, errors.Is(err, backend.ErrHeld), errors.Is(err, backend.ErrLost), errors.Is(err, backend.ErrInvalid), errors.Is(err, errors.ErrUnsupported):
				t.Errorf("%s, %s: got %.200v, want an outage", what, op, err)
			}
		}
		h.recovers(t, what)
	}
	if err := h.d.Close(); err != nil {
		t.Error(err)
	}
}

type answer struct {
	op  string
	err error
}

// ask makes all calls, and lets the server answer each with reply. If alone is set, it makes them one
// after another, and then, if crowd is set, all together.
func (h *hostile) ask(t *testing.T, key, reply string, hangs, alone, crowd bool) (got []answer) {
	t.Helper()
	patience := 5 * time.Second
	if hangs {
		patience = 300 * time.Millisecond // the outcome is the same after a longer time
	}
	h.p.Answer(key, reply)
	defer h.p.Forgive()
	var mu sync.Mutex // guards got
	call := func(op string) {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		if op == "wait" {
			ctx, cancel = context.WithTimeout(t.Context(), 20*time.Millisecond)
			defer cancel()
		}
		began := time.Now()
		err := calls[op](ctx, h, key)
		if took := time.Since(began); took > patience+20*time.Second {
			t.Errorf("%s, %s took %v", key, op, took)
		}
		mu.Lock()
		defer mu.Unlock()
		got = append(got, answer{op, err})
	}
	if alone && !hangs {
		for op := range calls {
			call(op)
		}
	}
	var together sync.WaitGroup
	for op := range calls {
		if crowd {
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

var ours = regexp.MustCompile(`hasplock/hasp/(spinlock|pubsublock|fairlock|redlock|internal/redisstore(?:/\w+)?)\.`)

func noGoroutineIsLeft(t *testing.T) {
	t.Helper()
	eventually(t, "no goroutine of a driver is left", func() error {
		buf := make([]byte, 1<<20)
		buf = buf[:runtime.Stack(buf, true)]
		var left []string
		for _, g := range strings.Split(string(buf), "\n\n") {
			if ours.MatchString(g) && !strings.Contains(g, "hasp/internal/acceptance") {
				left = append(left, g)
			}
		}
		if len(left) > 0 {
			return fmt.Errorf("%d are left:\n%s", len(left), strings.Join(left, "\n\n"))
		}
		return nil
	})
}
