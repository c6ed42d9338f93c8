package main

import (
	"context"
	"fmt"
	"math"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/etcdtest"
)

// spent is what the stores of a contestant have spent so far.
type spent struct {
	commands float64 // including those inside scripts
	scripts  float64
	cpu      float64 // seconds
	bytes    float64 // on the wire, both ways
}

func (s spent) since(before spent) spent {
	return spent{s.commands - before.commands, s.scripts - before.scripts, s.cpu - before.cpu, s.bytes - before.bytes}
}

// meter asks the stores what they have spent.
type meter struct {
	one  *redis.Client
	five []*redis.Client
	etcd *etcdtest.Server // nil if no contestant needs it
}

// first returns a meter of the first of the five nodes.
func (m *meter) first(nodes int) *meter {
	return &meter{one: m.one, five: m.five[:nodes], etcd: m.etcd}
}

// nodes returns how many nodes read asks about a contestant.
func (m *meter) nodes(c contestant) int {
	if c.nodes == 5 {
		return len(m.five)
	}
	return 1
}

// spending returns what the stores of a contestant spend while f runs.
func (m *meter) spending(ctx context.Context, c contestant, f func() error) (s spent, err error) {
	before, err := m.read(ctx, c)
	if err == nil {
		err = f()
	}
	if err != nil {
		return s, err
	}
	after, err := m.read(ctx, c)
	return after.since(before), err
}

// read returns the sum over the nodes of a contestant.
func (m *meter) read(ctx context.Context, c contestant) (sum spent, err error) {
	nodes := m.five
	switch c.nodes {
	case 0:
		return spent{math.NaN(), math.NaN(), cpuOf(m.etcd.Pid()), math.NaN()}, nil // etcd counts no commands
	case 1:
		nodes = []*redis.Client{m.one}
	case 3:
		nodes = nodes[:3]
	}
	for _, rdb := range nodes {
		info, err := rdb.Info(ctx, "all").Result()
		if err != nil {
			return sum, err
		}
		sum.add(info)
		sum.bytes += float64(len(info)) // the server sent this after it had counted
	}
	return sum, nil
}

// add adds the counters in a server's INFO.
func (s *spent) add(info string) {
	for line := range strings.Lines(info) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		if command, ok := strings.CutPrefix(name, "cmdstat_"); ok {
			calls, _, _ := strings.Cut(strings.TrimPrefix(value, "calls="), ",")
			n, _ := strconv.ParseFloat(calls, 64)
			if command != "info" {
				s.commands += n
			}
			if strings.HasPrefix(command, "eval") {
				s.scripts += n
			}
			continue
		}
		n, err := strconv.ParseFloat(value, 64)
		switch {
		case err != nil:
		case name == "used_cpu_user", name == "used_cpu_sys":
			s.cpu += n
		case name == "total_net_input_bytes", name == "total_net_output_bytes":
			s.bytes += n
		}
	}
}

// serverVersion returns the version of the Redis.
func (m *meter) serverVersion(ctx context.Context) string {
	info, _ := m.one.Info(ctx, "server").Result()
	for line := range strings.Lines(info) {
		if v, ok := strings.CutPrefix(strings.TrimSpace(line), "redis_version:"); ok {
			return v
		}
	}
	return "of unknown version"
}

// cpuTime returns the CPU time that this process has used.
func cpuTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(err) // every Unix has this call
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// cpuOf returns the seconds of CPU time that another process has used, or NaN on a system
// without /proc. The kernel counts them in hundredths.
func cpuOf(pid int) float64 {
	stat, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	_, rest, _ := strings.Cut(string(stat), ") ") // after the name
	f := strings.Fields(rest)
	if len(f) < 13 {
		return math.NaN()
	}
	user, _ := strconv.ParseFloat(f[11], 64)
	system, _ := strconv.ParseFloat(f[12], 64)
	return (user + system) / 100
}
