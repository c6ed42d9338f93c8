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
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redistest"
	"github.com/hasplock/hasp/spinlock"
)

// list returns the keys of a list, in order.
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

// TestListOfEveryStrategy lists locks on every topology. The keys of a cluster are on all of
// its masters.
func TestListOfEveryStrategy(t *testing.T) {
	redistest.NeedSets(t)
	one := redistest.Start(t, nil).URL()
	sentinel := redistest.StartSentinel(t, nil).URL()
	cluster := redistest.StartCluster(t, &redistest.Options{Bare: true})
	drivers := map[string]func() (backend.Driver, error){
		"spinlock on a cluster client": func() (backend.Driver, error) {
			var addrs []string
			for _, srv := range cluster.Servers {
				addrs = append(addrs, srv.Addr)
			}
			rdb := redis.NewClusterClient(&redis.ClusterOptions{Addrs: addrs})
			t.Cleanup(func() { rdb.Close() })
			return spinlock.New(rdb, nil), nil
		},
	}
	by := func(name, url string) {
		drivers[name] = func() (backend.Driver, error) {
			c, err := hasp.ParseURL(url)
			if err != nil {
				return nil, err
			}
			return c.Driver(t.Context())
		}
	}
	by("memlock", "memlock://list")
	by("filelock", "filelock://"+t.TempDir())
	by("redlock", "redlock+"+redistest.StartNodes(t, 3, nil).URL())
	for _, s := range sharing {
		by(s.name, s.name+"+"+one)
		by(s.name+" on a sentinel's master", s.name+"+"+sentinel)
		by(s.name+" on a cluster", s.name+"+"+cluster.URL())
	}
	for name, open := range drivers {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			prefix := t.Name() + ":"
			client := func() *hasp.Client {
				d, err := open()
				must(t, err)
				c := hasp.New(d, &hasp.Options{Prefix: prefix})
				t.Cleanup(func() { c.Close() })
				return c
			}
			holder, other := client(), client()
			var want []string
			for i := range 40 {
				key := fmt.Sprint("key ", i)
				l, err := holder.TryLock(t.Context(), key)
				must(t, err)
				defer l.Unlock(context.WithoutCancel(t.Context()))
				want = append(want, key)
			}
			slices.Sort(want)
			got, err := list(t.Context(), other, "")
			if err != nil || !slices.Equal(got, want) {
				t.Errorf("got %q, %v, want %q", got, err, want)
			}
			got, err = list(t.Context(), other, "key 3")
			if err != nil || len(got) != 11 {
				t.Errorf("by a prefix: got %q, %v", got, err)
			}
		})
	}
}

// lists uses what a list of a strategy needs.
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
