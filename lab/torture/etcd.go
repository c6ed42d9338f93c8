package main

import (
	"context"
	"fmt"
	"strings"

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
	s.what = "three members"
	s.left = c.left
	c.faults(&s.faults)
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

func (c *cluster) faults(all *catalog) {
	all.processes()
	all.links()
	all.add("every entry deleted", 0.2, 0.5, locks, onServers(1, c.empty, nil))
	for _, k := range []int{1, 2} {
		all.add(fmt.Sprint(k, " of 3 members: killed, and started again"), 0.2, 1.5, nothing,
			onServers(k, func(_ *run, i int) { c.members[i].Kill() },
				func(_ *run, i int) { c.Check(c.members[i].Start()) }))
		// If a leader is stopped for longer than what is left of a term, it may later end leases
		// that its successor keeps alive: see docs/etcdlock.md.
		all.add(fmt.Sprint(k, " of 3 members: stopped"), 0.3, 0.6, nothing, onServers(k,
			func(_ *run, i int) { c.Check(c.members[i].Pause()) },
			func(_ *run, i int) { c.Check(c.members[i].Resume()) }))
	}
}

func (c *cluster) empty(*run, int) {
	_, err := c.client.Delete(context.Background(), "hasp/", clientv3.WithPrefix())
	c.Check(err)
}
