package redlock

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/hasplock/hasp/backend"
)

func aReader(key string) backend.Claim {
	c := aClaim(key)
	c.Shared = true
	return c
}

// A node that lost its data gets a reader back next to others.
func TestReadersAreRepaired(t *testing.T) {
	try(t, 3, nil, func(t *testing.T, tr trial) {
		one, two := aReader("k"), aReader("k")
		tr.acquire(t, tr.d, one)
		tr.acquire(t, tr.d, two)
		synctest.Wait()
		tr.vs[2].Mini.Del("k")
		for _, c := range []backend.Claim{one, two} {
			if err := renewOne(tr.d, c, time.Second); err != nil {
				t.Errorf("renewal: %v", err)
			}
			synctest.Wait()
		}
		if members, err := tr.vs[2].Mini.ZMembers("k"); err != nil || len(members) != 2 {
			t.Errorf("node 2 has %q, %v", members, err)
		}
		tr.release(t, tr.d, one)
		tr.release(t, tr.d, two)
		synctest.Wait()
		nothingLeft(t, "released", tr.vs)
	})
}
