package acceptance

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/spinlock"
)

func list(ctx context.Context, c *hasp.Client, prefix string) ([]string, error) {
	keys := map[string]bool{}
	for e, err := range c.List(ctx, prefix) {
		if err != nil {
			return nil, err
		}
		keys[e.Key] = true
	}
	return slices.Sorted(maps.Keys(keys)), nil
}

// The keys of a cluster are on all of its masters. A strategy finds the masters in another way if a
// program passes it a client than if it is opened by a URL, as in the suite.
func TestListOverAClusterClient(t *testing.T) {
	redistest.NeedSets(t)
	t.Parallel()
	var addrs []string
	for _, srv := range redistest.StartCluster(t, &redistest.Options{Bare: true}).Servers {
		addrs = append(addrs, srv.Addr)
	}
	rdb := redis.NewClusterClient(&redis.ClusterOptions{Addrs: addrs})
	t.Cleanup(func() { rdb.Close() })
	c := await.Value(spinlock.New(rdb, nil))
	t.Cleanup(func() { c.Close() })

	for i := range 40 {
		await.Value(c.Lock(t.Context(), fmt.Sprint("key ", i)))
	}
	if got, err := list(t.Context(), c, "key "); err != nil || len(got) != 40 {
		t.Errorf("got %q, %v, want 40 keys", got, err)
	}
}

// lists is the use of a place that makes a list.
func lists(ctx context.Context, url, name string, _ time.Duration) error {
	c, err := hasp.Open(ctx, url, nil)
	if err != nil {
		return err
	}
	defer c.Close()
	l, err := c.TryLock(ctx, name, hasp.WithoutRenewal())
	if err != nil {
		return err
	}
	keys, err := list(ctx, c, "")
	if err == nil && !slices.Contains(keys, name) {
		err = fmt.Errorf("not listed, among %q", strings.Join(keys, " "))
	}
	return errors.Join(err, l.Unlock(context.WithoutCancel(ctx)))
}
