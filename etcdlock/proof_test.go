package etcdlock_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/etcdlock"
	"github.com/hasplock/hasp/internal/await"
)

// A keep-alive that etcd has confirmed does not prove that the lease lives. etcd may confirm it
// for a lease that it is just revoking (https://github.com/etcd-io/etcd/pull/20590), and a leader
// that was deposed may confirm it (https://github.com/etcd-io/etcd/issues/15247) or revoke a lease
// that the new leader keeps alive (https://github.com/etcd-io/etcd/pull/16822). These tests forge
// such answers.

// revoke ends the lease of the only entry of a key.
func revoke(t *testing.T, client *clientv3.Client, key string) {
	r, err := client.Get(context.Background(), "hasp/"+key+"/", clientv3.WithPrefix(), clientv3.WithSort(clientv3.SortByCreateRevision, clientv3.SortDescend))
	if err == nil {
		_, err = client.Revoke(context.Background(), clientv3.LeaseID(r.Kvs[0].Lease))
	}
	if err != nil {
		t.Error(err)
	}
}

// A renewal fails if the entry is gone, even if etcd confirms the keep-alive, and even if the
// entry was there when the keep-alive was sent. A keep-alive that a deposed leader has confirmed is
// not taken for a renewal.
func TestRenewalOfARevokedLease(t *testing.T) {
	t.Parallel()
	at := startOne(t)
	client := plainClient(t, at)
	for _, name := range []string{"at once", "late", "not in time", "deposed leader"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d, m := openMeddled(t, at, nil)
			c := take(t, d, name, long)
			ctx, cancel := brief()
			defer cancel()
			m.changing(func(msg any) {
				r, ok := msg.(*pb.LeaseKeepAliveResponse)
				switch {
				case !ok:
				case name == "deposed leader":
					r.Header.RaftTerm--
				default:
					if name == "late" {
						time.Sleep(time.Second)
					}
					revoke(t, client, c.Key)
					r.TTL = 300
				}
			})
			if name == "not in time" {
				revoke(t, client, c.Key)
				m.silence("LeaseKeepAlive", 1)
			}

			err := renewWithin(ctx, d, c)
			if name != "deposed leader" {
				if !errors.Is(err, backend.ErrLost) {
					t.Errorf("renewal of a lease that was revoked: %v, want ErrLost", err)
				}
				return
			}
			if err == nil || errors.Is(err, backend.ErrLost) {
				t.Errorf("renewal that a deposed leader has confirmed: %v, want an error of unknown outcome", err)
			}
			m.changing(nil)
			await.Must(t, renew(d, c))
		})
	}
}

// The lease of a waiter is revoked just before the key becomes its own, or just after that while etcd
// confirms the keep-alive. The waiter does not get the key by the entry that is gone.
func TestGrantOfARevokedLease(t *testing.T) {
	t.Parallel()
	at := startOne(t)
	h, client := openDriver(t, at), plainClient(t, at)
	for _, key := range []string{"before", "after"} {
		d, m := openMeddled(t, at, nil)
		suspend := etcdlock.Suspendable(d)
		held, w := lineUp(t, h, d, renewable(key))
		revoked := key == "before"
		if revoked {
			revoke(t, client, key)
		} else {
			m.changing(func(msg any) {
				switch msg := msg.(type) {
				case *pb.WatchResponse: // has the end of the first hold
					for _, e := range msg.Events {
						if revoked && e.Type == mvccpb.Event_DELETE {
							e.Kv.Key = []byte("hasp/lost") // the waiter does not learn of the end of its entry
						}
						suspend(3 * time.Second) // so the waiter sends a keep-alive before it takes the key
					}
				case *pb.LeaseKeepAliveRequest:
					if !revoked {
						revoked = true
						revoke(t, client, key)
					}
				case *pb.LeaseKeepAliveResponse:
					msg.TTL = 5
				}
			})
		}
		free(t, h, held)
		w.granted(t)
		if !revoked {
			t.Fatal("the waiter sent no keep-alive")
		}
		if _, err := acquire(h, claimFor(key, time.Minute)); !errors.Is(err, backend.ErrHeld) {
			t.Errorf("a second holder of %s: %v, want ErrHeld", key, err)
		}
	}
}

// A waiter gets the key although its lease is revoked, or its keep-alive is stuck, or the event of
// the release is lost.
func TestFaultsOfAWaiter(t *testing.T) {
	t.Parallel()
	at := startOne(t)
	h := openDriver(t, at)
	places := func() []string { return await.Value(entries(t.Context(), at)) }
	for what, fault := range map[string]func(m *meddler){
		"its lease is revoked": func(*meddler) {
			revoke(t, plainClient(t, at), "key")
			queued(t, h, "key", 1)
		},
		"its keep-alive is stuck": func(m *meddler) {
			m.silence("LeaseKeepAlive", 1)
			before := places()
			time.Sleep(8 * time.Second) // the window is 5 s
			if after := places(); !slices.Equal(after, before) {
				t.Errorf("the entries are %q, and were %q", after, before)
			}
		},
		"its event is lost": func(m *meddler) {
			m.changing(func(msg any) {
				if r, ok := msg.(*pb.WatchResponse); ok {
					r.Events = nil
				}
			})
		},
	} {
		t.Log(what)
		d, m := openMeddled(t, at, nil)
		handOver(t, h, d, func(backend.Claim) { fault(m) })
		d.Close() // ends its leases
	}
}

// Another driver removes the entry of a waiter, and ends its lease late. The waiter has lost the
// event of the removal, or the reply to its put. The late end does not end the hold that it gets.
func TestLateEndOfAWaitersLease(t *testing.T) {
	t.Parallel()
	at := startOne(t)
	h := openDriver(t, at)
	for _, what := range []string{"event", "reply"} {
		d, m := openMeddled(t, at, &etcdlock.Options{Window: time.Minute})
		other, slow := openMeddled(t, at, nil)
		removed, goOn := slow.stop("LeaseRevoke")
		ended := make(chan error)
		held, c := take(t, h, what, long), renewable(what)
		remove := func() { ended <- other.Release(t.Context(), c) }
		m.changing(func(msg any) {
			if r, ok := msg.(*pb.WatchResponse); ok && len(r.Events) > 0 {
				r.Canceled, r.Events = true, nil
			}
		})
		if what == "reply" {
			m.set(nil, func(method string) error {
				if method == "Txn" {
					go remove()
					<-removed
					m.set(nil, nil)
					return lost
				}
				return nil
			})
		}
		w := wantsAs(t, d, c)
		if what == "event" {
			queued(t, h, what, 1)
			go remove()
		}
		<-removed
		queued(t, h, what, 1)
		free(t, h, held)
		c = w.granted(t)
		close(goOn)
		await.Must(t, <-ended)
		if err := renew(d, c); err != nil {
			t.Errorf("after a lost %s: %v", what, err)
		}
	}
}

// Keep-alives are stuck, as many as may be under way at once. Only the renewals of those leases fail,
// and the next ones succeed.
func TestStuckKeepAlives(t *testing.T) {
	t.Parallel()
	d, m := openMeddled(t, startOne(t), nil)
	var cs []backend.Claim
	for i := range 64 {
		cs = append(cs, take(t, d, fmt.Sprint("stuck-", i), long))
	}
	failed := func() (n int) {
		ctx, cancel := brief()
		defer cancel()
		for _, err := range renewAll(ctx, d, cs) {
			if err != nil {
				n++
			}
		}
		return n
	}
	for _, stuck := range []int{1, len(cs)} {
		m.silence("LeaseKeepAlive", stuck)
		if n := failed(); n != stuck {
			t.Errorf("%d of 64 renewals failed, want %d", n, stuck)
		}
		if n := failed(); n != 0 {
			t.Errorf("%d of 64 renewals failed after that, want none", n)
		}
	}
}

// A waiter gets the key, and moves its entry to another lease. Its keep-alive for the old lease
// arrives after that. The next waiter of the driver does not get the key as well.
func TestKeepAliveAfterTheGrant(t *testing.T) {
	t.Parallel()
	at := startOne(t)
	d, m := openMeddled(t, at, nil)
	h := openDriver(t, at)
	held := take(t, h, "key", long)
	before := await.Value(entries(t.Context(), at))
	first := wants(t, d, "key")
	queued(t, h, "key", 1)
	old := slices.DeleteFunc(await.Value(entries(t.Context(), at)), func(e string) bool { return slices.Contains(before, e) })
	next := wants(t, d, "key")
	queued(t, h, "key", 2)

	var late atomic.Bool
	sent, arrives := make(chan struct{}), make(chan struct{})
	m.changing(func(msg any) {
		if _, ok := msg.(*pb.LeaseKeepAliveRequest); ok && !late.Swap(true) {
			close(sent)
			<-arrives
		}
	})
	<-sent
	free(t, h, held)
	c := first.granted(t)
	await.Until(t, "the end of the old lease", func() bool {
		return !slices.Contains(await.Value(entries(t.Context(), at)), old[len(old)-1])
	})
	close(arrives)
	time.Sleep(500 * time.Millisecond)
	if len(next) > 0 {
		t.Error("two waiters have the key")
	}
	free(t, d, c)
	free(t, d, next.granted(t))
}
