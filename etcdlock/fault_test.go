package etcdlock_test

import (
	"context"
	"errors"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/conformance"
	"github.com/hasplock/hasp/etcdlock"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/faultproxy"
)

// survives takes a key and lets others wait for it, breaks something, and checks that the
// hold and the waiter go on. fault gets the member that both use, and returns what mends it.
func survives(t *testing.T, at string, fault func(member string) (mend func())) {
	t.Helper()
	a, b, other := openDriver(t, at), openDriver(t, at), openDriver(t, at)
	for a.Member() != b.Member() {
		b = openDriver(t, at)
	}
	key := t.Name()
	c, w := lineUp(t, a, b, claimFor(key, time.Minute))

	mend := fault(a.Member())
	eventually(t, "a renewal after the fault", func() error {
		err := renew(a, c)
		if errors.Is(err, backend.ErrLost) {
			t.Fatal("the hold was lost")
		}
		return err
	})
	eventually(t, "a call of another driver", func() error {
		_, err := acquire(other, claimFor(key, time.Minute))
		if err == nil {
			t.Fatal("a second driver was granted a held key")
		}
		if !errors.Is(err, backend.ErrHeld) {
			return err
		}
		return nil
	})
	eventually(t, "the release", func() error {
		err := release(a, c)
		if errors.Is(err, backend.ErrLost) {
			return nil // the release before, whose answer was lost
		}
		return err
	})
	next := w.granted(t)
	eventually(t, "the waiter's renewal", func() error { return renew(b, next) })
	mend()
	eventually(t, "the waiter's release", func() error { return release(b, next) })
	isFree(t, other, key)
}

// TestMembers breaks one of three members, or two.
func TestMembers(t *testing.T) {
	t.Parallel()
	servers := startServers(t, 3)
	at := func(host string) *server {
		return servers[slices.IndexFunc(servers, func(s *server) bool { return s.Client == host })]
	}
	killed := func(s *server) func() {
		s.Kill()
		return func() { await.Must(t, start(t.Context(), s)) }
	}
	stopped := func(s *server) func() { return pause(t, s) }

	for name, fault := range map[string]func(s *server) (mend func()){"killed": killed, "stopped": stopped} {
		t.Run("theirs is "+name, func(t *testing.T) {
			survives(t, hosts(servers), func(member string) func() { return fault(at(member)) })
		})
		t.Run("the leader is "+name, func(t *testing.T) {
			survives(t, hosts(servers), func(string) func() { return fault(leaderOf(t, servers)) })
		})
	}
	t.Run("theirs is cut off from the others", func(t *testing.T) {
		// Its peers are stopped, and then go on. It answers TCP all the time.
		survives(t, hosts(servers), func(member string) func() {
			lonely := await.Value(etcdlock.NewDriver(clientv3.Config{Endpoints: []string{member}}, nil))
			defer lonely.Close()
			var mends []func()
			for _, s := range servers {
				if s.Client != member {
					mends = append(mends, pause(t, s))
				}
			}
			_, err := acquire(lonely, claimFor("x", time.Minute))
			for _, resume := range mends {
				resume()
			}
			if err == nil || errors.Is(err, backend.ErrHeld) {
				t.Errorf("acquire without a majority: %v, want an outage", err)
			}
			return func() {}
		})
	})

	t.Run("paths are cut off or slow", func(t *testing.T) {
		for _, state := range []conformance.LinkState{conformance.Hung, conformance.Down, conformance.Slow} {
			t.Run(string(state), func(t *testing.T) {
				links := map[string]*conformance.Link{}
				var all []string
				for _, s := range servers {
					l := linkTo(t, s.Client)
					links[l.Store] = l
					all = append(all, l.Store)
				}
				survives(t, strings.Join(all, ","), func(member string) func() {
					links[member].Set(state)
					return func() { links[member].Set(conformance.Up) }
				})
			})
		}
	})
}

// TestMemberThatFailsInASearch has the connection of a member fail when the member has just
// answered a search. The search must not bring it back: it is closed. Its answer ends the silence.
func TestMemberThatFailsInASearch(t *testing.T) {
	t.Parallel()
	s := startServers(t, 1)[0]
	d := openDriver(t, s.Client)
	silent, err := d.LeaveInSearch(func() (resume func()) { return pause(t, s) })
	if err == nil && !silent.IsZero() {
		t.Errorf("silent since %v, although a member has answered", silent)
	}
	take(t, d, "key", time.Minute)
}

// TestCallsThatFailAtOnce has each call fail immediately, without an answer of the member. The
// driver checks its member at intervals, and finds another connection even if no call is under way.
func TestCallsThatFailAtOnce(t *testing.T) {
	t.Parallel()
	d := openDriver(t, startOne(t))
	d.CutMember()
	c := claimFor("key", time.Minute)
	eventually(t, "a call on a new connection", func() error {
		_, err := acquire(d, c)
		if err != nil {
			time.Sleep(500 * time.Millisecond) // the driver looks each 200 ms
		}
		return err
	})
}

// A member answers that one call timed out, as etcd does if the deadline of the call passes while
// it is committed. Other calls to that member go on.
func TestATimeoutOfOneCallEndsNoOther(t *testing.T) {
	t.Parallel()
	d, m := openMeddled(t, startOne(t), nil)
	take(t, d, "k", time.Minute)
	began, goOn := m.stop("Range")
	inspected := make(chan error, 1)
	go func() {
		_, err := d.Inspect(context.Background(), "k")
		inspected <- err
	}()
	<-began
	m.set(failing("LeaseGrant", rpctypes.ErrGRPCTimeout), nil)
	if _, err := acquire(d, claimFor("other", time.Minute)); err == nil || errors.Is(err, backend.ErrHeld) {
		t.Errorf("acquire: %v, want an outage", err)
	}
	m.set(nil, nil)
	close(goOn)
	await.Must(t, <-inspected)
}

// A call gives up the member while Close ends. The race detector would report an access without mu.
func TestCloseDuringACallThatFails(t *testing.T) {
	t.Parallel()
	d, m := openMeddled(t, startOne(t), nil)
	m.set(func(method string) error {
		if method == "LeaseGrant" {
			go d.Close()
			time.Sleep(500 * time.Millisecond) // a signal would order the accesses
			return rpctypes.ErrGRPCNoLeader
		}
		return nil
	}, nil)
	_, _ = acquire(d, claimFor("key", time.Minute))
}

// TestNoSpace uses up the quota of etcd. Then holds go on and can be released, and no
// key can be taken until an operator has made room.
func TestNoSpace(t *testing.T) {
	t.Parallel()
	servers := startServers(t, 1, "--quota-backend-bytes", "1000000")
	d, m := openMeddled(t, hosts(servers), &etcdlock.Options{Window: time.Minute})
	client := plainClient(t, hosts(servers))
	ctx := context.Background()
	c := take(t, d, "before", long)

	// The lease of a hold that was waited for has the term of the window. The first renewal
	// would move the hold to another lease.
	waited := renewable("waited for")
	waited = wantsAs(t, d, waited).granted(t)

	for full := error(nil); full == nil; {
		_, full = client.Put(ctx, "filler", strings.Repeat("x", 100_000))
	}
	_, err := acquire(d, claimFor("after", time.Minute))
	if err == nil || errors.Is(err, backend.ErrHeld) || errors.Is(err, backend.ErrInvalid) || !strings.Contains(err.Error(), "etcdctl alarm disarm") {
		t.Errorf("acquire without space: %v, want an outage that says what to do", err)
	}

	// The context ends during a later call.
	within, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var grants atomic.Int32
	m.set(func(method string) error {
		if method == "LeaseGrant" && grants.Add(1) == 2 {
			cancel()
			return lost
		}
		return nil
	}, nil)
	if _, err := d.Wait(within, claimFor("after", time.Minute)); err == nil || !strings.Contains(err.Error(), "etcdctl alarm disarm") {
		t.Errorf("wait without space: %v, want an outage that says what to do", err)
	}
	m.set(nil, nil)
	await.Must(t, renew(d, c))
	free(t, d, c)
	began := time.Now()
	d.Renew(ctx, []backend.Claim{waited}, func(_ int, g backend.Grant, err error) {
		if err != nil || g.Until.Before(began.Add(30*time.Second)) || g.Until.After(time.Now().Add(time.Minute)) {
			t.Errorf("renewal without space of a hold that was waited for: %v, for %v, want the window of a minute", err, g.Until.Sub(began))
		}
	})

	r := await.Value(client.Get(ctx, "filler"))
	await.Value(client.Compact(ctx, r.Header.Revision, clientv3.WithCompactPhysical()))
	await.Value(client.Delete(ctx, "filler"))
	await.Value(client.Defragment(ctx, servers[0].Client))
	await.Value(client.AlarmDisarm(ctx, &clientv3.AlarmMember{}))
	await.Must(t, renew(d, waited))
	isFree(t, d, "after")
}

// TestWaitThatBeginsInAnOutage checks that the outage lasts for the timeout, and not for
// twice that.
func TestWaitThatBeginsInAnOutage(t *testing.T) {
	t.Parallel()
	link := linkTo(t, startOne(t))
	d := openDriver(t, link.Store)
	link.Set(conformance.Hung)

	c := claimFor("outage", time.Minute)
	c.Timeout = 4 * time.Second
	began := time.Now()
	_, err := d.Wait(context.Background(), c)
	took := time.Since(began)
	var outage *backend.UnavailableError
	if !errors.As(err, &outage) {
		t.Fatalf("wait in an outage: %v, want an outage", err)
	}
	if took > c.Timeout*3/2 {
		t.Errorf("a Wait with a timeout of %v that began in an outage took %v", c.Timeout, took)
	}
	if late := outage.Since.Sub(began); late > c.Timeout/2 {
		t.Errorf("the outage is said to have begun %v after the Wait", late)
	}
}

// An address leads to another etcd, with older data, where another caller holds the key. Callers
// that wait there do not get the key by what they have read from the first etcd. The second round
// is like a failover of one etcd: the waiters keep their places.
func TestAddressThatMoves(t *testing.T) {
	t.Parallel()
	a, b := startServers(t, 1)[0], startServers(t, 1)[0]
	for range 500 {
		await.Value(plainClient(t, a.Client).Put(t.Context(), "filler", ""))
	}
	var to atomic.Pointer[server]
	to.Store(a)
	p := faultproxy.New(func() (net.Conn, error) { return net.Dial("tcp", to.Load().Client) })
	t.Cleanup(p.Close)
	l := listen(t)
	p.Serve(l)
	d := openDriver(t, l.Addr().String())
	holder, other := openDriver(t, a.Client), openDriver(t, b.Client)
	take(t, holder, "key", long)
	held := take(t, other, "key", long)

	waits := make(chan backend.Claim, 3)
	for n := range cap(waits) {
		w := wants(t, d, "key")
		go func() { waits <- <-w }()
		queued(t, holder, "key", n+1)
	}
	for _, s := range []*server{b, b} {
		before := d.Connection()
		p.Down()
		to.Store(s)
		p.Up()
		queued(t, other, "key", cap(waits))
		time.Sleep(500 * time.Millisecond)
		if len(waits) > 0 {
			t.Fatal("a waiter got a key that another caller holds")
		}
		if d.Connection() == before {
			t.Error("the driver believes what it has read over a connection that has ended")
		}
	}
	free(t, other, held)
	for range cap(waits) {
		c := <-waits
		if err := renew(other, c); err != nil {
			t.Errorf("a waiter does not hold the key that it got: %v", err)
		}
		free(t, d, c)
	}
}

// etcd drops a call of a Wait, as at a change of the leader. The Wait repeats the call.
func TestDroppedCallOfAWait(t *testing.T) {
	t.Parallel()
	d, m := openMeddled(t, startOne(t), nil)
	c := claimFor("key", time.Minute)
	c.Timeout = 9 * time.Second
	m.silence("Txn", 1)
	ctx := await.Timeout(t, patience)
	g, err := d.Wait(ctx, c)
	await.Must(t, err)
	c.Handle = g.Handle
	free(t, d, c)
}
