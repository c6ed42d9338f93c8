// Command torture injects faults into PostgreSQL and etcd servers, and into programs that
// keep their locks there. It checks what github.com/hasplock/hasp/internal/torture checks,
// and has its flags. From the directory all:
//
//	go run ./torture [-strategy pglock,etcdlock] [-seed N] [-time 60s] [-faults REGEXP]
package main

import (
	"time"

	"github.com/hasplock/hasp/internal/torture/rig"
)

func main() {
	rig.Main(rig.Program{
		Command: "cd all && go run ./torture",
		Package: "github.com/hasplock/hasp/all/torture",
		More: []rig.Strategy{
			{Name: "pglock", Term: time.Second, Open: openPostgres},
			// The shortest term of etcd.
			{Name: "etcdlock", Term: 2 * time.Second, Open: openEtcd},
		},
	})
}
