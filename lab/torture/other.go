package main

import (
	"context"
	"time"

	"github.com/hasplock/hasp/internal/redistest"
)

// others are the strategies that need neither Redis nor files.
var others = map[string]struct {
	term  time.Duration // of all leases
	start func(*redistest.Lab) *other
}{
	"pglock":   {time.Second, startPostgres},
	"etcdlock": {2 * time.Second, startEtcd}, // the shortest term that etcd grants
}

// other is the store of a strategy of others. Clients reach each of its servers through a
// proxy of their own, which has the faults of links.
type other struct {
	what    string                                  // a description
	servers []string                                // the address of each server
	url     func(addrs []string) string             // of the servers, if clients reach them at addrs
	left    func(context.Context) ([]string, error) // lists what clients have left
	faults  func(all *catalog, losing bool)         // adds the faults of servers
	ready   func() error                            // waits, after each fault, until all servers work; may be nil
}

// anyRequest is an operation: the next bytes of a client, whatever they mean.
const anyRequest = "any request"

// ready waits until all servers work, after a fault.
func (s *store) ready() {
	if s.other != nil && s.other.ready != nil {
		s.Check(s.other.ready())
	}
}
