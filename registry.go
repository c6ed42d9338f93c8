package hasp

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hasplock/hasp/backend"
)

// Config names a driver and its settings: a URL taken apart. It decodes from
// YAML and JSON as it stands.
//
//	strategy: spinlock
//	nodes: ["redis://user:password@host:6379/0"]
//	params: {ttl: 10s, prefix: "app:"}
type Config struct {
	// Strategy is the name a strategy registered itself under.
	Strategy string `json:"strategy" yaml:"strategy"`

	// Nodes are the addresses of the store, in the form the strategy
	// documents: mostly one.
	Nodes []string `json:"nodes,omitempty" yaml:"nodes,omitempty"`

	// Params are ttl, timeout, prefix and owner, which set the fields of
	// [Options] of that name, and the strategy's own. Unknown ones are
	// refused.
	Params Params `json:"params,omitempty" yaml:"params,omitempty"`
}

// Params are parameters by name. Any scalar is taken as its text.
type Params map[string]string

// UnmarshalJSON takes an object whose values are strings, numbers or booleans.
func (p *Params) UnmarshalJSON(b []byte) error {
	var raw map[string]json.RawMessage
	if err := json.Unmarshal(b, &raw); err != nil {
		return err
	}
	m := make(Params, len(raw))
	for name, v := range raw {
		var s string
		switch {
		case len(v) > 0 && v[0] == '"':
			if err := json.Unmarshal(v, &s); err != nil {
				return err
			}
		case len(v) == 0 || v[0] == '{' || v[0] == '[' || string(v) == "null":
			return fmt.Errorf("%w: parameter %q is not a scalar", ErrInvalid, name)
		default:
			s = string(v)
		}
		m[name] = s
	}
	*p = m
	return nil
}

// String leaves the nodes out, since they may hold passwords.
func (c Config) String() string {
	return fmt.Sprintf("%s (%d nodes)", c.Strategy, len(c.Nodes))
}

// GoString is String, so that printing a Config with %#v shows no password
// either. Printed as an unexported field of another struct it does show.
func (c Config) GoString() string { return c.String() }

// ParseURL takes a URL apart:
//
//	STRATEGY://PLACE?PARAM=VALUE&…
//	STRATEGY+TRANSPORT://PLACE?PARAM=VALUE&…
//
// Without a transport PLACE becomes the only node, or none if it is empty;
// with one the node is TRANSPORT://PLACE. What a place or a list of hosts in
// it means is the strategy's affair.
func ParseURL(rawURL string) (Config, error) {
	scheme, rest, ok := strings.Cut(rawURL, "://")
	if !ok {
		return Config{}, fmt.Errorf("%w: url: want STRATEGY://… or STRATEGY+TRANSPORT://…, such as memlock:// or spinlock+redis://localhost:6379", ErrInvalid)
	}
	strategy, transport, _ := strings.Cut(scheme, "+")
	if strategy == "" || strings.ContainsAny(strategy, "@:/") || strings.Contains(scheme, "?") { // it may be anything, such as a password
		return Config{}, fmt.Errorf("%w: url: want the name of a strategy first, as in memlock:// or spinlock+redis://localhost:6379", ErrInvalid)
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
	values, err := url.ParseQuery(query)
	if err != nil {
		// A url.Error repeats its input, which may hold a password.
		return Config{}, fmt.Errorf("%w: url: malformed parameters after the question mark", ErrInvalid)
	}
	for name, vs := range values {
		// The errors do not show the name, because it may be the rest of a password.
		if strings.ContainsAny(name, "@:/") {
			return Config{}, fmt.Errorf("%w: url: what follows the question mark are no parameters (%s)", ErrInvalid, questionHint)
		}
		if len(vs) > 1 {
			return Config{}, fmt.Errorf("%w: url: after the question mark, a parameter is given %d times (%s)", ErrInvalid, len(vs), questionHint)
		}
		if c.Params == nil {
			c.Params = Params{}
		}
		c.Params[name] = vs[0]
	}
	return c, nil
}

const questionHint = "in a password, write it as %3F"

// torn reports whether the parameters may be the rest of a password, from a
// question mark in it on: then they are not to be shown.
func (c Config) torn() bool {
	at := func(s string) bool { return strings.Contains(s, "@") }
	return !slices.ContainsFunc(c.Nodes, at) && slices.ContainsFunc(slices.Collect(maps.Values(c.Params)), at)
}

// Check returns ErrInvalid if c has a parameter that is not among known, and
// names it. Openers call it, so that a misspelt parameter is never ignored.
func (c Config) Check(known ...string) error {
	for _, name := range slices.Sorted(maps.Keys(c.Params)) {
		if !slices.Contains(known, name) {
			all := slices.Concat(engineParams, known)
			slices.Sort(all)
			if c.torn() {
				return fmt.Errorf("%w: an unknown parameter after the question mark (%s; %s knows %s)", ErrInvalid, questionHint, c.Strategy, strings.Join(all, ", "))
			}
			return fmt.Errorf("%w: unknown parameter %q (%s knows %s)", ErrInvalid, name, c.Strategy, strings.Join(all, ", "))
		}
	}
	return nil
}

var engineParams = []string{"ttl", "timeout", "prefix", "owner"}

// options takes the engine's parameters out of c and lays them over o.
func (c *Config) options(o *Options) (Options, error) {
	var v Options
	if o != nil {
		v = *o
	}
	rest := maps.Clone(c.Params)
	duration := func(name string, into *time.Duration) error {
		s, ok := rest[name]
		if !ok {
			return nil
		}
		d, err := time.ParseDuration(s)
		if err != nil || d <= 0 {
			return fmt.Errorf("%w: parameter %s=%q: want a positive duration such as 30s or 500ms", ErrInvalid, name, s)
		}
		*into = d
		return nil
	}
	if err := errors.Join(duration("ttl", &v.TTL), duration("timeout", &v.Timeout)); err != nil {
		return v, err
	}
	if s, ok := rest["prefix"]; ok {
		v.Prefix = s
	}
	if s, ok := rest["owner"]; ok {
		v.Owner = s
	}
	for _, name := range engineParams {
		delete(rest, name)
	}
	c.Params = rest
	return v.withDefaults()
}

// Open opens the driver that c names and returns a Client over it. What c
// says wins over o. The store is asked once, within Options.Timeout; a store
// that cannot be reached is an error. What is wrong with c itself is
// ErrInvalid, and so is a TTL above the longest term that the store grants.
func (c Config) Open(ctx context.Context, o *Options) (*Client, error) {
	d, opts, err := c.open(ctx, o)
	if err != nil {
		return nil, err
	}
	if longest := d.Traits().MaxTTL; longest > 0 && opts.TTL > longest {
		d.Close()
		return nil, fmt.Errorf("hasp: open %s: %w: ttl %v is above %v, the longest term that this store grants", c.Strategy, ErrInvalid, opts.TTL, longest)
	}
	return newClient(d, opts), nil
}

// Driver opens the driver that c names without a Client around it, for the
// conformance suite or for a wrapper to hand to New. The engine's parameters
// of c are checked and otherwise ignored.
func (c Config) Driver(ctx context.Context) (backend.Driver, error) {
	d, _, err := c.open(ctx, nil)
	return d, err
}

func (c Config) open(ctx context.Context, o *Options) (backend.Driver, Options, error) {
	opener, err := lookup(c.Strategy)
	if err != nil {
		return nil, Options{}, fmt.Errorf("hasp: open: %w", err)
	}
	opts, err := c.options(o)
	if err != nil {
		return nil, opts, fmt.Errorf("hasp: open %s: %w", c.Strategy, err)
	}
	ctx, cancel := context.WithTimeout(ctx, opts.Timeout)
	defer cancel()
	d, err := opener(ctx, c)
	if err != nil {
		return nil, opts, fmt.Errorf("hasp: open %s: %w", c.Strategy, err)
	}
	return d, opts, nil
}

// Open is [ParseURL] and [Config.Open]. The strategy's package must be
// imported:
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

// Opener opens a driver by configuration. Of c.Params it gets what is not the
// engine's; it refuses what it does not know ([Config.Check]) and asks the
// store once before ctx ends. Its errors name no password.
type Opener func(ctx context.Context, c Config) (backend.Driver, error)

var registry struct {
	sync.Mutex // guards openers
	openers    map[string]Opener
}

// Register makes a strategy known to Open under a name. Strategies call it in
// their init. It panics if o is nil or the name is taken.
func Register(strategy string, o Opener) {
	registry.Lock()
	defer registry.Unlock()
	if o == nil {
		panic("hasp: Register: opener of " + strategy + " is nil")
	}
	if _, taken := registry.openers[strategy]; taken {
		panic("hasp: Register: " + strategy + " called twice")
	}
	if registry.openers == nil {
		registry.openers = map[string]Opener{}
	}
	registry.openers[strategy] = o
}

// Strategies returns the names of the registered strategies, sorted.
func Strategies() []string {
	registry.Lock()
	defer registry.Unlock()
	return slices.Sorted(maps.Keys(registry.openers))
}

// own are the strategies that come with this module, by import path below it.
var own = []string{"fairlock", "filelock", "memlock", "pubsublock", "redlock", "spinlock"}

func lookup(strategy string) (Opener, error) {
	registry.Lock()
	o := registry.openers[strategy]
	registry.Unlock()
	if o != nil {
		return o, nil
	}
	registered := strings.Join(Strategies(), ", ")
	if registered == "" {
		registered = "none"
	}
	hint := "is the import of its package missing?"
	switch {
	case strategy == "unix", strings.HasPrefix(strategy, "redis"):
		hint = fmt.Sprintf("%s is a transport, which follows the strategy, as in spinlock+%[1]s://… (fairlock, pubsublock, redlock and spinlock take one)", strategy)
	case slices.Contains(own, strategy):
		hint = fmt.Sprintf("add: import _ %q", "github.com/hasplock/hasp/"+strategy)
	}
	if strings.ContainsAny(strategy, "@:/") { // a URL, perhaps, and then with a password
		return nil, fmt.Errorf("%w: the name of the strategy is none (registered: %s); a URL goes into nodes", ErrInvalid, registered)
	}
	return nil, fmt.Errorf("%w: unknown strategy %q (registered: %s); %s", ErrInvalid, strategy, registered, hint)
}
