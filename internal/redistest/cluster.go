package redistest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// Cluster is three masters, each with a replica. Only Failover starts a failover, so a busy machine
// cannot cause one.
type Cluster struct{ Set }

const (
	masters = 3
	slots   = 16384
)

// StartCluster starts a cluster for t. The field Servers contains the masters, and then their
// replicas in the same order.
func StartCluster(t testing.TB, o *Options) *Cluster {
	t.Helper()
	c := &Cluster{newSet(t, o)}
	must(t, "cluster", again(c.start))
	c.must("cluster", c.complete)
	return c
}

// start starts all nodes. The configuration of each node names all others, because CLUSTER MEET
// would take seconds.
func (c *Cluster) start() error {
	n := 2 * masters
	if c.o.Bare {
		n = masters
	}

	all, err := c.members(n, "node", &c.Servers)
	if err != nil {
		return err
	}

	for i, m := range all {
		file := filepath.Join(m.dir, "nodes.conf")
		if err := os.WriteFile(file, []byte(nodes(all, i)), 0o600); err != nil {
			return err
		}
	}

	return Each(n, func(i int) error {
		return all[i].start(append(c.chain(),
			"--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf",
			"--cluster-node-timeout", "60000", "--cluster-migration-barrier", "9")...)
	})
}

func nodes(all []member, me int) string {
	var b strings.Builder
	for i, m := range all {
		flags := "master"
		master := "-"
		epoch := i + 1
		served := ""
		if i < masters {
			served = fmt.Sprintf(" %d-%d", i*slots/masters, (i+1)*slots/masters-1)
		} else {
			flags = "slave"
			master = all[i-masters].id()
			epoch = i - masters + 1
		}

		if i == me {
			flags = "myself," + flags
		}

		shard := ""
		if keepsShards() {
			shard = ",,shard-id=" + all[i%masters].id()
		}

		fmt.Fprintf(&b, "%s %s@%d%s %s %s 0 0 %d connected%s\n", m.id(), m.Addr, m.port+10000,
			shard, flags, master, epoch, served)
	}

	fmt.Fprintf(&b, "vars currentEpoch %d lastVoteEpoch 0\n", masters)
	return b.String()
}

// keepsShards reports whether the installed server reads the shards of nodes from their file, as
// Redis does since 7.2. In such a server, a master that is in no shard aborts at SPUBLISH.
var keepsShards = sync.OnceValue(func() bool {
	_, version, _ := strings.Cut(version(), " v=")
	var major, minor int
	_, err := fmt.Sscanf(version, "%d.%d", &major, &minor)
	since72 := major > 7 || major == 7 && minor >= 2
	return err == nil && since72
})

// The method complete returns an error until all nodes serve.
func (c *Cluster) complete(ctx context.Context) error {
	for i, srv := range c.Servers {
		info, err := srv.command(ctx, "cluster", "info").Text()
		if err != nil {
			return err
		}
		if !strings.Contains(info, "cluster_state:ok") {
			return fmt.Errorf("%s: %.40s", srv.Addr, info)
		}
		if i < masters {
			continue
		}
		if err := errors.Join(srv.inStep(ctx), c.Servers[i-masters].followed(ctx, 1)); err != nil {
			return err
		}
	}

	return nil
}

// URL returns the URL of the cluster for hasp. hasp also needs the parameters of Params.
func (c *Cluster) URL() string { return c.url("cluster", c.Servers, "") }

// node is a master of a cluster.
type node struct{ addr, id string }

// owner returns the master of a slot. It returns an error if the running nodes do not agree.
func (c *Cluster) owner(ctx context.Context, slot int) (node, error) {
	return agree(c.Servers, func(srv *Server) (node, error) {
		cmd := redis.NewClusterSlotsCmd(ctx, "cluster", "slots")
		if err := srv.process(ctx, cmd); err != nil {
			return node{}, err
		}

		for _, r := range cmd.Val() {
			if r.Start <= slot && slot <= r.End {
				return node{r.Nodes[0].Addr, r.Nodes[0].ID}, nil
			}
		}
		return node{}, fmt.Errorf("%s knows no master of slot %d", srv.Addr, slot)
	})
}

// find waits until all running nodes agree on the master of a slot, and returns it.
func (c *Cluster) find(slot int) (srv *Server, id string) {
	c.t.Helper()
	c.must("owner", func(ctx context.Context) error {
		n, err := c.owner(ctx, slot)
		if err == nil {
			srv, err = c.at(n.addr)
		}
		id = n.id
		return err
	})

	return srv, id
}

// The method owned returns an error until all running nodes agree that srv serves the slot.
func (c *Cluster) owned(ctx context.Context, srv *Server, slot int) error {
	n, err := c.owner(ctx, slot)
	if err == nil && n.addr != srv.Addr {
		err = fmt.Errorf("%s still serves slot %d", n.addr, slot)
	}
	return err
}

func (c *Cluster) slot(key string) (slot int) {
	c.t.Helper()
	c.must("slot", func(ctx context.Context) (err error) {
		slot, err = running(c.Servers)[0].command(ctx, "cluster", "keyslot", key).Int()
		return err
	})
	return slot
}

// Master returns the master of a key.
func (c *Cluster) Master(key string) *Server {
	c.t.Helper()
	srv, _ := c.find(c.slot(key))
	return srv
}

// Failover makes the replica of a key's master the new master. It waits until all nodes agree. If
// the old master still runs, it hands over its data without loss.
func (c *Cluster) Failover(key string) {
	c.t.Helper()
	slot := c.slot(key)
	old, _ := c.find(slot)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	others := running(c.Servers)
	i := slices.IndexFunc(others, func(s *Server) bool { return s.follows(ctx, old) })
	if i < 0 {
		c.t.Fatalf("redistest: %s has no replica", old.Addr)
	}

	replica := others[i]
	asked := time.Time{}
	how := []any{"cluster", "failover"}
	if old.away.Load() {
		how = append(how, "takeover")
	}

	c.must("failover", func(ctx context.Context) error {
		if err := replica.is(ctx, "master"); err == nil {
			return c.owned(ctx, replica, slot)
		} else if time.Since(asked) < 6*time.Second {
			return err
		}

		// A replica gives up its failover after 5 s. Therefore repeat the command after 6 s.
		asked = time.Now()
		return errors.Join(errors.New("not a master yet"), replica.command(ctx, how...).Err())
	})
}

// Move begins to move the slot of key to another master. It returns in the middle of the move. All
// keys of the slot are then on the other master, but clients must still ask the first master. The
// function finish completes the move.
func (c *Cluster) Move(key string) (finish func()) {
	c.t.Helper()
	slot := c.slot(key)
	from, fromID := c.find(slot)
	to := from
	toID := ""

	for s := 0; to == from; s += slots / masters / 2 {
		to, toID = c.find(s % slots)
	}

	run := func(srv *Server, args ...any) *redis.Cmd {
		c.t.Helper()
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		cmd := srv.command(ctx, args...)
		must(c.t, fmt.Sprint(args[:2]...), cmd.Err())
		return cmd
	}

	run(to, "cluster", "setslot", slot, "importing", fromID)
	run(from, "cluster", "setslot", slot, "migrating", toID)

	for {
		keys, _ := run(from, "cluster", "getkeysinslot", slot, 100).Slice()
		if len(keys) == 0 {
			break
		}

		host, port, _ := net.SplitHostPort(to.Addr)
		args := []any{"migrate", host, port, "", 0, 60000}
		switch {
		case c.o.User != "":
			args = append(args, "auth2", c.o.User, c.o.Password)
		case c.o.Password != "":
			args = append(args, "auth", c.o.Password)
		}

		run(from, append(append(args, "keys"), keys...)...)
	}

	return func() {
		c.t.Helper()
		run(to, "cluster", "setslot", slot, "node", toID)
		run(from, "cluster", "setslot", slot, "node", toID)
		c.must("move", func(ctx context.Context) error { return c.owned(ctx, to, slot) })
	}
}
