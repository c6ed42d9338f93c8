package etcdlock_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/conformance"
)

// TestRenewalsOverAFollower renews many holds by a member that is not the leader, and has a
// slow path to it.
func TestRenewalsOverAFollower(t *testing.T) {
	t.Parallel()
	needEtcd(t)

	// The members reach each other over links.
	servers, err := newServers(t.TempDir(), 3)
	if err != nil {
		t.Fatal(err)
	}
	var links []*conformance.Link
	for _, s := range servers {
		l, err := conformance.TCP(s.peer)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(l.Close)
		links = append(links, l)
	}
	for _, s := range servers {
		for i, arg := range s.args {
			switch s.args[max(i-1, 0)] {
			case "--initial-advertise-peer-urls":
				s.args[i] = "http://" + links[s.index].Store
			case "--initial-cluster":
				s.args[i] = ""
				for j, other := range servers {
					s.args[i] += fmt.Sprintf(",%s=http://%s", other.name, links[j].Store)
				}
				s.args[i] = s.args[i][1:]
			default:
				s.args[i] = arg
			}
		}
	}
	run(t, servers)

	var follower *server
	for _, s := range servers {
		if !s.isLeader() {
			follower = s
		}
	}
	d := openDriver(t, follower.client)
	var cs []backend.Claim
	for i := range 384 {
		cs = append(cs, take(t, d, fmt.Sprint("followed-", i), 5*time.Minute))
	}
	for i, s := range servers {
		if s.isLeader() {
			links[i].Set(conformance.Slow)
		}
	}

	// Eight streams would take 384/8 = 48 round trips for the keep-alives, and 64 take 6. The
	// read takes four.
	renewal := func(cs []backend.Claim) time.Duration {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		began := time.Now()
		d.Renew(ctx, cs, func(i int, _ backend.Grant, err error) {
			if err != nil {
				t.Errorf("renewal %d: %v", i, err)
			}
		})
		return time.Since(began)
	}
	renewal(cs[:8]) // makes the connections between the members
	one := renewal(cs[:1])
	all := renewal(cs)
	t.Logf("1 renewal took %v, %d took %v", one, len(cs), all)
	if all > 6*max(one, 4*conformance.Delay) {
		t.Errorf("%d renewals over a follower took %v, and one took %v: want 6 times that at most", len(cs), all, one)
	}
}
