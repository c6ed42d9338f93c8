package etcdlock_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/conformance"
	"github.com/hasplock/hasp/internal/etcdtest"
)

// TestRenewalsOverAFollower renews many holds by a member that is not the leader, and has a
// slow path to it.
func TestRenewalsOverAFollower(t *testing.T) {
	t.Parallel()
	etcdtest.Need(t)

	// The members reach each other over links.
	servers, err := newServers(t.TempDir(), 3)
	if err != nil {
		t.Fatal(err)
	}
	var links []*conformance.Link
	var cluster []string
	for _, s := range servers {
		l := linkTo(t, s.Peer)
		links, cluster = append(links, l), append(cluster, s.Name+"=http://"+l.Store)
	}
	for i, s := range servers {
		s.Args = append(s.Args, "--initial-advertise-peer-urls", "http://"+links[i].Store, "--initial-cluster", strings.Join(cluster, ","))
	}
	etcdtest.Run(t, servers)

	leader := slices.Index(servers, leaderOf(t, servers))
	d := openDriver(t, servers[(leader+1)%3].Client)
	var cs []backend.Claim
	for i := range 384 {
		cs = append(cs, take(t, d, fmt.Sprint("followed-", i), 5*time.Minute))
	}
	links[leader].Set(conformance.Slow)

	// Eight streams would take 384/8 = 48 round trips for the keep-alives, and 64 take 6. The
	// read takes four.
	renewal := func(cs []backend.Claim) time.Duration {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		began := time.Now()
		for i, err := range renewAll(ctx, d, cs) {
			if err != nil {
				t.Errorf("renewal %d: %v", i, err)
			}
		}
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
