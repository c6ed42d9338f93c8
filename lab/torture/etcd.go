package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/hasplock/hasp/internal/etcdtest"
	"github.com/hasplock/hasp/internal/redistest"
)

// cluster is an etcd of three members.
type cluster struct {
	members []*etcdtest.Server
	client  *clientv3.Client
}

func startEtcd(l *redistest.Lab) *other {
	c := &cluster{members: etcdtest.Start(l, 3, "--snapshot-count=1000")}
	var addrs []string
	for _, m := range c.members {
		addrs = append(addrs, m.Client)
	}
	client, err := clientv3.New(clientv3.Config{Endpoints: addrs, Logger: zap.NewNop()})
	l.Check(err)
	c.client = client
	l.Cleanup(func() { client.Close() })
	return &other{
		what:    "three members",
		servers: addrs,
		url:     func(addrs []string) string { return "etcdlock+etcd://" + strings.Join(addrs, ",") },
		left:    c.left,
		faults:  c.faults,
		ready:   c.healthy,
	}
}

// leaderIndex returns the index of the leader, or -1 during an election.
func (c *cluster) leaderIndex() int {
	return slices.IndexFunc(c.members, (*etcdtest.Server).IsLeader)
}

// left lists entries and leases.
func (c *cluster) left(ctx context.Context) (all []string, err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	r, err := c.client.Get(ctx, "", clientv3.WithPrefix(), clientv3.WithKeysOnly())
	if err != nil {
		return nil, err
	}
	for _, kv := range r.Kvs {
		all = append(all, "entry "+string(kv.Key))
	}
	leases, err := c.client.Leases(ctx)
	if err != nil {
		return nil, err
	}
	for _, l := range leases.Leases {
		all = append(all, fmt.Sprintf("lease %x", l.ID))
	}
	return all, nil
}

func (c *cluster) faults(all *catalog, losing bool) {
	if losing {
		all.add(server, 0.2, 0.5, "every entry deleted", c.asks(c.emptied))
		all.add(server, 0.2, 0.5, "every lease revoked", c.asks(c.revoked))
		return
	}
	kill, start := func(_ *nemesis, i int) { c.members[i].Kill() }, c.each((*etcdtest.Server).Start)
	pause, resume := c.each((*etcdtest.Server).Pause), c.each((*etcdtest.Server).Resume)
	for _, k := range []int{1, 2} {
		all.add(server, 0.2, 1.5, of(3, k, "killed, and started again"), onServers(k, kill, start))
		all.add(server, 0.3, 1.5, of(3, k, "stopped"), onServers(k, pause, resume))
		all.add(server, 0.3, 1.5, of(3, k, "stutters"), c.stutters(k))
	}
	all.add(server, 0.2, 1.5, "the leader killed, and started again", c.leader(kill, start))
	all.add(server, 0.3, 1.5, "the leader stopped", c.leader(pause, resume))
	all.add(server, 0.2, 0.2, "another member leads", c.moved)
	all.add(server, 0.3, 1, "NOSPACE", c.full)
	all.add(server, 0.1, 0.1, "compacted, and defragmented", c.asks(c.compacted))
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

// asks makes a request again and again until it succeeds or patience ends: another fault may
// disturb it.
func (n *nemesis) asks(request func(context.Context) error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var err error
	until(patience, 10*time.Millisecond, func() bool {
		err = request(ctx)
		return err == nil || ctx.Err() != nil
	})
	n.Check(err)
}

// asks is the fault that a request makes.
func (c *cluster) asks(request func(context.Context) error) inject {
	return func(n *nemesis) *injection {
		n.asks(request)
		return ofAll(nil)
	}
}

// each disturbs or heals a member.
func (c *cluster) each(do func(*etcdtest.Server) error) func(n *nemesis, i int) {
	return func(n *nemesis, i int) { n.Check(do(c.members[i])) }
}

func (c *cluster) leader(fail, heal func(n *nemesis, i int)) inject {
	return func(n *nemesis) *injection {
		i := c.leaderIndex()
		if i < 0 {
			return nil
		}
		fail(n, i)
		return ofAll(func() { heal(n, i) })
	}
}

// stutters stops members again and again, each time for less than an election takes.
func (c *cluster) stutters(k int) inject {
	return func(n *nemesis) *injection {
		over, ended := make(chan struct{}), make(chan error, 1)
		some := n.rand.Perm(len(c.members))[:k]
		go func() {
			var errs []error
			for on := true; on; {
				for _, i := range some {
					errs = append(errs, c.members[i].Pause())
				}
				time.Sleep(200 * time.Millisecond)
				for _, i := range some {
					errs = append(errs, c.members[i].Resume())
				}
				select {
				case <-time.After(100 * time.Millisecond):
				case <-over:
					on = false
				}
			}
			ended <- errors.Join(errs...)
		}()
		return ofAll(func() {
			close(over)
			n.Check(<-ended)
		})
	}
}

// moved makes another member lead. There is no victim during an election, or while a link
// between the members is disturbed.
func (c *cluster) moved(n *nemesis) *injection {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	i := c.leaderIndex()
	if i < 0 {
		return nil
	}

	// Only the leader obeys MoveLeader, so this client knows no other member.
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{c.members[i].Client}, Logger: zap.NewNop()})
	n.Check(err)
	defer client.Close()
	to, err := c.client.Status(ctx, c.members[(n.rand.IntN(2)+1+i)%3].Client)
	n.Check(err)
	if _, err := client.MoveLeader(ctx, to.Header.MemberId); err != nil {
		return nil
	}
	return ofAll(nil)
}

// full makes every member refuse writes, as it does when its quota is used up.
func (c *cluster) full(n *nemesis) *injection {
	n.asks(c.alarm(etcdserverpb.AlarmRequest_ACTIVATE))
	return ofAll(func() { n.asks(c.alarm(etcdserverpb.AlarmRequest_DEACTIVATE)) })
}

func (c *cluster) alarm(action etcdserverpb.AlarmRequest_AlarmAction) func(context.Context) error {
	return func(ctx context.Context) error {
		status, err := c.client.Status(ctx, c.members[0].Client)
		if err != nil {
			return err
		}
		_, err = etcdserverpb.NewMaintenanceClient(c.client.ActiveConnection()).Alarm(ctx, &etcdserverpb.AlarmRequest{
			Action: action, MemberID: status.Header.MemberId, Alarm: etcdserverpb.AlarmType_NOSPACE})
		return err
	}
}

func (c *cluster) compacted(ctx context.Context) error {
	r, err := c.client.Get(ctx, "none")
	if err != nil {
		return err
	}
	_, err = c.client.Compact(ctx, r.Header.Revision)
	if errors.Is(err, rpctypes.ErrCompacted) { // by a request whose reply was lost
		err = nil
	}
	for _, m := range c.members {
		_, err1 := c.client.Defragment(ctx, m.Client)
		err = errors.Join(err, err1)
	}
	return err
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
		_, _ = c.client.Revoke(ctx, l.ID) // it may have ended
	}
	return nil
}
