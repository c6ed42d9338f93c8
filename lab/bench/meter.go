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

// spent says how much work the stores of a contestant have done so far.
type spent struct {
	commands float64 // including those inside scripts
	scripts  float64
	cpu      float64 // seconds
	bytes    float64 // on the wire, both ways
}

func (s spent) since(before spent) spent {
	return spent{s.commands - before.commands, s.scripts - before.scripts, s.cpu - before.cpu,
		s.bytes - before.bytes}
}

// meter asks the stores what they have spent.
type meter struct {
	redises []*redis.Client  // first the server that contestants on one node use, then five masters
	etcd    *etcdtest.Server // nil if no contestant needs it
}

// servers returns clients of the Redis servers of a contestant.
func (m *meter) servers(c contestant) []*redis.Client {
	switch c.nodes {
	case 0, onPostgres:
		return nil
	case 1:
		return m.redises[:1]
	}
	return m.redises[1:]
}

// pids returns the process IDs of a contestant's stores.
func (m *meter) pids(ctx context.Context, c contestant) (all []string) {
	if c.nodes == 0 {
		return []string{strconv.Itoa(m.etcd.Pid())}
	}
	for _, rdb := range m.servers(c) {
		all = append(all, field(ctx, rdb, "process_id"))
	}
	return all
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

// read returns what all stores of a contestant have spent so far.
func (m *meter) read(ctx context.Context, c contestant) (sum spent, err error) {
	if c.nodes == onPostgres {
		// its sessions are processes
		return spent{math.NaN(), math.NaN(), math.NaN(), math.NaN()}, nil
	}

	if c.nodes == 0 {
		// etcd counts no commands
		return spent{math.NaN(), math.NaN(), cpuOf(m.etcd.Pid()), math.NaN()}, nil
	}

	for _, rdb := range m.servers(c) {
		info, err := rdb.Info(ctx, "all").Result()
		if err != nil {
			return sum, err
		}
		sum.add(info)
		sum.bytes += float64(len(info)) // the counters in a reply do not include the reply itself
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

// field returns a field from the section "server" of INFO.
func field(ctx context.Context, rdb *redis.Client, name string) string {
	info, _ := rdb.Info(ctx, "server").Result()
	for line := range strings.Lines(info) {
		if v, ok := strings.CutPrefix(strings.TrimSpace(line), name+":"); ok {
			return v
		}
	}
	return "unknown"
}

// cpuTime returns the CPU time that this process has used.
func cpuTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(err) // every Unix has this call
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// cpuOf returns the seconds of CPU time that another process has used, or NaN on a system without
// /proc. The kernel counts in hundredths of a second.
func cpuOf(pid int) float64 {
	stat, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	_, rest, _ := strings.Cut(string(stat), ") ") // the fields after the process's name
	f := strings.Fields(rest)
	if len(f) < 13 {
		return math.NaN()
	}
	user, _ := strconv.ParseFloat(f[11], 64)
	system, _ := strconv.ParseFloat(f[12], 64)
	return (user + system) / 100
}
