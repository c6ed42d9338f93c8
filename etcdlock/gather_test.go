package etcdlock_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/etcdlock"
	"github.com/hasplock/hasp/internal/await"
)

// crowd is a driver whose flights are all stopped, and callers whose changes wait for them.
type crowd struct {
	store  string
	d      *etcdlock.Driver
	m      *meddler
	goOn   chan struct{} // when it is closed, the flights go on
	ctx    context.Context
	cancel context.CancelFunc // ends the calls of the callers that wait

	wg   sync.WaitGroup
	mu   sync.Mutex // guards the fields below
	txns int        // how many transactions were sent
	ends map[string][]error
}

// gathered returns a crowd of callers with these claims.
func gathered(t *testing.T, claims ...backend.Claim) *crowd {
	store := startOne(t)
	d, meddler := openMeddled(t, store, nil)
	c := &crowd{store: store, d: d, m: meddler, goOn: make(chan struct{}), ends: map[string][]error{}}
	c.ctx, c.cancel = context.WithTimeout(t.Context(), patience)
	t.Cleanup(c.cancel)
	meddler.set(func(method string) error {
		if method == "Txn" {
			c.mu.Lock()
			c.txns++
			c.mu.Unlock()
			<-c.goOn
		}
		return nil
	}, nil)

	for i := range etcdlock.MaxFlights {
		c.acquire(t.Context(), claimFor(fmt.Sprint("flight-", i), time.Hour))
	}
	await.Until(t, "the flights", func() bool { return c.sent() == etcdlock.MaxFlights })
	for _, claim := range claims {
		c.acquire(c.ctx, claim)
	}
	await.Until(t, "the callers that wait", func() bool { return d.Waiting() == len(claims) })
	return c
}

func (c *crowd) acquire(ctx context.Context, claim backend.Claim) {
	c.wg.Go(func() {
		g, err := c.d.Acquire(ctx, claim)
		if err == nil && g.Fence == 0 {
			err = errors.New("the grant has no fence")
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		c.ends[claim.Key] = append(c.ends[claim.Key], err)
	})
}

// sent returns how many transactions were sent.
func (c *crowd) sent() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.txns
}

// end lets the flights go on, and waits for all callers.
func (c *crowd) end() {
	close(c.goOn)
	c.wg.Wait()
}

// granted returns how many callers got the key.
func (c *crowd) granted(key string) (n int) {
	for _, err := range c.ends[key] {
		if err == nil {
			n++
		}
	}
	return n
}

// Callers that wait go together, but never two of one key, because both would find it free.
func TestCallersOfOneKeyDoNotGoTogether(t *testing.T) {
	t.Parallel()
	var claims []backend.Claim
	for i := range 30 {
		claims = append(claims, claimFor(fmt.Sprint("key-", i/2), time.Minute))
	}
	c := gathered(t, claims...)
	c.end()
	for i := range 15 {
		key := fmt.Sprint("key-", i)
		if n := c.granted(key); n != 1 {
			t.Errorf("%d callers got the key %s at once", n, key)
		}
	}
	if n := c.sent() - etcdlock.MaxFlights; n > 6 {
		t.Errorf("30 callers took %d transactions, want few", n)
	}
}

// If etcd refuses a transaction because of one caller, the others get their keys.
func TestARefusalEndsOnlyItsCaller(t *testing.T) {
	t.Parallel()
	bad := claimFor("bad", time.Minute)
	bad.Owner = strings.Repeat("x", 2<<20)
	c := gathered(t, claimFor("a", time.Minute), bad, claimFor("b", time.Minute))
	c.end()
	if c.granted("a")+c.granted("b") != 2 {
		t.Errorf("the other callers failed: %v, %v", c.ends["a"], c.ends["b"])
	}
	if err := c.ends["bad"][0]; !errors.Is(err, backend.ErrInvalid) {
		t.Errorf("an owner of 2 MB: %v", err)
	}
}

// If the leases of some callers have ended, those callers take other ones. The others keep theirs.
func TestLeasesThatHaveEndedInACrowd(t *testing.T) {
	t.Parallel()
	var claims []backend.Claim
	for i := range 10 {
		claims = append(claims, claimFor(fmt.Sprint("key-", i), time.Hour))
	}
	c := gathered(t, claims...)
	etcd := plainClient(t, c.store)
	for i, l := range await.Value(etcd.Leases(t.Context())).Leases {
		if i%2 == 0 {
			await.Value(etcd.Revoke(t.Context(), l.ID))
		}
	}
	c.end()
	for _, claim := range claims {
		if c.granted(claim.Key) != 1 {
			t.Errorf("%s: %v", claim.Key, c.ends[claim.Key])
		}
	}
	await.Success(t, "one lease for each hold", func() error {
		all, err := etcd.Leases(t.Context())
		if err != nil {
			return err
		}
		if n := len(all.Leases); n != len(claims)+etcdlock.MaxFlights {
			return fmt.Errorf("%d leases, but %d holds", n, len(claims)+etcdlock.MaxFlights)
		}
		return nil
	})
}

// left waits until the callers of a and b have left.
func (c *crowd) left(t *testing.T) {
	await.Until(t, "the end of the calls", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return len(c.ends["a"])+len(c.ends["b"]) == 2
	})
}

// A caller that leaves before its change was sent knows that it has changed nothing.
func TestACallerThatLeavesWhileItsChangeWaits(t *testing.T) {
	t.Parallel()
	c := gathered(t, claimFor("a", time.Minute), claimFor("b", time.Minute))
	c.cancel()
	c.left(t)
	for _, key := range []string{"a", "b"} {
		if err := c.ends[key][0]; !errors.Is(err, context.Canceled) || !etcdlock.Unchanged(err) {
			t.Errorf("%s: %v, want the end of the context, and that nothing has changed", key, err)
		}
	}
	c.end()
	if n := c.sent(); n != etcdlock.MaxFlights {
		t.Errorf("%d transactions were sent, want only the %d of the others", n, etcdlock.MaxFlights)
	}
}

// A caller that leaves after its change was sent does not know the outcome.
func TestACallerThatLeavesAfterItsChangeWasSent(t *testing.T) {
	t.Parallel()
	c := gathered(t, claimFor("a", time.Minute), claimFor("b", time.Minute))
	began, goOn := c.m.stop("Txn")
	close(c.goOn)
	<-began // both changes, in one transaction
	c.cancel()
	c.left(t)
	close(goOn)
	c.wg.Wait()
	for key, ends := range c.ends {
		if errors.Is(ends[0], context.Canceled) && etcdlock.Unchanged(ends[0]) {
			t.Errorf("%s: nothing has changed, says %v", key, ends[0])
		}
	}
}
