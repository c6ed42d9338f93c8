package main

import (
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/fairlock"
	"github.com/hasplock/hasp/pubsublock"
	"github.com/hasplock/hasp/spinlock"
)

// passed returns the driver of a strategy on one Redis or on a cluster, over a client with the defaults
// of go-redis, as a program passes it. It returns no client for other stores.
func passed(c hasp.Config) (rdb redis.UniversalClient, d backend.Driver, err error) {
	kind, hosts, _ := strings.Cut(c.Nodes[0], "://")
	addrs := strings.Split(strings.TrimSuffix(hosts, "/0"), ",")
	newDriver := map[string]func(redis.UniversalClient) (backend.Driver, error){
		"spinlock":   func(rdb redis.UniversalClient) (backend.Driver, error) { return spinlock.NewDriver(rdb, nil) },
		"pubsublock": func(rdb redis.UniversalClient) (backend.Driver, error) { return pubsublock.NewDriver(rdb, nil) },
		"fairlock":   func(rdb redis.UniversalClient) (backend.Driver, error) { return fairlock.NewDriver(rdb, nil) },
	}[c.Strategy]
	switch {
	case newDriver == nil:
		return nil, nil, nil
	case kind == "redis":
		rdb = redis.NewClient(&redis.Options{Addr: addrs[0]})
	case kind == "redis-cluster":
		rdb = redis.NewClusterClient(&redis.ClusterOptions{Addrs: addrs})
	default:
		return nil, nil, nil
	}
	d, err = newDriver(rdb)
	return rdb, d, err
}
