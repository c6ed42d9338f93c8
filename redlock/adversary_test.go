package redlock

import (
	"context"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/faultproxy"
	"github.com/hasplock/hasp/internal/redistest"
)

const adversaryTTL = time.Second // and max_ttl

// An adversary destroys the data, the servers and the connections of nodes while
// clients use them. It never destroys the data of a second node within one
// max_ttl, because redlock does not promise to survive that.
type adversary struct {
	t     *testing.T
	rnd   *rand.Rand
	o     Options
	nodes []*prey
	duels []*duel

	mu                sync.Mutex // guards all below
	switched, stopped time.Time  // of this round's failover; zero if there is none, or not yet
}

// overlap returns how long two servers have answered at one address in this round.
func (a *adversary) overlap() time.Duration {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case a.switched.IsZero():
		return 0
	case a.stopped.IsZero():
		return time.Since(a.switched)
	}
	return a.stopped.Sub(a.switched)
}

// failover makes the address of p lead to its other server. Connections to the old
// server continue for a moment. The channel is closed when the old server has stopped.
func (a *adversary) failover(p *prey) (ended chan struct{}) {
	ended = make(chan struct{})
	old := p.server
	a.mu.Lock()
	a.switched, a.stopped = time.Now(), time.Time{}
	a.mu.Unlock()
	p.addr.Store(p.other.Addr)
	p.server, p.other = p.other, old
	time.AfterFunc(time.Duration(a.rnd.IntN(300))*time.Millisecond, func() {
		defer close(ended)
		a.must(old.Stop())
		a.mu.Lock()
		defer a.mu.Unlock()
		a.stopped = time.Now()
	})
	return ended
}

// prey is one node: the server that its address leads to, and a server that may take
// its place, or nil.
type prey struct {
	server, other *redistest.Server
	addr          atomic.Value // where new connections lead
}

func (p *prey) dial() (net.Conn, error) { return net.Dial("tcp", p.addr.Load().(string)) }

// duel is two clients that want one key. Each has links of its own to the nodes.
type duel struct {
	a       *adversary
	key     string
	rnd     *rand.Rand
	drivers [2]*Driver
	links   [2][]*faultproxy.Proxy

	mu     sync.Mutex // guards all below
	holder string     // the token of the last hold
	until  time.Time  // when its holder stops to trust it
	fence  uint64
	grants int
}

// acquire takes the key for one of the two clients, if it is free. It fails the
// test if the other client may still trust its hold, or if the other's fence was
// not smaller.
func (u *duel) acquire(who int) (c backend.Claim, ok bool) {
	c = aFenced(u.key)
	c.TTL, c.Timeout = adversaryTTL, 300*time.Millisecond
	ctx, cancel := context.WithTimeout(context.Background(), c.Timeout)
	defer cancel()
	began := time.Now()
	g, err := u.drivers[who].Acquire(ctx, c)
	u.mu.Lock()
	defer u.mu.Unlock()
	now, until := time.Now(), began.Add(c.TTL-backend.Drift(c.TTL))
	if err != nil || !now.Before(until) {
		return c, false
	}
	// A server that took over cannot know what the old server grants or renews after
	// its own wait has begun. docs/redlock.md names this case.
	if now.Before(u.until.Add(-u.a.overlap())) {
		u.a.t.Errorf("%s: %s is granted the key while %s holds it for another %v", u.key, c.Token, u.holder, u.until.Sub(now))
	}
	if g.Fence <= u.fence {
		u.a.t.Errorf("%s: %s has fence %d after %s had %d", u.key, c.Token, g.Fence, u.holder, u.fence)
	}
	u.holder, u.until, u.fence = c.Token, until, g.Fence
	u.grants++
	return c, true
}

// renew renews the hold, and reports whether the hold still lasts.
func (u *duel) renew(who int, c backend.Claim) bool {
	began := time.Now()
	err := renewOne(u.drivers[who], c, c.Timeout)
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.holder != c.Token || !time.Now().Before(u.until) {
		return false
	}
	if err == nil {
		u.until = began.Add(c.TTL - backend.Drift(c.TTL))
	}
	return true
}

func (u *duel) release(who int, c backend.Claim) {
	u.mu.Lock()
	if u.holder == c.Token {
		u.until = time.Time{}
	}
	u.mu.Unlock()
	_ = u.drivers[who].Release(context.Background(), c)
}

// round is one contest: one client holds the key without the vote of node z. Then node y
// loses its data, and the other client asks for the key without reaching node x.
func (u *duel) round(y int, attacked <-chan struct{}, holding *sync.WaitGroup) {
	first := u.rnd.IntN(2)
	second := 1 - first
	x := (y + 1 + u.rnd.IntN(2)) % 3
	z := 3 - x - y
	u.spoil(first, z)
	if u.rnd.IntN(3) == 0 {
		// A fence, a vote or their replies are lost or late on a node that counts.
		match := []string{"fence:" + u.key + " " + u.key, "mark "}[u.rnd.IntN(2)]
		fault := []faultproxy.Fault{faultproxy.LoseReply, faultproxy.LoseRequest, faultproxy.HoldRequest}[u.rnd.IntN(3)]
		l := u.links[first][[]int{x, y}[u.rnd.IntN(2)]]
		l.Fail(match, fault)
		time.AfterFunc(time.Duration(u.rnd.IntN(250))*time.Millisecond, l.Release)
	}
	var c backend.Claim
	held := false
	for range 4 {
		if c, held = u.acquire(first); held {
			break
		}
	}
	holding.Done()
	<-attacked

	done := make(chan struct{})
	renewals, heals := u.rnd.IntN(5), u.rnd.IntN(2) == 0
	go func() {
		defer close(done)
		for i := 0; i < renewals && held; i++ {
			time.Sleep(c.TTL / 4)
			if held = u.renew(first, c); i == 0 && heals {
				u.heal(first)
			}
		}
		u.release(first, c)
	}()
	if renewals == 0 && held {
		<-done // and the second comes after it
	}
	u.spoil(second, x)
	for end := time.Now().Add(adversaryTTL * 3 / 2); time.Now().Before(end); {
		if c, ok := u.acquire(second); ok {
			u.release(second, c)
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
	<-done
	u.heal(first)
	u.heal(second)
}

// spoil makes a link fail in some way.
func (u *duel) spoil(who, node int) {
	l := u.links[who][node]
	switch u.rnd.IntN(3) {
	case 0:
		l.Down()
	case 1:
		l.StallReplies()
	case 2:
		l.StallRequests()
	}
}

func (u *duel) heal(who int) {
	for _, l := range u.links[who] {
		l.Forgive()
		l.Release()
		l.Flow()
		l.Up()
	}
}

// round makes all clients compete for the key while one node loses its data.
func (a *adversary) round() {
	y := a.rnd.IntN(len(a.nodes))
	p := a.nodes[y]
	promote := p.other != nil && a.rnd.IntN(2) == 0
	if promote {
		a.copy(p) // the replica lacks what comes now
	}
	a.mu.Lock()
	a.switched = time.Time{}
	a.mu.Unlock()
	attacked := make(chan struct{})
	var holding, all sync.WaitGroup
	for _, u := range a.duels {
		holding.Add(1)
		all.Go(func() { u.round(y, attacked, &holding) })
	}
	holding.Wait()
	lost := time.Now()
	if promote {
		ended := a.failover(p)
		close(attacked)
		all.Wait()
		<-ended
		a.must(p.other.Start(false))
	} else {
		a.must(p.server.Stop())
		a.must(p.server.Start(a.o.Durable || a.rnd.IntN(2) == 0))
		close(attacked)
		all.Wait()
	}

	// The next loss is a max_ttl after the node was given its new mark.
	a.asked(y, lost)
	time.Sleep(a.o.MaxTTL + 100*time.Millisecond)
}

// asked makes a client ask the node until the node has a mark from after lost.
func (a *adversary) asked(y int, lost time.Time) {
	u := a.duels[0]
	for end := time.Now().Add(2 * time.Minute); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if c, ok := u.acquire(0); ok {
			u.release(0, c)
		}
		if s := u.drivers[0].nodes[y].marks.current.Load(); s != nil && s.asked.After(lost) {
			return
		}
	}
	a.t.Fatalf("node %d has not been asked", y)
}

// copy copies all data to the other server of p.
func (a *adversary) copy(p *prey) {
	ctx := context.Background()
	host, port, _ := net.SplitHostPort(p.server.Addr)
	replica := p.other.Client()
	a.must(replica.Do(ctx, "replicaof", host, port).Err())
	for !strings.Contains(replica.Info(ctx, "replication").Val(), "master_link_status:up") {
		time.Sleep(5 * time.Millisecond)
	}
	a.must(replica.Do(ctx, "replicaof", "no", "one").Err())
}

func (a *adversary) must(err error) {
	if err != nil {
		a.t.Errorf("the adversary: %v", err)
	}
}

// add adds two clients that compete for a key of their own.
func (a *adversary) add(key string, seed uint64) {
	u := &duel{a: a, key: key, rnd: rand.New(rand.NewPCG(seed, 2))}
	for who := range u.drivers {
		var clients []redis.UniversalClient
		for _, p := range a.nodes {
			l, err := faultproxy.Listen(p.dial)
			if err != nil {
				a.t.Fatal(err)
			}
			a.t.Cleanup(l.Close)
			o := p.server.ClientOptions()
			o.Addr, o.ContextTimeoutEnabled, o.MaxRetries, o.PoolFIFO = l.Addr(), true, -1, true
			rdb := redis.NewClient(o)
			a.t.Cleanup(func() { rdb.Close() })
			u.links[who], clients = append(u.links[who], l), append(clients, rdb)
		}
		u.drivers[who] = New(clients, &a.o)
		a.t.Cleanup(func() { u.drivers[who].Close() })
	}
	a.duels = append(a.duels, u)
}

// Whatever the adversary does, there is one holder at a time, and fences grow.
// HASP_ADVERSARY=1m lasts longer, and HASP_ADVERSARY_SEED repeats a run.
func TestNoAdversaryMakesASecondHolder(t *testing.T) {
	lasts := 5 * time.Second
	if text := os.Getenv("HASP_ADVERSARY"); text != "" {
		var err error
		if lasts, err = time.ParseDuration(text); err != nil {
			t.Fatal(err)
		}
	}
	for name, c := range map[string]struct {
		durable, clocks bool // with clocks that differ, counters alone decide
	}{
		"data is lost":                  {false, false},
		"data is kept":                  {true, false},
		"data is kept, clocks disagree": {true, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			seed := rand.Uint64()
			if text := os.Getenv("HASP_ADVERSARY_SEED"); text != "" {
				seed, _ = strconv.ParseUint(text, 10, 64)
			}
			t.Logf("seed %d", seed)
			a := &adversary{t: t, rnd: rand.New(rand.NewPCG(seed, 1)), o: Options{MaxTTL: adversaryTTL, Durable: c.durable}}
			o := &redistest.Options{Own: true, Real: true, Keep: true, Clock: c.clocks}
			for i := range 3 {
				p := &prey{server: redistest.Start(t, o)}
				if c.clocks {
					a.must(p.server.Skew(time.Duration(i) * time.Hour))
				} else {
					p.other = redistest.Start(t, o)
				}
				p.addr.Store(p.server.Addr)
				a.nodes = append(a.nodes, p)
			}
			for i := range 6 {
				a.add("k"+strconv.Itoa(i), seed+uint64(i))
			}
			// All nodes are used before the first fault. If one node of
			// a set was never used, and another one is emptied, the set looks new.
			for y := range a.nodes {
				a.asked(y, time.Time{})
			}
			for end := time.Now().Add(lasts); time.Now().Before(end); {
				a.round()
			}
			grants := 0
			for _, u := range a.duels {
				grants += u.grants
			}
			t.Logf("%d grants", grants)
			if grants == 0 {
				t.Error("nobody was ever granted a key")
			}
		})
	}
}
