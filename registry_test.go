package hasp_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/memlock"
)

func TestParseURL(t *testing.T) {
	for url, want := range map[string]hasp.Config{
		"memlock://":                    {Strategy: "memlock"},
		"memlock://jobs?ttl=5s":         {Strategy: "memlock", Nodes: []string{"jobs"}, Params: map[string]string{"ttl": "5s"}},
		" memlock://\r\n":               {Strategy: "memlock"},
		"filelock:///var/lock/app":      {Strategy: "filelock", Nodes: []string{"/var/lock/app"}},
		"spinlock+redis://u:p@h:1/2?x=": {Strategy: "spinlock", Nodes: []string{"redis://u:p@h:1/2"}, Params: map[string]string{"x": ""}},
		"redlock+redis://a:1,b:2,c:3?prefix=app%3A&owner=a+b": {Strategy: "redlock", Nodes: []string{"redis://a:1,b:2,c:3"},
			Params: map[string]string{"prefix": "app:", "owner": "a b"}},
	} {
		got, err := hasp.ParseURL(url)
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: got %#v (nodes %q, params %q), %v", url, got, got.Nodes, got.Params, err)
		}
	}
}

// maxTTL is the longest term that the strategy short grants.
const maxTTL = 3 * time.Second

// short is a driver that polls and grants no term above maxTTL.
type short struct{ backend.Driver }

func newShort() short { return short{memlock.NewDriver()} }

func (short) Traits() backend.Traits {
	return backend.Traits{MaxTTL: maxTTL, Reach: backend.Process}
}

func (d short) Acquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	if c.TTL > maxTTL {
		return backend.Grant{}, backend.ErrInvalid
	}
	return d.Driver.Acquire(ctx, c)
}

var lastShort short // the driver that Open has made last

func init() {
	hasp.Register("short", func(context.Context, hasp.Config) (backend.Driver, error) {
		lastShort = newShort()
		return lastShort, nil
	})
}

func TestOpenRefusesWhatIsWrong(t *testing.T) {
	const secret = "hunter2"
	for url, says := range map[string]string{
		"":                                      "STRATEGY://",
		"localhost:6379":                        "STRATEGY://",
		"memlock":                               "STRATEGY://",
		"memlock+://":                           "no transport",
		"://":                                   "want the name of a strategy first",
		"+redis://h":                            "want the name of a strategy first",
		"+?://":                                 "want the name of a strategy first",
		"memlock+?://":                          "want the name of a strategy first",
		"memlock?x=://":                         "want the name of a strategy first",
		"redis://u:hunter2@a":                   "redis is a transport, which follows the strategy, as in spinlock+redis://… (fairlock, pubsublock, redlock and spinlock take one)",
		"unix:///run/redis.sock":                "as in spinlock+unix://…",
		"short://?ttl=3s1ms":                    "ttl 3.001s is above 3s, the longest term that this store grants",
		"short://":                              "ttl 30s is above 3s",
		"postgres://u:hunter2@a/db":             "put pglock before it, as in pglock+postgres://…",
		"etcds://a":                             "put etcdlock before it, as in etcdlock+etcds://…",
		"caslock://":                            "name the store: kube, mysql, nats, s3 or sqlite",
		"memlok://":                             `unknown strategy "memlok" (registered: memlock`,
		"spinlock+redis://u:hunter2@a":          `add: import _ "github.com/hasplock/hasp/spinlock"`,
		"memlock+redis://u:hunter2@a":           "memlock has no transport",
		"memlock://?poll=0":                     "parameter poll",
		"memlock://?tttl=5s":                    `unknown parameter "tttl" (memlock knows owner, poll, prefix, timeout, ttl)`,
		"spinlock+redis://u:x?hunter2@h:1/0":    "write a question mark as %3F",
		"memlock://:x?hunter2=1&owner=@h":       "write a question mark as %3F",
		"memlock://:x?ttl=hunter2@h":            "in a parameter, write @ as %40",
		"u:hunter2@h://x":                       "want the name of a strategy first",
		"memlock://?ttl=-5":                     "want a positive duration such as 30s",
		"memlock://?ttl=5s&ttl=6s":              "given 2 times",
		"memlock://?ttl=50ms":                   "ttl 50ms is below 100ms",
		"memlock://?timeout=-1s":                "want a positive duration",
		"spinlock+redis://:hunter2@h?ttl=%zz":   "malformed parameters",
		"memlock://x?password=hunter2&a%ZZ=b;c": "malformed parameters",
	} {
		c, err := hasp.Open(t.Context(), url, nil)
		if err == nil {
			c.Close()
			t.Errorf("%s: opened", url)
			continue
		}
		if !errors.Is(err, hasp.ErrInvalid) || !strings.Contains(err.Error(), says) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: got %q, want it to say %q", url, err, says)
		}
		if strings.Contains(err.Error(), secret) {
			t.Errorf("%s: the error shows the password: %v", url, err)
		}
	}
	twoNodes := hasp.Config{Strategy: "memlock", Nodes: []string{"a", "b"}}
	want(t, "two nodes for memlock", errOf(twoNodes.Open(t.Context(), nil)), hasp.ErrInvalid)

	const says = `in a Config the strategy is "short", and the node is redis://…`
	if _, err := (hasp.Config{Strategy: "short+redis"}).Open(t.Context(), nil); !errors.Is(err, hasp.ErrInvalid) || !strings.Contains(err.Error(), says) {
		t.Errorf("a transport in a Config: got %q, want it to say %q", err, says)
	}
}

func TestConfigShowsNoPassword(t *testing.T) {
	c := hasp.Config{Strategy: "spinlock", Nodes: []string{"redis://:hunter2@h"}}
	for _, verb := range []string{"%v", "%+v", "%#v", "%s"} {
		if s := fmt.Sprintf(verb, c); strings.Contains(s, "hunter2") {
			t.Errorf("%s shows %s", verb, s)
		}
	}
	equal(t, "String", c.String(), "spinlock (1 node)")
	c = hasp.Config{Strategy: "fairlock+redis://:hunter2@h"}
	if _, err := c.Open(t.Context(), nil); !errors.Is(err, hasp.ErrInvalid) || strings.Contains(err.Error(), "hunter2") {
		t.Errorf("a URL in place of a strategy: %v", err)
	}
}

func TestConfigDecodesFromYAMLAndJSON(t *testing.T) {
	want := hasp.Config{Strategy: "x", Nodes: []string{"redis://h:1"},
		Params: map[string]string{"ttl": "5s", "retries": "3", "ratio": "0.5", "tls": "true"}}
	var fromYAML, fromJSON hasp.Config
	await.Must(t, yaml.Unmarshal([]byte("strategy: x\nnodes: ['redis://h:1']\nparams: {ttl: 5s, retries: 3, ratio: 0.5, tls: true}"), &fromYAML))
	await.Must(t, json.Unmarshal([]byte(`{"strategy":"x","nodes":["redis://h:1"],"params":{"ttl":"5s","retries":3,"ratio":0.5,"tls":true}}`), &fromJSON))
	for _, got := range []hasp.Config{fromYAML, fromJSON} {
		if !reflect.DeepEqual(got, want) {
			t.Errorf("got %q, want %q", got.Params, want.Params)
		}
	}
	for _, bad := range []string{`{"params":{"a":null}}`, `{"params":{"a":[1]}}`, `{"params":3}`} {
		var c hasp.Config
		if err := json.Unmarshal([]byte(bad), &c); err == nil {
			t.Errorf("%s: decoded as %q", bad, c.Params)
		}
	}
}

func TestConfigWinsOverOptions(t *testing.T) {
	var s seen
	c := await.Value(hasp.Open(t.Context(), "memlock://?owner=m%40e&prefix=a:&ttl=3600&timeout=1s",
		&hasp.Options{Owner: "you", Prefix: "b:", TTL: time.Second, Observe: s.observe}))
	defer c.Close()
	other := await.Value(hasp.Open(t.Context(), "memlock://", nil))
	defer other.Close()
	l := lockNow(t, c, "k")
	defer unlock(t, l)
	st, err := other.Inspect(t.Context(), "a:k") // the key in the store has the prefix
	if err != nil || !st.Held || st.Owner != "m@e" || st.TTL < 59*time.Minute {
		t.Errorf("got %+v, %v", st, err)
	}
	if len(s.all) != 2 || s.all[1].Owner != "m@e" || s.all[1].Key != "k" {
		t.Errorf("got events %v", s.all)
	}
}

// poll=2s sets Options.Backoff, whose pauses are shortened by up to a half.
func TestPoll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := await.Value(hasp.Open(t.Context(), "short://?ttl=3s&poll=2s", nil))
		defer c.Close()
		other := await.Value(hasp.New(lastShort, &hasp.Options{TTL: maxTTL}))
		defer other.Close()

		l := lockNow(t, other, "k")
		time.AfterFunc(time.Millisecond, func() { unlock(t, l) })
		began := time.Now()
		unlock(t, lockNow(t, c, "k"))
		between(t, "the pause before the next attempt", time.Since(began), time.Second, 2*time.Second)
	})
}

func panics(t testing.TB, what string, f func()) {
	t.Helper()
	defer func() {
		if recover() == nil {
			t.Errorf("%s: no panic", what)
		}
	}()
	f()
}

func TestRegisterPanics(t *testing.T) {
	opener := func(context.Context, hasp.Config) (backend.Driver, error) { return memlock.NewDriver(), nil }
	panics(t, "nil", func() { hasp.Register("nothing", nil) })
	panics(t, "twice", func() { hasp.Register("memlock", opener) })
	if got := hasp.Strategies(); !reflect.DeepEqual(got, []string{"memlock", "short", "zone"}) {
		t.Errorf("registered: %v", got)
	}
}

// If New fails, it closes the driver.
func TestNewRefusesWhatItCannotUse(t *testing.T) {
	for what, o := range map[string]hasp.Options{
		"short ttl":           {TTL: time.Millisecond},
		"negative timeout":    {Timeout: -1},
		"more than the store": {TTL: 6 * time.Second},
	} {
		d := newShort()
		want(t, what, errOf(hasp.New(d, &o)), hasp.ErrInvalid)
		if _, err := d.Acquire(t.Context(), backend.Claim{Key: "k", Token: "t", TTL: time.Second}); err == nil {
			t.Errorf("%s: the driver is open", what)
		}
	}
}

func TestBadArguments(t *testing.T) {
	c := opened(t, plainDriver{memlock.NewDriver()}, nil)
	for target, calls := range map[error]map[string]options{
		hasp.ErrInvalid: {
			"short ttl":                 {hasp.WithTTL(99 * time.Millisecond)},
			"negative max wait":         {hasp.WithMaxWait(-1)},
			"no max hold":               {hasp.WithMaxHold(0)},
			"min hold below zero":       {hasp.WithMinHold(-1)},
			"min hold of 200 years":     {hasp.WithMinHold(200 * 365 * 24 * time.Hour)},
			"min hold above max hold":   {hasp.WithMinHold(2), hasp.WithMaxHold(1)},
			"no slots":                  {hasp.WithSlots(0)},
			"a number of slots below 0": {hasp.WithSlots(-1)},
			"101 slots":                 {hasp.WithSlots(101)},
			"shared slots":              {shared, hasp.WithSlots(2)},
		},
		errors.ErrUnsupported: {
			"no fence":         {hasp.WithFence()},
			"no shared leases": {shared},
			"no min hold":      {hasp.WithMinHold(time.Minute)},
		},
	} {
		for name, opts := range calls {
			want(t, name, errOf(c.Lock(t.Context(), "k", opts...)), target)
			want(t, name, errOf(c.TryLock(t.Context(), "k", opts...)), target)
		}
	}
	want(t, "empty key", errOf(c.Lock(t.Context(), "")), hasp.ErrInvalid)
	if l, err := c.Lock(t.Context(), "k", nil, hasp.WithTTL(1<<62-1)); err == nil {
		t.Error("a term of a century:", l.Expires())
	}
	l := lockNow(t, c, "k", hasp.WithMinHold(0))
	want(t, "a min hold by re-entry", errOf(c.Lock(l.Context(), "k", hasp.WithMinHold(time.Minute))), errors.ErrUnsupported)
	unlock(t, l)
	want(t, "Inspect", errOf(c.Inspect(t.Context(), "k")), errors.ErrUnsupported)
	want(t, "Break", c.Break(t.Context(), "k"), errors.ErrUnsupported)
}

// plainDriver has only the methods of a Driver, and no fences.
type plainDriver struct{ backend.Driver }

func (plainDriver) Traits() backend.Traits { return backend.Traits{Reach: backend.Process} }

// The events of a lease that re-enters have Reentry set, and Tries is 0. After a hand-over Tries is
// also 0, but Reentry is not set.
func TestEventsOfACall(t *testing.T) {
	var s seen
	withClient(t, &hasp.Options{Observe: s.observe}, func(t *bench) {
		t.acquire = slow(time.Millisecond)
		l := t.lock("k", hasp.WithFence())
		t.TryLock(t.Context(), "k")
		unlock(t, t.lockIn(l.Context(), "k"))
		time.Sleep(time.Second)
		unlock(t, l)

		begin(t, s.lines(l.Fence()),
			"0 lock k requested 0s 0 re-entry false fence false 0s held false",
			"0 lock k acquired 1ms 1 re-entry false fence true 0s held false",
			"1 trylock k requested 0s 0 re-entry false fence false 0s held false",
			"1 trylock k refused 0s 0 re-entry false fence false 0s held true",
			"2 lock k requested 0s 0 re-entry false fence false 0s held false",
			"2 lock k acquired 0s 0 re-entry true fence true 0s held false",
			"2 lock k released 0s 0 re-entry true fence true 0s held false",
			"0 lock k released 0s 0 re-entry false fence true 1s held false")
	})
}
