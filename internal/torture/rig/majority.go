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

// majority cuts one server of a set with a leader off from the others, which are a healthy
// majority. So its Clients must find another server: no lease is lost, and every Client gets
// its key.
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

// outvoted runs Clients while a server is cut off. The witness is a Client that knows only the
// other servers. If it fails as well, the store is not healthy or the machine is too slow, and
// nothing is checked.
func (r *run) outvoted(ctx context.Context, what string, some, others, own []*hosts.Host) {
	const terms = 3
	term := terms * r.term // an election takes a part of it
	all, witness := r.keepers(ctx, some[0], term)
	defer func() {
		for _, k := range append(all, witness) {
			_ = k.leases.Unlock(ctx)
			_ = k.c.Close()
		}
	}()

	began := hostclock.Now()
	pairs := hosts.Between(some, append(own, others...))
	lost, idle, healthy := r.disturb(ctx, all, witness, pairs, term)

	if healthy && lost > 0 {
		r.fail("kept until its end", began, fmt.Sprintf("%d of %d leases with a term of %v were lost while %s", lost, 2*len(all), term, what))
	}
	if healthy && idle > 0 {
		r.fail("stood still", began, fmt.Sprintf("%d of %d Clients got no key from %v to %v after %s", idle, len(all), term, 2*term, what))
	}
}

// keepers opens Clients that know all servers, and a witness that knows all but one.
func (r *run) keepers(ctx context.Context, but *hosts.Host, term time.Duration) (all []*keeper, witness *keeper) {
	const clients = 6
	for i := range clients {
		all = append(all, r.keeper(ctx, r.store.urls[0], i, term))
	}

	var addrs []string
	for i, h := range r.store.apart.servers {
		if h != but {
			addrs = append(addrs, r.store.other.Servers[i])
		}
	}
	return all, r.keeper(ctx, r.store.other.URL(addrs), clients, term)
}

// disturb cuts links for two terms while the Clients work. It returns how many leases they lost,
// and how many of them got no key in the second term. healthy reports whether these count.
func (r *run) disturb(ctx context.Context, all []*keeper, witness *keeper, pairs []hosts.Pair, term time.Duration) (lost, idle int, healthy bool) {
	everyone := append(slices.Clone(all), witness)
	var wg sync.WaitGroup
	var over atomic.Bool
	for _, k := range everyone {
		wg.Go(func() { k.run(ctx, &over) })
	}
	defer wg.Wait()
	defer over.Store(true)
	lift := r.store.apart.Impose(cutOff, pairs...)
	defer lift()

	// The first term includes an election. Only holds of the second term count.
	slept := pause(term)
	for _, k := range everyone {
		k.holds.Store(0)
	}
	slept = max(slept, pause(term))

	// Read all results before lift: afterwards a Client that failed could recover.
	for _, k := range all {
		lost += k.lost()
		idle += one(k.holds.Load() == 0)
	}
	return lost, idle, witness.lost() == 0 && witness.holds.Load() > 0 && slept < term/10
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
