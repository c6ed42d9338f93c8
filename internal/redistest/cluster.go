package redistest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// Cluster is three masters with a replica each. They fail over on demand only, not
// because the machine is busy.
type Cluster struct {
	Set

	// Servers are the first masters, and then their replicas in the same order.
	Servers []*Server
}

const (
	masters = 3
	slots   = 16384
)

// StartCluster starts a cluster for t.
func StartCluster(t testing.TB, o *Options) *Cluster {
	t.Helper()
	NeedSets(t)
	set, err := newSet(t, o)
	c := &Cluster{Set: set}
	if err == nil {
		err = again(c.start)
	}
	if err == nil {
		err = until("cluster", c.complete)
	}
	if err != nil {
		t.Fatalf("redistest: %v", err)
	}
	return c
}

// start starts all nodes. Their configuration names each other; CLUSTER MEET would
// take seconds.
func (c *Cluster) start() error {
	for _, old := range c.Servers {
		old.Stop()
	}
	n := 2 * masters
	if c.o.Bare {
		n = masters
	}
	all, err := c.ports(n)
	if err != nil {
		return err
	}
	c.Servers = make([]*Server, n)
	return each(n, func(i int) error {
		srv, dir, err := c.server("node")
		if err != nil {
			return err
		}
		c.Servers[i] = srv
		if err := os.WriteFile(filepath.Join(dir, "nodes.conf"), []byte(nodes(all, i)), 0o600); err != nil {
			return err
		}
		return srv.startAt(dir, all[i], append(c.chain(), "--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf",
			"--cluster-node-timeout", "60000", "--cluster-migration-barrier", "9")...)
	})
}

// nodes returns the configuration file of the node at all[me].
func nodes(all []int, me int) string {
	var b strings.Builder
	for i, p := range all {
		flags, master, epoch, served := "master", "-", i+1, ""
		if i < masters {
			served = fmt.Sprintf(" %d-%d", i*slots/masters, (i+1)*slots/masters-1)
		} else {
			flags, master, epoch = "slave", id(all[i-masters]), i-masters+1
		}
		if i == me {
			flags = "myself," + flags
		}
		fmt.Fprintf(&b, "%s 127.0.0.1:%d@%d %s %s 0 0 %d connected%s\n", id(p), p, p+10000, flags, master, epoch, served)
	}
	fmt.Fprintf(&b, "vars currentEpoch %d lastVoteEpoch 0\n", masters)
	return b.String()
}

// complete returns an error until all nodes serve.
func (c *Cluster) complete(ctx context.Context) error {
	for i, srv := range c.Servers {
		info, err := srv.text(ctx, "cluster", "info")
		if err != nil {
			return err
		}
		if !strings.Contains(info, "cluster_state:ok") {
			return fmt.Errorf("%s: %.40s", srv.Addr, info)
		}
		if i >= masters {
			if role, inStep, err := srv.role(ctx); err != nil || role != "slave" || !inStep {
				return fmt.Errorf("replica %s: %s, in step: %v, %v", srv.Addr, role, inStep, err)
			}
			if err := c.Servers[i-masters].followed(ctx, 1); err != nil {
				return err
			}
		}
	}
	return nil
}

// URL returns the URL of the cluster for hasp. Params belong to it.
func (c *Cluster) URL() string { return c.url("cluster", c.Servers, "") }

// node is a master of a cluster.
type node struct {
	srv *Server
	id  string
}

// owner returns the master of a slot, as srv knows it.
func (c *Cluster) owner(ctx context.Context, srv *Server, slot int64) (node, error) {
	v, err := srv.command(ctx, "cluster", "slots")
	if err != nil {
		return node{}, err
	}
	ranges, _ := v.([]any)
	for _, r := range ranges {
		if r, _ := r.([]any); len(r) > 2 && r[0].(int64) <= slot && slot <= r[1].(int64) {
			master := r[2].([]any)
			owner, err := c.at(fmt.Sprint(master[0]), master[1].(int64))
			return node{owner, fmt.Sprint(master[2])}, err
		}
	}
	return node{}, fmt.Errorf("%s knows no master of slot %d", srv.Addr, slot)
}

func (c *Cluster) at(host string, port int64) (*Server, error) {
	addr := net.JoinHostPort(host, strconv.FormatInt(port, 10))
	for _, srv := range c.Servers {
		if srv.Addr == addr {
			return srv, nil
		}
	}
	return nil, fmt.Errorf("no server is at %s", addr)
}

// agreed returns the master of a slot, if all running nodes agree on it.
func (c *Cluster) agreed(ctx context.Context, slot int64) (node, error) {
	var all node
	for _, srv := range c.Servers {
		if srv.away.Load() {
			continue
		}
		n, err := c.owner(ctx, srv, slot)
		if err != nil {
			return node{}, err
		}
		if all.srv != nil && all.srv != n.srv {
			return node{}, fmt.Errorf("slot %d: the nodes disagree on %s and %s", slot, all.srv.Addr, n.srv.Addr)
		}
		all = n
	}
	return all, nil
}

func (c *Cluster) find(slot int64) (n node) {
	c.t.Helper()
	c.must("owner", until("owner", func(ctx context.Context) (err error) {
		n, err = c.agreed(ctx, slot)
		return err
	}))
	return n
}

// Slot returns the slot of a key. It asks a server.
func (c *Cluster) Slot(key string) (slot int64) {
	c.t.Helper()
	c.must("slot", until("slot", func(ctx context.Context) error {
		for _, srv := range c.Servers {
			if !srv.away.Load() {
				v, err := srv.command(ctx, "cluster", "keyslot", key)
				slot, _ = v.(int64)
				return err
			}
		}
		return errors.New("all nodes are away")
	}))
	return slot
}

// Master returns the master of a key.
func (c *Cluster) Master(key string) *Server {
	c.t.Helper()
	return c.find(c.Slot(key)).srv
}

// Failover makes the replica of a key's master its successor, whether the master
// runs or not. It returns when all nodes agree. A master that runs hands over
// without loss.
func (c *Cluster) Failover(key string) {
	c.t.Helper()
	slot := c.Slot(key)
	old := c.find(slot)
	i := slices.IndexFunc(c.Servers, func(s *Server) bool { return s != old.srv && !s.away.Load() && c.follows(s, old) })
	if i < 0 {
		c.t.Fatalf("redistest: %s has no replica", old.srv.Addr)
	}
	replica := c.Servers[i]
	var asked time.Time
	c.must("failover", until("failover", func(ctx context.Context) error {
		if role, _, err := replica.role(ctx); err != nil {
			return err
		} else if role == "slave" && time.Since(asked) > 6*time.Second {
			// A replica gives up after 5 s. A repeated command starts it again.
			asked = time.Now()
			how := []any{"cluster", "failover"}
			if old.srv.away.Load() {
				how = append(how, "takeover")
			}
			if _, err := replica.command(ctx, how...); err != nil {
				return err
			}
		}
		n, err := c.agreed(ctx, slot)
		if err == nil && n.srv != replica {
			err = fmt.Errorf("%s is not a master yet", replica.Addr)
		}
		return err
	}))
}

// follows reports whether s is a replica of n.
func (c *Cluster) follows(s *Server, n node) bool {
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	v, err := s.command(ctx, "role")
	parts, _ := v.([]any)
	return err == nil && len(parts) > 2 && parts[0] == "slave" &&
		net.JoinHostPort(fmt.Sprint(parts[1]), fmt.Sprint(parts[2])) == n.srv.Addr
}

// Move moves the slot of key to another master. It returns before the end of the
// move: the keys have moved, and new keys belong to the other master, but clients
// must still ask the first one. finish completes the move.
func (c *Cluster) Move(key string) (finish func()) {
	c.t.Helper()
	slot := c.Slot(key)
	from := c.find(slot)
	var to node
	for s := int64(0); to.srv == nil || to.srv == from.srv; s += slots / masters / 2 {
		to = c.find(s % slots)
	}
	run := func(srv *Server, args ...any) any {
		c.t.Helper()
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		v, err := srv.command(ctx, args...)
		c.must(fmt.Sprint(args[:2]...), err)
		return v
	}
	run(to.srv, "cluster", "setslot", slot, "importing", from.id)
	run(from.srv, "cluster", "setslot", slot, "migrating", to.id)
	host, port, _ := net.SplitHostPort(to.srv.Addr)
	for {
		keys, _ := run(from.srv, "cluster", "getkeysinslot", slot, 100).([]any)
		if len(keys) == 0 {
			break
		}
		args := []any{"migrate", host, port, "", 0, 60000}
		switch {
		case c.o.User != "":
			args = append(args, "auth2", c.o.User, c.o.Password)
		case c.o.Password != "":
			args = append(args, "auth", c.o.Password)
		}
		run(from.srv, append(append(args, "keys"), keys...)...)
	}
	return func() {
		c.t.Helper()
		run(to.srv, "cluster", "setslot", slot, "node", to.id)
		run(from.srv, "cluster", "setslot", slot, "node", to.id)
		c.must("move", until("move", func(ctx context.Context) error {
			n, err := c.agreed(ctx, slot)
			if err == nil && n.srv != to.srv {
				err = fmt.Errorf("%s still serves slot %d", n.srv.Addr, slot)
			}
			return err
		}))
	}
}
