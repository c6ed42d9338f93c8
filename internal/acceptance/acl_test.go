package acceptance

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redistest"
)

// rules returns the rows of two tables in docs/redis.md: the rights that each strategy needs on
// each topology, and the rights that are needed in addition in some cases.
func rules(t *testing.T) (strategies map[string]map[string][]string, besides map[string][]string) {
	text := await.Value(os.ReadFile("../../docs/redis.md"))
	strategies = map[string]map[string][]string{}
	besides = map[string][]string{}
	_, tables, ok := strings.Cut(string(text), "\n## What the user must be allowed\n")
	if !ok {
		t.Fatal("docs/redis.md: no such heading")
	}
	for line := range strings.Lines(tables) {
		line = strings.ReplaceAll(strings.TrimSpace(line), `\|`, "\x00")
		cells := strings.Split(strings.Trim(line, "|"), "|")
		for i, c := range cells {
			cells[i] = strings.ReplaceAll(strings.Trim(c, " `"), "\x00", "|")
		}
		switch {
		case !strings.Contains(line, "`"):
		case len(cells) == 2:
			besides[cells[0]] = strings.Fields(cells[1])
		case len(cells) == 3:
			for on := range strings.SplitSeq(cells[1], ", ") {
				if strategies[cells[0]] == nil {
					strategies[cells[0]] = map[string][]string{}
				}
				strategies[cells[0]][on] = strings.Fields(cells[2])
			}
		}
	}
	return strategies, besides
}

// place is a Redis for tests with users that have few rights.
type place struct {
	servers []*redistest.Server // the servers on which user creates users
	url     string              // has USER in the place of user and password
	params  string
	use     func(ctx context.Context, url, name string, wait time.Duration) error
}

func (p *place) user(t *testing.T, rules []string) (name string) {
	name = fmt.Sprint("user", names.Add(1))
	for _, srv := range p.servers {
		args := []any{"acl", "setuser", name, "reset", "on", ">secret"}
		for _, r := range rules {
			args = append(args, r)
		}
		if err := srv.Client().Do(t.Context(), args...).Err(); err != nil {
			t.Fatalf("%q: %v", rules, err)
		}
	}
	return name
}

// refused lists the commands that the servers have refused to a user. It leaves out unsubscribe,
// which is recommended but not in the rules. A driver unsubscribes only in a test that takes
// seconds, as on a busy machine.
func (p *place) refused(t *testing.T, name string) (all []string) {
	for _, srv := range p.servers {
		entries := await.Value(srv.Client().ACLLog(t.Context(), 10000).Result())
		for _, e := range entries {
			if e.Username == name && !strings.HasSuffix(e.Object, "unsubscribe") {
				all = append(all, e.Reason+" "+e.Object)
			}
		}
	}
	return all
}

// needs uses a strategy as a user with exactly these rules, which must suffice. For each rule in
// drop, it also uses the strategy as a user without that rule, which must fail.
func (p *place) needs(t *testing.T, strategy string, rules, drop []string) {
	use := func(ctx context.Context, name, more string, wait time.Duration) error {
		u := strategy + "+" + p.url + "?prefix=app:" + p.params + more
		return p.use(ctx, strings.NewReplacer("USER", name+":secret", "NAME", name).Replace(u),
			name, wait)
	}
	t.Run("all", func(t *testing.T) {
		t.Parallel()
		name := p.user(t, rules)
		if err := use(t.Context(), name, "&timeout=20s", 200*time.Millisecond); err != nil {
			t.Error(err)
		}
		if all := p.refused(t, name); len(all) > 0 {
			t.Errorf("refused: %q", all)
		}
	})
	for _, rule := range drop {
		t.Run("without "+rule, func(t *testing.T) {
			t.Parallel()
			// On a slow machine, the command that must be refused may come only after a longer
			// wait.
			for wait := 50 * time.Millisecond; ; wait *= 4 {
				name := p.user(t, slices.DeleteFunc(slices.Clone(rules), func(r string) bool {
					return r == rule
				}))
				// The function work waits four times.
				ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond+6*wait)
				err := use(ctx, name, "", wait)
				cancel()
				if all := p.refused(t, name); len(all) > 0 {
					t.Logf("refused: %q: %v", all, err)
					return
				}
				if wait > 10*time.Second {
					t.Fatalf("not missed: %v", err)
				}
			}
		})
	}
}

var names atomic.Int64

// work is the use of a place that makes every kind of call. If a call fails, work leaves out the
// calls that need it.
func work(ctx context.Context, url, name string, wait time.Duration) error {
	one, err := hasp.Open(ctx, url, nil)
	if err != nil {
		return err
	}
	defer one.Close()
	two, err := hasp.Open(ctx, url, nil)
	if err != nil {
		return err
	}
	defer two.Close()
	var errs []error
	try := func(what string, err error) {
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", what, err))
		}
	}
	with := func(key string, f func(key string, lease *hasp.Lease), opts ...hasp.Option) {
		key = name + key
		lease, err := one.TryLock(ctx, key, append(opts, hasp.WithoutRenewal())...)
		try("lock", err)
		if err == nil {
			f(key, lease)
		}
	}
	with("renewed", func(key string, lease *hasp.Lease) {
		try("extend", lease.Extend(ctx, time.Hour))
		_, err := two.Inspect(ctx, key)
		try("inspect", err)
		try("unlock", lease.Unlock(ctx))
	})
	with("wanted", func(key string, lease *hasp.Lease) {
		if _, err := two.Lock(ctx, key, hasp.WithMaxWait(wait)); err == nil {
			try("wait", errors.New("two hold it"))
		}
		handsOver(ctx, lease, two, wait, try)
	})
	with("broken", func(key string, lease *hasp.Lease) {
		try("break", two.Break(ctx, key))
		if err := lease.Unlock(ctx); !errors.Is(err, hasp.ErrLost) {
			try("unlock", fmt.Errorf("of a broken key: %w", err))
		}
	})
	with("fenced", func(key string, lease *hasp.Lease) {
		try("unlock", lease.Unlock(ctx))
	}, hasp.WithFence())
	with("kept", func(key string, lease *hasp.Lease) {
		try("unlock", lease.Unlock(ctx))
		if _, err := two.TryLock(ctx, key); !errors.Is(err, hasp.ErrHeld) {
			try("lock", fmt.Errorf("of a key that is kept: %v", err))
		}
	}, hasp.WithMinHold(30*time.Second))
	readers(ctx, one, two, name+"shared", wait, try)
	if lease, err := one.TryLock(ctx, moving+name); err == nil { // may be refused
		try("unlock", lease.Unlock(ctx))
	}
	return errors.Join(errs...)
}

// readers makes every kind of call for shared holds, if the strategy has them.
func readers(
	ctx context.Context, one, two *hasp.Client, key string, wait time.Duration,
	try func(what string, err error),
) {
	first, err := one.TryLock(ctx, key, hasp.WithShared(), hasp.WithoutRenewal())
	if errors.Is(err, errors.ErrUnsupported) {
		return
	}
	try("lock shared", err)
	if err != nil {
		return
	}
	second, err := two.TryLock(ctx, key, hasp.WithShared(), hasp.WithFence(), hasp.WithoutRenewal())
	try("lock shared as well", err)
	try("extend", first.Extend(ctx, time.Hour))
	_, err = two.Inspect(ctx, key)
	try("inspect", err)
	if _, err := one.Lock(ctx, key, hasp.WithMaxWait(wait)); err == nil {
		try("wait for readers", errors.New("a writer beside readers"))
	}
	if second != nil {
		try("unlock", second.Unlock(ctx))
	}
	handsOver(ctx, first, two, wait, try)
}

// handsOver releases a lease while another Client waits for its key.
func handsOver(
	ctx context.Context, lease *hasp.Lease, other *hasp.Client, wait time.Duration,
	try func(what string, err error),
) {
	waited := make(chan error)
	go func() {
		lease, err := other.Lock(ctx, lease.Key())
		if err == nil {
			err = lease.Unlock(ctx)
		}
		waited <- err
	}()
	time.Sleep(wait)
	try("unlock", lease.Unlock(ctx))
	try("wait", <-waited)
}

// moving is a prefix of keys in a slot that the cluster is moving.
const moving = "{moving}"

// look is the use of a place that only opens the strategy. The strategy then asks the sentinels for
// the master.
func look(ctx context.Context, url, _ string, _ time.Duration) error {
	c, err := hasp.Open(ctx, url, nil)
	if err != nil {
		return err
	}
	return c.Close()
}

func TestEveryStrategyNeedsWhatItsRulesSay(t *testing.T) {
	redistest.NeedSets(t)
	strategies, besides := rules(t)
	log := &redistest.Options{Args: []string{"--acllog-max-len", "10000"}}
	places := map[string]func(t *testing.T) *place{
		"server": func(t *testing.T) *place {
			srv := redistest.Start(t, log)
			return &place{[]*redistest.Server{srv}, "redis://USER@" + srv.Addr + "/0", "", work}
		},
		"sentinel": func(t *testing.T) *place {
			set := redistest.StartSentinel(t, log)
			return &place{set.Servers, strings.Replace(set.URL(), "://", "://USER@", 1),
				"&replicas=1", work}
		},
		"cluster": func(t *testing.T) *place {
			set := redistest.StartCluster(t, log)
			set.Move(moving)
			return &place{set.Servers, strings.Replace(set.URL(), "://", "://USER@", 1),
				"&replicas=1", work}
		},
	}
	for on, start := range places {
		t.Run(on, func(t *testing.T) {
			t.Parallel()
			p := start(t)
			for _, strategy := range onRedis() {
				t.Run(strategy, func(t *testing.T) {
					t.Parallel()
					own := strategies[strategy][on]
					if own == nil {
						t.Fatalf("docs/redis.md has no rules for %s on %s", strategy, on)
					}
					more := besides[on]
					if on != "server" {
						more = append(slices.Clone(more), besides["replicas"]...)
					}
					all := append(slices.Clone(own), more...)
					drop := more
					if !slices.Equal(own, strategies[strategy]["sentinel"]) || on == "server" {
						drop = all
					}
					p.needs(t, strategy, all, drop)
				})
			}
		})
	}
	t.Run("each node", func(t *testing.T) {
		t.Parallel()
		nodes := redistest.StartNodes(t, 3, log)
		p := &place{nodes.Servers, strings.Replace(nodes.URL(), "://", "://USER@", 1),
			"&max_ttl=2h", work}
		own := strategies["redlock"]["each node"]
		if own == nil {
			t.Fatal("docs/redis.md has no rules for redlock on each node")
		}
		p.needs(t, "redlock", own, own)
	})
	t.Run("list", func(t *testing.T) {
		t.Parallel()
		p := places["server"](t)
		p.use = lists
		more := besides["hasp ls, hasp ui and Client.List"]
		for _, strategy := range onRedis() {
			t.Run(strategy, func(t *testing.T) {
				p.needs(t, strategy, append(slices.Clone(strategies[strategy]["server"]), more...),
					more)
			})
		}
	})
	t.Run("database", func(t *testing.T) {
		t.Parallel()
		p := places["server"](t)
		p.url = strings.TrimSuffix(p.url, "0") + "1"
		more := besides["a database other than 0"]
		p.needs(t, "spinlock", append(slices.Clone(strategies["spinlock"]["server"]), more...),
			more)
	})
	t.Run("sentinels", func(t *testing.T) {
		t.Parallel()
		set := redistest.StartSentinel(t, nil)
		p := &place{set.Sentinels, set.URL(), "&sentinel_user=NAME&sentinel_password=secret", look}
		more := besides["the sentinels, for `sentinel_user"]
		p.needs(t, "spinlock", more, more)
	})
}
