// Command torture injects faults into PostgreSQL and etcd servers, and into programs that
// keep their locks there. It checks what github.com/hasplock/hasp/internal/torture checks,
// and has its flags. From the directory all:
//
//	go run ./torture [-strategy pglock,etcdlock,concurrency,hasp-etcdlock] [-on hosts] [-seed N] [-time 60s] [-faults REGEXP]
package main

import (
	"time"

	"github.com/hasplock/hasp/internal/torture/rig"
)

// term is the shortest term that etcd grants. A call may take half of it, 1 s. On hosts a call
// passes at most three links of 200 ms there and back: to a member, to the leader, and to a
// majority.
const term = 2 * time.Second

func main() {
	rig.Main(rig.Program{
		Command: "cd all && go run ./torture",
		Package: "github.com/hasplock/hasp/all/torture",
		More: []rig.Strategy{
			// On hosts a call may need a new connection, which takes three round trips more.
			{Name: "pglock", Term: time.Second, HostTerm: 2 * time.Second, Open: openPostgres},
			{Name: "etcdlock", Term: term, Open: openEtcd},

			// The same faults, for programs that do only what all libraries can do.
			{Name: "concurrency", Term: term, Open: openPlainEtcd, Client: openConcurrency},
			{Name: "hasp-etcdlock", Term: term, Open: openPlainEtcd, Client: openHasp},
		},
	})
}
