package main

import (
	"context"
	"math"
	"strconv"
	"strings"

	"github.com/redis/go-redis/v9"
)

// spent is what the stores of a contestant have done so far.
type spent struct {
	commands float64 // those inside scripts, too
	scripts  float64
	cpu      float64 // seconds
	memory   float64 // bytes
	bytes    float64 // on the wire, both ways
}

func (s spent) since(before spent) spent {
	return spent{s.commands - before.commands, s.scripts - before.scripts, s.cpu - before.cpu, s.memory - before.memory, s.bytes - before.bytes}
}

// meter asks the stores.
type meter struct {
	one  *redis.Client
	five []*redis.Client
	etcd *etcdServer // nil without one
}

func newMeter(at stores, etcd *etcdServer) (*meter, error) {
	m := &meter{etcd: etcd}
	var err error
	if m.one, err = connect(at.One); err != nil {
		return nil, err
	}
	for _, url := range at.Five {
		rdb, err := connect(url)
		if err != nil {
			return nil, err
		}
		m.five = append(m.five, rdb)
	}
	return m, nil
}

func (m *meter) close() {
	m.one.Close()
	for _, rdb := range m.five {
		rdb.Close()
	}
}

// first is a meter of so many of the five.
func (m *meter) first(nodes int) *meter {
	return &meter{one: m.one, five: m.five[:nodes], etcd: m.etcd}
}

// nodes is how many are asked about a contestant.
func (m *meter) nodes(c contestant) int {
	if c.nodes == 5 {
		return len(m.five)
	}
	return 1
}

// read is the sum over the nodes of a contestant.
func (m *meter) read(ctx context.Context, c contestant) (sum spent, err error) {
	nodes := m.five
	switch c.nodes {
	case 0:
		cpu, err := m.etcd.cpu()
		none := math.NaN()
		return spent{none, none, cpu, none, none}, err
	case 1:
		nodes = []*redis.Client{m.one}
	}
	for _, rdb := range nodes {
		info, err := rdb.Info(ctx, "all").Result()
		if err != nil {
			return sum, err
		}
		sum.add(info)
		sum.bytes += float64(len(info)) // which it has sent since
	}
	return sum, nil
}

// add adds what a server tells of itself.
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
		case name == "used_memory":
			s.memory += n
		case name == "total_net_input_bytes", name == "total_net_output_bytes":
			s.bytes += n
		}
	}
}

// serverVersion is what a Redis says that it is.
func (m *meter) serverVersion(ctx context.Context) string {
	info, _ := m.one.Info(ctx, "server").Result()
	for line := range strings.Lines(info) {
		if v, ok := strings.CutPrefix(strings.TrimSpace(line), "redis_version:"); ok {
			return v
		}
	}
	return "of unknown version"
}
