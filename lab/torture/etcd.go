package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/hasplock/hasp/internal/etcdtest"
	"github.com/hasplock/hasp/internal/redistest"
)

// cluster is an etcd of three members.
type cluster struct {
	*redistest.Lab
	members []*etcdtest.Server
	client  *clientv3.Client
}

func (s *store) openEtcd() {
	c := &cluster{Lab: s.Lab, members: etcdtest.Start(s.Lab, 3, "--snapshot-count=1000")}
	for _, m := range c.members {
		s.addrs = append(s.addrs, m.Client)
	}
	client, err := clientv3.New(clientv3.Config{Endpoints: s.addrs, Logger: zap.NewNop()})
	s.Check(err)
	c.client = client
	s.Cleanup(func() { client.Close() })
	s.what, s.left, s.faults, s.ready = "three members", c.left, c.faults, c.healthy
	s.openWays(func(addrs []string) string { return "etcdlock+etcd://" + strings.Join(addrs, ",") })
}

func (c *cluster) left(ctx context.Context) (all []string) {
	r, err := c.client.Get(ctx, "", clientv3.WithPrefix(), clientv3.WithKeysOnly())
	c.Check(err)
	for _, kv := range r.Kvs {
		all = append(all, "entry "+string(kv.Key))
	}
	leases, err := c.client.Leases(ctx)
	c.Check(err)
	for _, l := range leases.Leases {
		all = append(all, fmt.Sprintf("lease %x", l.ID))
	}
	return all
}

func (c *cluster) faults(all *catalog, losing bool) {
	if losing {
		all.add(server, 0.2, 0.5, "every entry deleted", requested(c.emptied))
		all.add(server, 0.2, 0.5, "every lease revoked", requested(c.revoked))
		return
	}
	all.processes()
	all.links()
	kill, start := func(_ *nemesis, i int) { c.members[i].Kill() }, c.each((*etcdtest.Server).Start)
	pause, resume := c.each((*etcdtest.Server).Pause), c.each((*etcdtest.Server).Resume)
	for _, k := range []int{1, 2} {
		all.add(server, 0.2, 1.5, of(3, k, "killed, and started again"), onServers(k, kill, start))
		all.add(alone, 0.3, 0.6, of(3, k, "stopped"), onServers(k, pause, resume))
	}
	all.add(server, 0.2, 1.5, "the leader killed, and started again", c.leader(kill, start))
	// If a leader is stopped for longer than what is left of a term, it may later end leases that its
	// successor keeps alive: see docs/etcdlock.md.
	all.add(alone, 0.3, 0.6, "the leader stopped", c.leader(pause, resume))
}

// healthy waits until all members answer and have a leader.
func (c *cluster) healthy() error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for _, m := range c.members {
		if err := m.Healthy(ctx); err != nil {
			return err
		}
	}
	return nil
}

// requested returns a fault that consists of one request. Another fault may disturb this request.
// So the request is repeated until it succeeds, for at most the duration patience.
func requested(request func(context.Context) error) inject {
	return onAll(func() (err error) {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		repeatUntil(patience, 10*time.Millisecond, func() bool {
			err = request(ctx)
			return err == nil || ctx.Err() != nil
		})
		return err
	}, nil)
}

// each adapts the function do, which disturbs or heals a member, to take the member's index.
func (c *cluster) each(do func(*etcdtest.Server) error) func(n *nemesis, i int) {
	return func(n *nemesis, i int) { n.Check(do(c.members[i])) }
}

func (c *cluster) leader(fail, heal func(n *nemesis, i int)) inject {
	return func(n *nemesis) *injection {
		i := slices.IndexFunc(c.members, (*etcdtest.Server).IsLeader)
		if i < 0 {
			return nil // an election is under way
		}
		fail(n, i)
		return ofAll(func() { heal(n, i) })
	}
}

func (c *cluster) emptied(ctx context.Context) error {
	_, err := c.client.Delete(ctx, "hasp/", clientv3.WithPrefix())
	return err
}

func (c *cluster) revoked(ctx context.Context) error {
	r, err := c.client.Leases(ctx)
	if err != nil {
		return err
	}
	for _, l := range r.Leases {
		_, _ = c.client.Revoke(ctx, l.ID) // the lease may have ended meanwhile
	}
	return nil
}
