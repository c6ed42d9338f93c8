package rig

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/hostclock"
	"github.com/hasplock/hasp/internal/torture/hosts"
)

// keeper is a Client that keeps some leases, and locks one more key again and again.
type keeper struct {
	c      *hasp.Client
	leases *hasp.Leases
	lock   string       // the key that it locks again and again
	holds  atomic.Int32 // of that key
}

// majority cuts one server of an etcd or the like off from the others. These are a majority,
// and healthy. So the Clients whose server it was must find another one: no lease is lost,
// and every Client gets keys.
func (r *run) majority(ctx context.Context) {
	if r.store.apart == nil || r.store.other == nil || r.store.size() < leastNodes || r.store.other.Leader == nil {
		return
	}
	a, n := r.store.apart, &nemesis{run: r, rand: rand.New(rand.NewPCG(r.seed, 0))}
	for _, c := range []struct {
		what   string
		choose chosen
		own    []*hosts.Host // the server is cut off from these as well
	}{
		{"a server that does not lead was cut off from the others, not from the clients", following, nil},
		{"the leader was cut off from the others, not from the clients", leading, nil},
		{"the leader was cut off from everybody", leading, []*hosts.Host{a.Own()}},
	} {
		some, others := c.choose(n)
		if some != nil {
			r.outvoted(ctx, c.what, some, others, c.own)
			r.store.ready()
		}
	}
}

// following chooses a server that does not lead.
func following(n *nemesis) (some, others []*hosts.Host) {
	leader, rest := leading(n)
	if leader == nil {
		return nil, nil
	}
	return rest[:1], slices.Concat(leader, rest[1:])
}

// outvoted runs Clients while a server is cut off. A witness knows only the other servers. If
// the witness fails as well, the store is not healthy, or the machine too slow, and the
// Clients need not succeed.
func (r *run) outvoted(ctx context.Context, what string, some, others, own []*hosts.Host) {
	const clients, terms = 6, 3
	term := terms * r.term // an election takes a part of it
	var all []*keeper
	for i := range clients {
		all = append(all, r.keeper(ctx, r.store.urls[0], i, term))
	}
	var addrs []string
	for i, h := range r.store.apart.servers {
		if h != some[0] {
			addrs = append(addrs, r.store.other.Servers[i])
		}
	}
	witness := r.keeper(ctx, r.store.other.URL(addrs), clients, term)

	began := hostclock.Now()
	var wg sync.WaitGroup
	var over atomic.Bool
	for _, k := range append(all, witness) {
		wg.Go(func() { k.run(ctx, &over) })
	}
	lift := r.store.apart.Impose(cutOff, hosts.Between(some, append(own, others...))...)
	slept := pause(term)
	for _, k := range append(all, witness) {
		k.holds.Store(0)
	}
	slept = max(slept, pause(term))
	lost, idle := 0, 0
	for _, k := range all {
		lost += k.lost()
		idle += one(k.holds.Load() == 0)
	}
	healthy := witness.lost() == 0 && witness.holds.Load() > 0 && slept < term/10

	lift()
	over.Store(true)
	wg.Wait()
	for _, k := range append(all, witness) {
		_ = k.leases.Unlock(ctx)
		_ = k.c.Close()
	}
	if healthy && lost > 0 {
		r.fail("kept until its end", began, fmt.Sprintf("%d of %d leases with a term of %v were lost while %s", lost, 2*clients, term, what))
	}
	if healthy && idle > 0 {
		r.fail("stood still", began, fmt.Sprintf("%d of %d Clients got no key from %v to %v after %s", idle, clients, term, 2*term, what))
	}
}

// keeper opens a Client and locks keys of its own.
func (r *run) keeper(ctx context.Context, url string, i int, term time.Duration) *keeper {
	k := &keeper{c: r.store.open(ctx, url, &hasp.Options{TTL: term, Timeout: term / 2}), lock: r.all[3*i]}
	var err error
	k.leases, err = hasp.LockAll(ctx, k.c, r.all[3*i+1:][:2])
	r.Check(err)
	return k
}

// run locks and unlocks a key until it is over.
func (k *keeper) run(ctx context.Context, over *atomic.Bool) {
	for !over.Load() && ctx.Err() == nil {
		if l, err := k.c.Lock(ctx, k.lock); err == nil {
			k.holds.Add(1)
			_ = l.Unlock(ctx)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// lost counts the leases that were lost.
func (k *keeper) lost() (n int) {
	for _, l := range k.leases.All() {
		n += one(errors.Is(l.Err(), hasp.ErrLost))
	}
	return n
}
