// Command etcd is the server of etcd 3.7, for the tests of etcdlock. It takes the flags of
// etcd. It is a module of its own, because the driver needs none of it:
//
//	cd etcdlock/internal/etcd && go build -o /tmp/etcd .
//	cd ../.. && HASP_TEST_ETCD=/tmp/etcd go test ./...
package main

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
)

func main() { etcdmain.Main(os.Args) }
