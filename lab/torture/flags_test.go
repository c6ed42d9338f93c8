package main

import (
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
		"plant":    {"", func(o *options) { o.plant = "foo" }, `-plant: "foo" is none of release, renewal, wake-up, slots, reply, queue`},
		"on":       {"", func(o *options) { o.place = "host" }, `-on: "host" is none of redis, sentinel, cluster, service`},
		"strategy": {"foo", func(o *options) {}, `-strategy: "foo" is none of spinlock, pubsublock, fairlock, redlock, filelock, pglock, etcdlock`},
		"time":     {"", func(o *options) { o.time = 0 }, "-time must be positive"},
		"files":    {"filelock", func(o *options) { o.place = onService }, "filelock cannot be run with -on service: use redis"},
		"redlock":  {"redlock", func(o *options) { o.place = onCluster }, "redlock cannot be run with -on cluster: use redis"},
	} {
		o := options{place: onServer, nodes: leastNodes, time: time.Minute}
		c.set(&o)
		got := ""
		if _, err := o.check(c.names); err != nil {
			got = err.Error()
		}
		if got != c.want {
			t.Errorf("%s: got %q, want %q", name, got, c.want)
		}
	}
}
