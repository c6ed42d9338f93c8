package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	_ "github.com/hasplock/hasp/etcdlock"
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
		faults:  c.faults(),
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

func (c *cluster) faults() []otherFault {
	var all []otherFault
	add := func(least, most float64, name string, inject otherInject) {
		all = append(all, otherFault{name: name, least: least, most: most, inject: inject})
	}
	for _, k := range []int{1, 2} {
		who := "a minority: "
		if k == 2 {
			who = "a majority: "
		}
		add(0.2, 1.5, who+"killed, and started again", c.each(k, killedMember, startedMember))
		add(0.3, 1.5, who+"stopped", c.each(k, (*etcdtest.Server).Pause, (*etcdtest.Server).Resume))
		add(0.3, 1.5, who+"stutters", c.stutters(k))
	}
	add(0.2, 1.5, "the leader killed, and started again", c.leader(killedMember, startedMember))
	add(0.3, 1.5, "the leader stopped", c.leader((*etcdtest.Server).Pause, (*etcdtest.Server).Resume))
	add(0.2, 0.2, "another member leads", c.moved)
	add(0.3, 1, "NOSPACE", c.full)
	add(0.1, 0.1, "compacted, and defragmented", c.compacted)
	all = append(all,
		otherFault{name: "every entry deleted", loses: true, least: 0.2, most: 0.5, inject: c.emptied},
		otherFault{name: "every lease revoked", loses: true, least: 0.2, most: 0.5, inject: c.revoked})
	return all
}

func killedMember(s *etcdtest.Server) error { s.Kill(); return nil }

func startedMember(s *etcdtest.Server) error { return s.Start() }

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

// again repeats a request until it succeeds or patience ends. Another fault may disturb the
// request.
func again(request func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for {
		err := request(ctx)
		if err == nil || ctx.Err() != nil {
			return err
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// on disturbs some members, and heals them.
func (c *cluster) on(some []*etcdtest.Server, fail, heal func(*etcdtest.Server) error) (func() error, error) {
	var errs []error
	for _, m := range some {
		errs = append(errs, fail(m))
	}
	return func() error {
		var errs []error
		for _, m := range some {
			errs = append(errs, heal(m))
		}
		return errors.Join(errs...)
	}, errors.Join(errs...)
}

// some returns k members.
func (c *cluster) some(r *rand.Rand, k int) (some []*etcdtest.Server) {
	for _, i := range r.Perm(len(c.members))[:k] {
		some = append(some, c.members[i])
	}
	return some
}

func (c *cluster) each(k int, fail, heal func(*etcdtest.Server) error) otherInject {
	return func(r *rand.Rand, _ time.Duration) (func() error, error) { return c.on(c.some(r, k), fail, heal) }
}

func (c *cluster) leader(fail, heal func(*etcdtest.Server) error) otherInject {
	return func(*rand.Rand, time.Duration) (func() error, error) {
		i := c.leaderIndex()
		if i < 0 {
			return nil, errNoVictim
		}
		return c.on(c.members[i:i+1], fail, heal)
	}
}

// stutters stops members again and again, each time for less than an election takes.
func (c *cluster) stutters(k int) otherInject {
	return func(r *rand.Rand, _ time.Duration) (func() error, error) {
		over, ended := make(chan struct{}), make(chan error, 1)
		some := c.some(r, k)
		go func() {
			var errs []error
			for on := true; on; {
				for _, m := range some {
					errs = append(errs, m.Pause())
				}
				time.Sleep(200 * time.Millisecond)
				for _, m := range some {
					errs = append(errs, m.Resume())
				}
				select {
				case <-time.After(100 * time.Millisecond):
				case <-over:
					on = false
				}
			}
			ended <- errors.Join(errs...)
		}()
		return func() error {
			close(over)
			return <-ended
		}, nil
	}
}

// moved makes another member lead.
func (c *cluster) moved(r *rand.Rand, _ time.Duration) (func() error, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	i := c.leaderIndex()
	if i < 0 {
		return nil, errNoVictim
	}

	// Only the leader obeys MoveLeader, so this client knows no other member.
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{c.members[i].Client}, Logger: zap.NewNop()})
	if err != nil {
		return nil, err
	}
	defer client.Close()

	to, err := c.client.Status(ctx, c.members[(r.IntN(2)+1+i)%3].Client)
	if err != nil {
		return nil, err
	}
	if _, err := client.MoveLeader(ctx, to.Header.MemberId); err != nil {
		return nil, errNoVictim // an election is on, or a link between the members is disturbed
	}
	return nil, nil
}

// full makes every member refuse writes, as it does when its quota is used up.
func (c *cluster) full(*rand.Rand, time.Duration) (func() error, error) {
	err := c.alarm(etcdserverpb.AlarmRequest_ACTIVATE)
	return func() error { return c.alarm(etcdserverpb.AlarmRequest_DEACTIVATE) }, err
}

func (c *cluster) alarm(action etcdserverpb.AlarmRequest_AlarmAction) error {
	return again(func(ctx context.Context) error {
		status, err := c.client.Status(ctx, c.members[0].Client)
		if err != nil {
			return err
		}
		_, err = etcdserverpb.NewMaintenanceClient(c.client.ActiveConnection()).Alarm(ctx, &etcdserverpb.AlarmRequest{
			Action: action, MemberID: status.Header.MemberId, Alarm: etcdserverpb.AlarmType_NOSPACE})
		return err
	})
}

func (c *cluster) compacted(*rand.Rand, time.Duration) (func() error, error) {
	return nil, again(func(ctx context.Context) error {
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
	})
}

func (c *cluster) emptied(*rand.Rand, time.Duration) (func() error, error) {
	return nil, again(func(ctx context.Context) error {
		_, err := c.client.Delete(ctx, "hasp/", clientv3.WithPrefix())
		return err
	})
}

func (c *cluster) revoked(*rand.Rand, time.Duration) (func() error, error) {
	return nil, again(func(ctx context.Context) error {
		r, err := c.client.Leases(ctx)
		if err != nil {
			return err
		}
		for _, l := range r.Leases {
			_, _ = c.client.Revoke(ctx, l.ID) // it may have ended
		}
		return nil
	})
}
