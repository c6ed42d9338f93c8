package rig

import (
	"regexp"
	"testing"
	"time"
)

func TestFlagsThatMakeNoSenseAreRefused(t *testing.T) {
	for name, c := range map[string]struct {
		names string
		set   func(o *options)
		want  string
	}{
		"all":      {"", func(o *options) {}, ""},
		"plant":    {"", func(o *options) { o.plant = "foo" }, `-plant: "foo" is none of release, renewal, wake-up, slots, reply, queue, subscription, name`},
		"on":       {"", func(o *options) { o.place = "host" }, `-on: "host" is none of redis, sentinel, cluster, service, hosts, hosts-sentinel, hosts-cluster, hosts-service, hosts-name`},
		"strategy": {"foo", func(o *options) {}, `-strategy: "foo" is none of spinlock, pubsublock, fairlock, redlock, filelock`},
		"time":     {"", func(o *options) { o.time = 0 }, "-time must be positive"},
		"far":      {"", func(o *options) { o.place, o.far = onHosts, -1 }, "-far must be positive"},
		"far here": {"", func(o *options) { o.far = 1 }, "-far needs hosts: give -on hosts"},
		"too far":  {"", func(o *options) { o.place, o.far = onHosts, time.Second }, "-far must be below 300ms, half of the term"},
		"files":    {"filelock", func(o *options) { o.place = onHosts }, "filelock cannot be run with -on hosts: no network is between its processes and its files"},
		"redlock":  {"redlock", func(o *options) { o.place = onHostsCluster }, "redlock cannot be run with -on hosts-cluster: use redis or hosts"},
		"faults":   {"", func(o *options) { o.only = regexp.MustCompile("foo") }, `-faults: "foo" matches no fault of spinlock, pubsublock, fairlock, redlock, filelock with -on redis`},
		"a fault":  {"", func(o *options) { o.only = regexp.MustCompile("disk is full") }, ""},
	} {
		o := options{place: onServer, nodes: leastNodes, time: time.Minute}
		c.set(&o)
		got := ""
		if err := (&plan{}).check(c.names, o); err != nil {
			got = err.Error()
		}
		if got != c.want {
			t.Errorf("%s: got %q, want %q", name, got, c.want)
		}
	}
}
