package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/hasplock/hasp/internal/results"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// nodes is how many servers are asked.
const nodes = 5

// patience is for what must happen at last.
const patience = time.Minute

// set are the servers, each behind a proxy.
type set struct {
	dir  string
	list []*node
}

// node is one server.
type node struct {
	*proxy
	cmd    *exec.Cmd
	socket string
	direct *redis.Client // not through the proxy
}

// startSet starts servers that end with stop.
func startSet(ctx context.Context) (s *set, err error) {
	dir, err := os.MkdirTemp("", "quorum-")
	if err != nil {
		return nil, err
	}
	s = &set{dir: dir}
	for i := range nodes {
		if err = s.start(ctx, filepath.Join(dir, strconv.Itoa(i))); err != nil {
			s.stop()
			return nil, err
		}
	}
	return s, nil
}

// start starts one more server. It listens on a socket, which cannot be
// anybody else's as a port can.
func (s *set) start(ctx context.Context, socket string) error {
	cmd := exec.Command("redis-server", "--port", "0", "--unixsocket", socket, "--save", "", "--dir", s.dir)
	if err := cmd.Start(); err != nil {
		return err
	}
	n := &node{cmd: cmd, socket: socket, direct: newClient("unix", socket)}
	s.list = append(s.list, n)
	dial := func() (net.Conn, error) { return net.Dial("unix", socket) }
	for began := time.Now(); ; time.Sleep(5 * time.Millisecond) {
		conn, err := dial() // go-redis would log that it cannot
		if err == nil {
			conn.Close()
			break
		}
		if ctx.Err() != nil || time.Since(began) > patience {
			return errors.Join(errors.New("redis-server does not answer"), err)
		}
	}
	var err error
	n.proxy, err = newProxy(dial)
	return err
}

func (s *set) stop() {
	for _, n := range s.list {
		if n.proxy != nil {
			n.down()
		}
		n.direct.Close()
		_ = n.cmd.Process.Kill()
		_ = n.cmd.Wait()
	}
	os.RemoveAll(s.dir)
}

// condition is what the servers are like. The last one may be down, and the
// one in the middle slow.
type condition struct {
	name string
	down bool
	slow bool
}

var allWell = condition{name: "all well"}

var conditions = []condition{
	allWell,
	{name: "one down", down: true},
	{name: "one slow", slow: true},
	{name: "one down, one slow", down: true, slow: true},
}

func (s *set) be(c condition, delay time.Duration) error {
	last, middle := s.list[nodes-1], s.list[nodes/2]
	last.down()
	if !c.down {
		if err := last.up(); err != nil {
			return err
		}
	}
	if !c.slow {
		delay = 0
	}
	middle.slow(delay)
	return nil
}

// reachable are the servers that are not down.
func (s *set) reachable(c condition) []*node {
	if c.down {
		return s.list[:nodes-1]
	}
	return s.list
}

// clients are connections that end together.
type clients []redis.UniversalClient

// through returns a client for each server, through its proxy.
func (c *clients) through(s *set) []redis.UniversalClient {
	return c.to(s, func(n *node) *redis.Client { return newClient("tcp", n.addr) })
}

// straight returns a client for each server, not through its proxy, with a hook.
func (c *clients) straight(s *set, hook redis.Hook) []redis.UniversalClient {
	return c.to(s, func(n *node) *redis.Client {
		rdb := newClient("unix", n.socket)
		rdb.AddHook(hook)
		return rdb
	})
}

func (c *clients) to(s *set, client func(*node) *redis.Client) []redis.UniversalClient {
	all := make([]redis.UniversalClient, len(s.list))
	for i, n := range s.list {
		all[i] = client(n)
	}
	*c = append(*c, all...)
	return all
}

// newClient returns a client as go-redis makes it for everybody, but for room
// for all calls that may be under way.
func newClient(network, addr string) *redis.Client {
	return redis.NewClient(&redis.Options{Network: network, Addr: addr, PoolSize: 128,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}})
}

func (c *clients) close() {
	for _, rdb := range *c {
		rdb.Close()
	}
}

// url is how hasp is told of all servers.
func (s *set) url() string {
	addrs := make([]string, len(s.list))
	for i, n := range s.list {
		addrs[i] = n.addr
	}
	return "redlock+redis://" + strings.Join(addrs, ",")
}

// sweep deletes the keys that begin with prefix and returns how many there
// were on each server, added up.
func sweep(ctx context.Context, servers []*node, prefix string) (total int, err error) {
	for _, n := range servers {
		var left []string
		keys := n.direct.Scan(ctx, 0, prefix+"*", 1000).Iterator()
		for keys.Next(ctx) {
			left = append(left, keys.Val())
		}
		if err := keys.Err(); err != nil {
			return total, err
		}
		if len(left) > 0 {
			if err := n.direct.Del(ctx, left...).Err(); err != nil {
				return total, err
			}
		}
		total += len(left)
	}
	return total, nil
}

// calls is how many commands a server has carried out, by name, those inside
// scripts included.
type calls map[string]int64

// count asks all servers, and adds up.
func (s *set) count(ctx context.Context) (calls, error) {
	total := calls{}
	for _, n := range s.list {
		info, err := n.direct.Info(ctx, "commandstats").Result()
		if err != nil {
			return nil, err
		}
		for line := range strings.Lines(info) {
			name, stats, ok := strings.Cut(strings.TrimPrefix(line, "cmdstat_"), ":calls=")
			number, _, _ := strings.Cut(stats, ",")
			calls, err := strconv.ParseInt(number, 10, 64)
			switch {
			case !ok || err != nil:
			case name == "info", name == "hello", strings.HasPrefix(name, "client|"), name == "ping": // of connections
			default:
				total[name] += calls
			}
		}
	}
	return total, nil
}

// since is what was called after before.
func (c calls) since(before calls) calls {
	diff := calls{}
	for name, n := range c {
		if n -= before[name]; n > 0 {
			diff[name] = n
		}
	}
	return diff
}

func (c calls) total() (n int64) {
	for _, k := range c {
		n += k
	}
	return n
}

// per says what was called, shared out.
func (c calls) per(n float64) string {
	var all []string
	for _, name := range slices.Sorted(maps.Keys(c)) {
		all = append(all, fmt.Sprint(results.Decimal(float64(c[name])/n), " ", strings.ReplaceAll(name, "|", " ")))
	}
	return strings.Join(all, ", ")
}
