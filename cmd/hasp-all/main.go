// Command hasp-all is the command github.com/hasplock/hasp/cmd/hasp with two more strategies, for
// PostgreSQL and etcd. It is in a module of its own, so that programs that import package hasp do
// not depend on the clients of these stores.
package main

import (
	"os"

	_ "github.com/hasplock/hasp/etcdlock"
	"github.com/hasplock/hasp/internal/cli"
	_ "github.com/hasplock/hasp/pglock"
)

var strategies = []cli.Strategy{
	{Name: "pglock", Reach: "network", Order: "none", Fence: true, URL: "pglock+postgres://user@localhost:5432/app",
		About: "a PostgreSQL; a release wakes the waiters; a fence can be checked in the transaction that it guards"},
	{Name: "etcdlock", Reach: "network", Order: cli.InOrder, Fence: true, URL: "etcdlock+etcd://host1:2379,host2:2379,host3:2379",
		About: "an etcd; first come, first served; a consensus keeps the locks"},
}

func main() { os.Exit(cli.Main(strategies...)) }
