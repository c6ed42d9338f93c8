// Command hasp-all is the command github.com/hasplock/hasp/cmd/hasp with more strategies: for
// PostgreSQL, etcd, Kubernetes, NATS, S3, MariaDB, MySQL and SQLite. It is in a module of its own,
// so that programs that import package hasp do not depend on the clients of these stores.
package main

import (
	"os"

	_ "github.com/hasplock/hasp/caslock/k8slease"
	_ "github.com/hasplock/hasp/caslock/natskv"
	_ "github.com/hasplock/hasp/caslock/s3kv"
	_ "github.com/hasplock/hasp/caslock/sqlkv/mysql"
	_ "github.com/hasplock/hasp/caslock/sqlkv/sqlite"
	_ "github.com/hasplock/hasp/etcdlock"
	"github.com/hasplock/hasp/internal/cli"
	_ "github.com/hasplock/hasp/pglock"
)

var strategies = []cli.Strategy{
	{Name: "pglock", Reach: "network", Order: "none", URL: "pglock+postgres://user@localhost:5432/app",
		About: "a PostgreSQL; a release wakes the waiters; a fence can be checked in the transaction that it guards"},
	{Name: "etcdlock", Reach: "network", Order: cli.InOrder, URL: "etcdlock+etcd://host1:2379,host2:2379,host3:2379",
		About: "an etcd; first come, first served; a consensus keeps the locks"},
	{Name: "kube", Reach: "network", Order: "none", URL: "kube:///namespace",
		About: "Lease objects of a Kubernetes namespace, also beside client-go's leader election; polling"},
	{Name: "nats", Reach: "network", Order: "none", URL: "nats://user:password@localhost:4222/locks",
		About: "a bucket of NATS JetStream; a change wakes the waiters"},
	{Name: "s3", Reach: "network", Order: "none", URL: "s3://bucket/locks?region=eu-west-1",
		About: "objects of an S3 bucket with conditional writes; polling"},
	{Name: "mysql", Reach: "network", Order: "none", URL: "mysql://user:password@localhost:3306/app",
		About: "a table of a MariaDB or a MySQL; polling"},
	{Name: "sqlite", Reach: "host", Order: "none", URL: "sqlite:///var/lib/app/locks.db",
		About: "an SQLite file of its own; polling"},
}

func main() { os.Exit(cli.Main(strategies...)) }
