// Command outage measures how long calls fail when a Redis fails over, moves a slot, or does not
// answer. Run it in the directory lab, for two minutes, or for the faults whose names match:
//
//	go run ./outage [-only REGEXP]
//
// For each fault it starts servers, and opens two Clients of spinlock: one by URL, and one over a
// client of go-redis with its defaults, which is passed to spinlock.New. Both meet the fault at the
// same time. Each makes 200 calls a second: Lock and Unlock of a new key, with a context of 2 s.
// The fault begins after a second of calls, and calls begin until 5 s after its end. The columns:
//
//   - outage: how long the fault lasted. A failover ends when all servers name the new master.
//   - calls: how many calls began.
//   - failed: how many of them returned an error, from Lock or from Unlock.
//   - first to last: the time from the begin of the first failed call to the begin of the last one.
//   - longest: how long the longest call took, Lock and Unlock together, whether it failed or not.
//   - lease: whether a lease of 3 s, which was held and renewed meanwhile, was lost.
//   - error: of the call that failed last.
//
// All keys of a cluster are in one slot. The servers of a set call a master down after 1 s. The
// first fault is none, and shows what the machine does. Compare only runs on the same machine.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"regexp"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/spinlock"
)

const (
	every = 5 * time.Millisecond // the time between two calls
	calm  = time.Second          // how long calls begin before the fault
	after = 5 * time.Second      // how long calls begin after the fault
	brief = time.Second          // how long a server stops, or a slot is between two masters
	limit = 2 * time.Second      // of a call
	term  = 3 * time.Second      // of the lease that is held

	tag = "{outage}" // all keys begin with it
)

// place is one server, a master with sentinels, or a cluster, and the ways to it.
type place struct {
	*redistest.Lab
	url string
	rdb redis.UniversalClient

	server   *redistest.Server
	proxy    *faultproxy.Proxy // to the server
	sentinel *redistest.Sentinel
	cluster  *redistest.Cluster

	master func() *redistest.Server
	voters []*redistest.Server // they replace a master that is down
	soon   []any               // the command that makes them do so after a second
}

func onServer(p *place) {
	p.server = redistest.Start(p, &redistest.Options{Real: true})
	p.proxy = p.server.Proxy()
	p.url = "redis://" + p.proxy.Addr()
	p.rdb = redis.NewClient(&redis.Options{Addr: p.proxy.Addr()})
}

func onSentinel(p *place) {
	s := redistest.StartSentinel(p, nil)
	p.sentinel, p.url, p.master, p.voters = s, s.URL(), s.Master, s.Sentinels
	p.soon = []any{"sentinel", "set", s.Name, "down-after-milliseconds", "1000"}
	p.rdb = redis.NewFailoverClient(&redis.FailoverOptions{
		MasterName: s.Name, SentinelAddrs: addrs(s.Sentinels)})
}

func onCluster(p *place) {
	c := redistest.StartCluster(p, nil)
	p.cluster, p.url, p.voters = c, c.URL(), c.Servers
	p.master = func() *redistest.Server { return c.Master(tag) }
	p.soon = []any{"config", "set", "cluster-node-timeout", "1000"}
	p.rdb = redis.NewClusterClient(&redis.ClusterOptions{Addrs: addrs(c.Servers)})
}

func addrs(servers []*redistest.Server) (all []string) {
	for _, s := range servers {
		all = append(all, s.Addr)
	}
	return all
}

// fault is what happens to a place.
type fault struct {
	name   string
	start  func(*place)
	strike func(*place)
}

var faults = []fault{
	{"none", onServer, func(*place) {}},
	{"CLIENT KILL", onServer, func(p *place) {
		p.command(p.server, "client", "kill", "type", "normal")
	}},
	{"CLIENT PAUSE", onServer, func(p *place) {
		p.command(p.server, "client", "pause", brief.Milliseconds())
	}},
	{"SIGSTOP", onServer, func(p *place) {
		p.server.Pause()
		time.Sleep(brief)
		p.server.Resume()
	}},
	{"connections die in silence", onServer, func(p *place) { p.proxy.Forget() }},
	{"Sentinel: planned failover", onSentinel, func(p *place) { p.sentinel.Failover() }},
	{"Sentinel: master killed", onSentinel, replaced((*redistest.Server).Kill)},
	{"Sentinel: master hangs", onSentinel, replaced((*redistest.Server).Pause)},
	{"Cluster: planned failover", onCluster, func(p *place) { p.cluster.Failover(tag) }},
	{"Cluster: master killed", onCluster, replaced((*redistest.Server).Kill)},
	{"Cluster: master hangs", onCluster, replaced((*redistest.Server).Pause)},
	{"Cluster: slot moves", onCluster, func(p *place) {
		finish := p.cluster.Move(tag)
		time.Sleep(brief)
		finish()
	}},
}

func (p *place) command(s *redistest.Server, args ...any) {
	p.Check(s.Client().Do(context.Background(), args...).Err())
}

// replaced returns a fault that ends a master. The fault lasts until there is another one.
func replaced(end func(*redistest.Server)) func(*place) {
	return func(p *place) {
		for _, s := range p.voters {
			p.command(s, p.soon...)
		}
		old := p.master()
		end(old)
		for p.master() == old {
			time.Sleep(10 * time.Millisecond)
		}
	}
}

func main() {
	names := regexp.MustCompile("")
	flag.Func("only", "regular expression of the `names` of faults", func(text string) (err error) {
		names, err = regexp.Compile(text)
		return err
	})
	flag.Parse()
	logging.Disable() // go-redis logs servers that are down

	fmt.Println("| fault | way in | outage | calls | failed | first to last | longest | lease | error |")
	fmt.Println("|---|---|--:|--:|--:|--:|--:|---|---|")
	for _, f := range faults {
		if !names.MatchString(f.name) {
			continue
		}
		p := &place{Lab: &redistest.Lab{}}
		err := p.Do(func() error { return f.measure(p) })
		p.Close()
		if err != nil {
			fmt.Fprintln(os.Stderr, "outage:", err)
			os.Exit(1)
		}
	}
}

// measure starts servers, lets them fail, and prints a row for each way in.
func (f fault) measure(p *place) error {
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	f.start(p)
	defer p.rdb.Close()
	opened, err := hasp.Open(ctx, "spinlock+"+p.url, nil)
	p.Check(err)
	passed, err := spinlock.New(p.rdb, nil)
	p.Check(err)

	ways := []*way{{name: "URL", c: opened}, {name: "client", c: passed}}
	var loads sync.WaitGroup
	for _, w := range ways {
		defer w.c.Close()
		w.lease, err = w.c.Lock(context.Background(), tag+w.name, hasp.WithTTL(term))
		p.Check(err)
		loads.Go(func() { w.load(ctx) })
	}
	time.Sleep(calm)
	began := time.Now()
	f.strike(p)
	outage := time.Since(began)
	time.Sleep(after)
	stop()
	loads.Wait()

	for _, w := range ways {
		lease := "held"
		if w.lease.Err() != nil {
			lease = "lost"
		}
		fmt.Printf("| %s | %s | %d ms | %d | %d | %d ms | %d ms | %s | %v |\n", f.name, w.name,
			outage.Milliseconds(), w.calls, w.failed, w.last.Sub(w.first).Milliseconds(),
			w.longest.Milliseconds(), lease, w.err)
	}
	return nil
}

// way is a way to a Redis, and what its calls have met.
type way struct {
	name  string
	c     *hasp.Client
	lease *hasp.Lease
	calls int

	mu          sync.Mutex // guards the fields below
	failed      int
	first, last time.Time // when the first failed call began, and the last one
	longest     time.Duration
	err         error
}

// load makes calls until ctx ends, and waits for them.
func (w *way) load(ctx context.Context) {
	var calls sync.WaitGroup
	for tick := time.NewTicker(every); ctx.Err() == nil; <-tick.C {
		w.calls++
		key := fmt.Sprint(tag, w.name, w.calls)
		calls.Go(func() {
			began := time.Now()
			w.note(began, w.call(key))
		})
	}
	calls.Wait()
}

func (w *way) call(key string) error {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	lease, err := w.c.Lock(ctx, key)
	if err != nil {
		return err
	}
	return lease.Unlock(ctx)
}

func (w *way) note(began time.Time, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.longest = max(w.longest, time.Since(began))
	if err == nil {
		return
	}
	w.failed++
	w.err = err
	if w.first.IsZero() || began.Before(w.first) {
		w.first = began
	}
	if began.After(w.last) {
		w.last = began
	}
}
