package hasp

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/calls"
	"github.com/hasplock/hasp/internal/clock"
)

// Config names a driver and its settings. [ParseURL] creates one from a URL. A Config can be
// decoded from YAML and JSON. Let the decoder refuse unknown fields. Otherwise, if the field params
// is misspelt, all parameters in it are ignored.
//
//	strategy: spinlock
//	nodes: ["redis://user:password@host:6379/0"]
//	params: {ttl: 10s, prefix: "app:"}
type Config struct {
	// Strategy is the name of a registered strategy.
	Strategy string `json:"strategy" yaml:"strategy"`

	// Nodes are the addresses of the store, in the form that the strategy documents. Most
	// strategies take one.
	Nodes []string `json:"nodes,omitempty" yaml:"nodes,omitempty"`

	// Params are the strategy's own parameters, and ttl, timeout, prefix and owner, which set the
	// fields of [Options] with these names, and poll, a duration that Options.Backoff returns.
	// Unknown parameters are refused.
	Params Params `json:"params,omitempty" yaml:"params,omitempty"`
}

// Params are the parameters of a [Config], by their names. In JSON and YAML a value may also be a
// number or a boolean, whose text counts.
type Params map[string]string

// UnmarshalJSON makes Params a [json.Unmarshaler].
func (p *Params) UnmarshalJSON(text []byte) error {
	var values map[string]any
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber() // keeps the text of a number
	if err := d.Decode(&values); err != nil {
		return err
	}

	*p = Params{}
	for name, v := range values {
		switch v.(type) {
		case string, json.Number, bool:
			(*p)[name] = fmt.Sprint(v)
		default:
			return fmt.Errorf("parameter %s: want a text, a number or a boolean", name)
		}
	}
	return nil
}

// String returns the strategy and the number of nodes. It omits the nodes, which may contain
// passwords.
func (c Config) String() string {
	if len(c.Nodes) == 1 {
		return c.Strategy + " (1 node)"
	}
	return fmt.Sprintf("%s (%d nodes)", c.Strategy, len(c.Nodes))
}

// GoString returns String(), so %#v of a Config shows no password either. But if the Config is an
// unexported field of another struct, %#v of that struct shows the password.
func (c Config) GoString() string { return c.String() }

// ParseURL parses a URL of one of these forms:
//
//	STRATEGY://PLACE?PARAM=VALUE&…
//	STRATEGY+TRANSPORT://PLACE?PARAM=VALUE&…
//
// Without a transport, the only node is PLACE; if PLACE is empty, there is no node. With a
// transport, the only node is TRANSPORT://PLACE. The strategy defines what PLACE means, and whether
// it may be a list of hosts. In a password, write a question mark as %3F, and in a parameter an "@"
// as %40.
func ParseURL(rawURL string) (Config, error) {
	rawURL = strings.TrimSpace(rawURL) // a file or a Secret ends with a newline
	scheme, rest, ok := strings.Cut(rawURL, "://")
	if rawURL == "" {
		return Config{}, fmt.Errorf("%w: url is empty: want STRATEGY://…, such as memlock://",
			ErrInvalid)
	}
	if !ok {
		return Config{}, fmt.Errorf("%w: url: want STRATEGY://… or STRATEGY+TRANSPORT://…, "+
			"such as memlock:// or spinlock+redis://localhost:6379", ErrInvalid)
	}

	strategy, transport, _ := strings.Cut(scheme, "+")
	if strategy == "" || strings.ContainsAny(strategy, "@:/\"'") || strings.Contains(scheme, "?") {
		// Do not show the text, which may be a password.
		return Config{}, fmt.Errorf("%w: url: want the name of a strategy first, "+
			"without a quotation mark before it, as in memlock:// or spinlock+redis://localhost:6379", ErrInvalid)
	}

	c := Config{Strategy: strategy}
	place, query, _ := strings.Cut(rest, "?")
	switch {
	case strings.HasSuffix(scheme, "+"):
		return Config{}, fmt.Errorf("%w: url: no transport after %q", ErrInvalid, scheme)
	case transport != "":
		c.Nodes = []string{transport + "://" + place}
	case place != "":
		c.Nodes = []string{place}
	}

	// A password with a question mark would be cut in two, and errors that show parameters would
	// show a part of the password. In that case the "@" after the password is in the query, so
	// refuse it there.
	if strings.Contains(query, "@") {
		return Config{}, fmt.Errorf("%w: url: an @ after the question mark: in a password, "+
			"write a question mark as %%3F; in a parameter, write @ as %%40", ErrInvalid)
	}
	values, err := url.ParseQuery(query)
	if err != nil {
		// Drop err: it repeats the input, which may contain a password.
		return Config{}, fmt.Errorf("%w: url: malformed parameters after the question mark: "+
			"separate parameters by & alone, and write other signs as %%XX",
			ErrInvalid)
	}

	for name, vs := range values {
		if len(vs) > 1 { // do not show the name, which may be a part of a password
			return Config{}, fmt.Errorf("%w: url: a parameter is given %d times",
				ErrInvalid, len(vs))
		}
		if c.Params == nil {
			c.Params = map[string]string{}
		}
		c.Params[name] = vs[0]
	}
	return c, nil
}

// engineParams are the parameters that every strategy has.
var engineParams = []string{"ttl", "timeout", "prefix", "owner", "poll"}

// options returns a copy of o with the engine's parameters of c, and removes these parameters from
// c. The other parameters must be in the list known, so that a misspelt parameter is never ignored.
func (c *Config) options(o *Options, known []string) (v Options, err error) {
	if o != nil {
		v = *o
	}

	others := map[string]string{} // a new map, because c.Params belongs to the caller
	for _, name := range slices.Sorted(maps.Keys(c.Params)) {
		switch s := c.Params[name]; name {
		case "ttl":
			v.TTL, err = positive(name, s)
		case "timeout":
			v.Timeout, err = positive(name, s)
		case "prefix":
			v.Prefix = s
		case "owner":
			v.Owner = s
		case "poll":
			var pause time.Duration
			pause, err = positive(name, s)
			v.Backoff = func(int) time.Duration { return pause }
		default:
			if !slices.Contains(known, name) {
				names := slices.Sorted(slices.Values(slices.Concat(engineParams, known)))
				return v, fmt.Errorf("%w: unknown parameter %q (%s knows %s)",
					ErrInvalid, name, c.Strategy, strings.Join(names, ", "))
			}
			others[name] = s
		}
		if err != nil {
			return v, err
		}
	}

	c.Params = others
	return v.withDefaults()
}

// positive returns the value s of the parameter name as a duration, which must be above zero.
func positive(name, s string) (time.Duration, error) {
	d, err := clock.ParseDuration(s)
	if err != nil || d <= 0 {
		return 0, fmt.Errorf("%w: parameter %s=%q: want a positive duration such as 30s or 500ms",
			ErrInvalid, name, s)
	}
	return d, nil
}

// Open opens the driver that c names, and returns a Client over it. The parameters of c override o.
// Open calls the store once, within Options.Timeout, and returns ErrUnavailable if it cannot reach
// the store. If c is wrong, or the TTL is longer than the store grants, it returns ErrInvalid.
func (c Config) Open(ctx context.Context, o *Options) (*Client, error) {
	d, opts, err := c.open(ctx, o)
	if err != nil {
		return nil, err
	}

	client, err := newClient(d, &opts)
	if err != nil {
		return nil, fmt.Errorf("hasp: open %s: %w", c.Strategy, err)
	}

	// Open succeeds even if a part of the store does not answer, and reports that part.
	if part, ok := d.(backend.Degraded); ok {
		if err := part.Missing(); err != nil {
			client.observer.call(ctx, Event{Kind: EventDegraded, Err: err})
		}
	}
	return client, nil
}

// Driver opens the driver that c names, without a Client. The conformance suite uses Driver, and so
// does a program that passes a wrapper of the driver to New. The parameter timeout bounds the
// opening. The engine's other parameters are checked and have no effect.
func (c Config) Driver(ctx context.Context) (backend.Driver, error) {
	d, _, err := c.open(ctx, nil)
	return d, err
}

// open opens the driver, and returns the Options of a Client over it.
func (c Config) open(ctx context.Context, o *Options) (backend.Driver, Options, error) {
	strategy, err := lookup(c.Strategy)
	if err != nil {
		return nil, Options{}, fmt.Errorf("hasp: open: %w", err)
	}
	opts, err := c.options(o, strategy.params)
	if err == nil && ctx == nil {
		err = errNilContext
	}
	if err != nil {
		return nil, opts, fmt.Errorf("hasp: open %s: %w", c.Strategy, err)
	}

	within, cancel := context.WithTimeout(ctx, opts.Timeout)
	defer cancel()
	d, err := strategy.open(within, c)
	if d == nil && err == nil {
		err = fmt.Errorf("%w: the opener returned no driver", ErrInvalid)
	}
	if err != nil {
		if !backend.Definite(err) { // an end of a context may have caused err
			err = openErr(ctx, err, opts.Timeout)
		}
		return nil, opts, fmt.Errorf("hasp: open %s: %w", c.Strategy, marked(err))
	}
	return d, opts, nil
}

// openErr returns the error of an opener that was bounded by timeout and failed with err. If ctx
// has ended, the error also matches the error of ctx.
func openErr(ctx context.Context, err error, timeout time.Duration) error {
	end := withContextEnd(ctx, nil)
	switch {
	case end == nil: // the caller's context has not ended
		return calls.Plain(err, timeout)
	case errors.Is(err, os.ErrDeadlineExceeded):
		// Do not report an outage, because the deadline was that of ctx. So show the text of err,
		// but let the error match only the end of ctx.
		return fmt.Errorf("%w (%v)", end, err)
	}
	return &waitError{err, end}
}

// Open calls [ParseURL] and [Config.Open]. The program must import the strategy's package:
//
//	import _ "github.com/hasplock/hasp/spinlock"
//
//	c, err := hasp.Open(ctx, "spinlock+redis://localhost:6379/0?ttl=10s", nil)
func Open(ctx context.Context, rawURL string, o *Options) (*Client, error) {
	c, err := ParseURL(rawURL)
	if err != nil {
		return nil, fmt.Errorf("hasp: open: %w", err)
	}
	return c.Open(ctx, o)
}

// opener is a strategy as Register was called for it.
type opener struct {
	open   func(ctx context.Context, c Config) (backend.Driver, error)
	params []string // names of the parameters that open knows
}

// registry maps the name of each registered strategy to its opener.
var registry = struct {
	sync.Mutex // guards openers
	openers    map[string]opener
}{openers: map[string]opener{}}

// Register registers a strategy for Open. Strategies call it in their init. Register panics if the
// function open is nil, the name is taken, or no URL can contain the name.
//
// params are the names of the strategy's own parameters. Package hasp refuses all other names, so
// c.Params contains only these names. The function open must call the store once, to check that it
// can be reached, and must return when ctx ends. Its errors must contain no password.
func Register(strategy string,
	open func(ctx context.Context, c Config) (backend.Driver, error), params ...string) {
	registry.Lock()
	defer registry.Unlock()
	if open == nil || strategy == "" || strings.ContainsAny(strategy, "+@:/?\"'") {
		panic("hasp: Register: opener of " + strategy + " is nil, or no URL can contain this name")
	}
	if _, taken := registry.openers[strategy]; taken {
		panic("hasp: Register: strategy " + strategy + " is registered already")
	}
	registry.openers[strategy] = opener{open, slices.Clone(params)}
}

// Strategies returns the names of the registered strategies, sorted.
func Strategies() []string {
	registry.Lock()
	defer registry.Unlock()
	return slices.Sorted(maps.Keys(registry.openers))
}

// packages has the package of each of hasp's strategies, below the module's path. Those of stores
// other than Redis are in modules of their own.
var packages = map[string]string{
	"etcdlock":   "etcdlock",
	"fairlock":   "fairlock",
	"filelock":   "filelock",
	"kube":       "caslock/k8slease",
	"memlock":    "memlock",
	"mysql":      "caslock/sqlkv/mysql",
	"nats":       "caslock/natskv",
	"pglock":     "pglock",
	"pubsublock": "pubsublock",
	"redlock":    "redlock",
	"s3":         "caslock/s3kv",
	"spinlock":   "spinlock",
	"sqlite":     "caslock/sqlkv/sqlite",
}

// lookup returns the opener of a strategy. If there is none, the error says which import or change
// may be missing.
func lookup(strategy string) (opener, error) {
	registry.Lock()
	o := registry.openers[strategy]
	registry.Unlock()
	if o.open != nil {
		return o, nil
	}

	// The text of the error depends on the most likely mistake.
	names := Strategies()
	registered := strings.Join(names, ", ")
	if registered == "" {
		registered = "none"
	}

	hint := "is it misspelt, or is the import of its package missing?"
	name, transport, _ := strings.Cut(strategy, "+")
	switch {
	case transport != "" && slices.Contains(names, name):
		hint = fmt.Sprintf("in a Config the strategy is %q, and the node is %s://…",
			name, transport)
	case strategy == "":
		hint = "no strategy given: want STRATEGY://…"
	case strategy == "postgres", strategy == "postgresql":
		hint = fmt.Sprintf("put pglock before it, as in pglock+%s://…", strategy)
	case strategy == "etcd", strategy == "etcds":
		hint = fmt.Sprintf("put etcdlock before it, as in etcdlock+%s://…", strategy)
	case strategy == "unix", strings.HasPrefix(strategy, "redis"):
		hint = fmt.Sprintf("%s is a transport, which follows the strategy, "+
			"as in spinlock+%[1]s://… (fairlock, pubsublock, redlock and spinlock take one)",
			strategy)
	case strategy == "mariadb":
		hint = "MariaDB is reached as mysql://…"
	case strategy == "caslock":
		hint = "name the store: kube, mysql, nats, s3 or sqlite"
	case packages[strategy] != "":
		hint = fmt.Sprintf("add: import _ %q", "github.com/hasplock/hasp/"+packages[strategy])
	}
	if strings.ContainsAny(strategy, "@:/") {
		// Do not show the name, because it may be a URL with a password.
		return opener{}, fmt.Errorf("%w: strategy is not a name (registered: %s); "+
			"put a URL into nodes", ErrInvalid, registered)
	}
	return opener{}, fmt.Errorf("%w: unknown strategy %q (registered: %s); %s",
		ErrInvalid, strategy, registered, hint)
}
