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
// each topology, by names such as "fairlock on cluster", and the rights that are needed in addition
// in some cases.
func rules(t *testing.T) map[string][]string {
	text := await.Value(os.ReadFile("../../docs/redis.md"))
	_, tables, ok := strings.Cut(string(text), "\n## What the user must be allowed\n")
	if !ok {
		t.Fatal("docs/redis.md: no such heading")
	}

	all := map[string][]string{}
	for line := range strings.Lines(tables) {
		line = strings.ReplaceAll(strings.TrimSpace(line), `\|`, "\x00")
		cells := strings.Split(strings.Trim(line, "|"), "|")
		for i, c := range cells {
			cells[i] = strings.ReplaceAll(strings.Trim(c, " `"), "\x00", "|")
		}

		rights := strings.Fields(cells[len(cells)-1])
		switch len(cells) {
		case 2:
			all[cells[0]] = rights
		case 3:
			for on := range strings.SplitSeq(cells[1], ", ") {
				all[cells[0]+" on "+on] = rights
			}
		}
	}
	return all
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
				// The function work waits five times.
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

// worker makes calls on two Clients, and collects the errors.
type worker struct {
	ctx      context.Context
	one, two *hasp.Client
	wait     time.Duration // how long a Client waits for a key that the other holds
	errs     []error
}

func (w *worker) try(what string, err error) {
	if err != nil {
		w.errs = append(w.errs, fmt.Errorf("%s: %w", what, err))
	}
}

// with locks key by the first Client, and calls f with the lease, unless that fails.
func (w *worker) with(key string, f func(lease *hasp.Lease), opts ...hasp.Option) {
	lease, err := w.one.TryLock(w.ctx, key, append(opts, hasp.WithoutRenewal())...)
	w.try("lock "+key, err)
	if err == nil {
		f(lease)
	}
}

func (w *worker) unlock(lease *hasp.Lease) { w.try("unlock", lease.Unlock(w.ctx)) }

// waits lets the second Client wait for a key that is held. On a slow machine the server may not
// answer in time, so any error is right.
func (w *worker) waits(key string) {
	if _, err := w.two.Lock(w.ctx, key, hasp.WithMaxWait(w.wait)); err == nil {
		w.try("wait", errors.New("two hold it"))
	}
}

// changes prolongs a lease, and inspects its key by the second Client.
func (w *worker) changes(lease *hasp.Lease) {
	w.try("extend", lease.Extend(w.ctx, time.Hour))
	_, err := w.two.Inspect(w.ctx, lease.Key())
	w.try("inspect", err)
}

// handsOver releases a lease while the second Client waits for its key.
func (w *worker) handsOver(lease *hasp.Lease) {
	w.waits(lease.Key())
	waited := make(chan error)
	go func() {
		next, err := w.two.Lock(w.ctx, lease.Key())
		if err == nil {
			err = next.Unlock(w.ctx)
		}
		waited <- err
	}()
	time.Sleep(w.wait)
	w.unlock(lease)
	w.try("wait", <-waited)
}

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

	w := &worker{ctx: ctx, one: one, two: two, wait: wait}
	w.with(name+"renewed", func(lease *hasp.Lease) {
		w.changes(lease)
		w.unlock(lease)
	})
	w.with(name+"wanted", w.handsOver)
	w.with(name+"broken", func(lease *hasp.Lease) {
		w.try("break", two.Break(ctx, lease.Key()))
		if err := lease.Unlock(ctx); !errors.Is(err, hasp.ErrLost) {
			w.try("unlock", fmt.Errorf("of a broken key: %w", err))
		}
	})
	w.with(name+"fenced", w.unlock, hasp.WithFence())
	w.with(name+"kept", func(lease *hasp.Lease) {
		w.unlock(lease)
		if _, err := two.TryLock(ctx, lease.Key()); !errors.Is(err, hasp.ErrHeld) {
			w.try("lock", fmt.Errorf("of a key that is kept: %v", err))
		}
	}, hasp.WithMinHold(30*time.Second))

	first, err := one.TryLock(ctx, name+"shared", hasp.WithShared(), hasp.WithoutRenewal())
	if err == nil {
		w.readers(first)
	} else if !errors.Is(err, errors.ErrUnsupported) {
		w.try("lock shared", err)
	}
	if lease, err := one.TryLock(ctx, moving+name); err == nil { // may be refused
		w.unlock(lease)
	}
	return errors.Join(w.errs...)
}

// readers makes every kind of call for shared holds.
func (w *worker) readers(first *hasp.Lease) {
	second, err := w.one.TryLock(w.ctx, first.Key(), hasp.WithShared(), hasp.WithFence(),
		hasp.WithoutRenewal())
	w.try("lock shared as well", err)
	w.changes(first)
	w.waits(first.Key())
	if second != nil {
		w.unlock(second)
	}
	w.handsOver(first)
}

// moving is a prefix of keys in a slot that the cluster is moving.
const moving = "{moving}"

func TestEveryStrategyNeedsWhatItsRulesSay(t *testing.T) {
	redistest.NeedSets(t)
	rules := rules(t)
	log := &redistest.Options{Args: []string{"--acllog-max-len", "10000"}}
	server := func(t *testing.T) *place {
		srv := redistest.Start(t, log)
		return &place{[]*redistest.Server{srv}, "redis://USER@" + srv.Addr + "/0", "", work}
	}
	ofSet := func(servers []*redistest.Server, url, params string) *place {
		return &place{servers, strings.Replace(url, "://", "://USER@", 1), params, work}
	}

	for name, trial := range map[string]struct {
		start      func(t *testing.T) *place
		strategies []string
		on         string   // the rights of the strategy on this topology are needed
		besides    []string // the names of rights that are needed in addition
	}{
		"server": {server, onRedis(), "server", nil},
		"sentinel": {func(t *testing.T) *place {
			set := redistest.StartSentinel(t, log)
			return ofSet(set.Servers, set.URL(), "&replicas=1")
		}, onRedis(), "sentinel", []string{"sentinel", "replicas"}},
		"cluster": {func(t *testing.T) *place {
			set := redistest.StartCluster(t, log)
			set.Move(moving)
			return ofSet(set.Servers, set.URL(), "&replicas=1")
		}, onRedis(), "cluster", []string{"cluster", "replicas"}},
		"each node": {func(t *testing.T) *place {
			nodes := redistest.StartNodes(t, 3, log)
			return ofSet(nodes.Servers, nodes.URL(), "&max_ttl=2h")
		}, []string{"redlock"}, "each node", nil},
		"list": {func(t *testing.T) *place {
			p := server(t)
			p.use = lists
			return p
		}, onRedis(), "server", []string{"hasp ls, hasp ui and Client.List"}},
		"database": {func(t *testing.T) *place {
			p := server(t)
			p.url = strings.TrimSuffix(p.url, "0") + "1"
			return p
		}, []string{"spinlock"}, "server", []string{"a database other than 0"}},
		"sentinels": {func(t *testing.T) *place {
			set := redistest.StartSentinel(t, nil)
			params := "&sentinel_user=NAME&sentinel_password=secret"
			return &place{set.Sentinels, set.URL(), params, work}
		}, []string{"spinlock"}, "", []string{"the sentinels, for `sentinel_user"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := trial.start(t)
			for _, strategy := range trial.strategies {
				all := slices.Clone(rules[strategy+" on "+trial.on])
				if all == nil && trial.on != "" {
					t.Fatalf("docs/redis.md has no rules for %s on %s", strategy, trial.on)
				}
				for _, name := range trial.besides {
					all = append(all, rules[name]...)
				}

				// Other topologies drop only the rights that the trial of a single server does not.
				drop := slices.DeleteFunc(slices.Clone(all), func(rule string) bool {
					return name != "server" && slices.Contains(rules[strategy+" on server"], rule)
				})
				t.Run(strategy, func(t *testing.T) {
					t.Parallel()
					p.needs(t, strategy, all, drop)
				})
			}
		})
	}
}
