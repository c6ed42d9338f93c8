//go:build unix

package etcdlock_test

import (
	"errors"
	"testing"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/etcdtest"
)

// Two clusters would grant the same key to two holders.
func TestMembersOfTwoClusters(t *testing.T) {
	t.Parallel()
	a, b := etcdtest.Start(t, 1)[0], etcdtest.Start(t, 1)[0]
	for _, hosts := range []string{a.Client + "," + b.Client, b.Client + "," + a.Client} {
		refused(t, "etcd://"+hosts, false, "belong to different etcd clusters", "name the members")
	}

	// The second answers only after the first has granted a lock.
	await.Must(t, b.Pause())
	at := "etcdlock+etcd://" + a.Client + "," + b.Client + "?ttl=10s"
	c := await.Value(hasp.Open(t.Context(), at, nil))
	defer c.Close()
	lost := await.Value(c.Lock(t.Context(), "key")).Context()
	await.Must(t, errors.Join(a.Pause(), b.Resume()))
	for lost.Err() == nil {
		if _, err := c.TryLock(t.Context(), "other"); err == nil {
			t.Fatal("the second cluster has granted a lock")
		}
	}
}
