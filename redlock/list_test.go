package redlock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
)

// listed lists the keys with prefix. It returns a map from each key to its status, and the error
// that ended the list.
func listed(ctx context.Context, d *driver, prefix string) (map[string]backend.Status, error) {
	all := map[string]backend.Status{}
	for e, err := range d.List(ctx, prefix, time.Second) {
		if err != nil {
			return all, err
		}
		if _, twice := all[e.Key]; twice {
			return all, fmt.Errorf("%q came twice", e.Key)
		}
		all[e.Key] = e.Status
	}
	return all, nil
}

// token is as long as the engine's.
const token = "AAAABBBBCCCCDDDDEEEEFF"

// put writes a record of a key to some nodes, for ttl.
func (tr trial) put(t *testing.T, key, record string, ttl time.Duration, nodes ...int) {
	t.Helper()
	for _, i := range nodes {
		if err := tr.vs[i].Mini.Set(key, record); err != nil {
			t.Fatal(err)
		}
		tr.vs[i].Mini.SetTTL(key, ttl)
	}
}

// A key is listed if a quorum has its record, whichever nodes these are.
func TestListOfAQuorum(t *testing.T) {
	try(t, 5, nil, func(t *testing.T, tr trial) {
		tr.put(t, "all", token+"#one", time.Minute, 0, 1, 2, 3, 4)
		tr.put(t, "first", token+"#two", time.Minute, 0, 1, 2)
		tr.put(t, "last", token+"~2#three", time.Minute, 2, 3)
		tr.put(t, "last", token+"~2#three", time.Minute/2, 4)
		tr.put(t, "minority", token+"#four", time.Minute, 1, 2)
		tr.put(t, "split", token+"~2#five", time.Minute, 0, 1)
		tr.put(t, "split", token+"~3#six", time.Minute, 2, 3)
		tr.put(t, "foreign", "value", time.Minute, 0, 1, 2, 3, 4)
		for i, members := range [][]string{{"a", "b"}, {"a", "c"}, {"a", "b", "c"}, {"d"}, {"d", "b"}} {
			for _, m := range members {
				if _, err := tr.vs[i].Mini.ZAdd("shared", float64(time.Now().Add(time.Minute).UnixMilli()), token+m+"~2#"+m); err != nil {
					t.Fatal(err)
				}
			}
			tr.vs[i].Mini.SetTTL("shared", time.Minute)
		}

		for _, down := range [][]int{nil, {0}, {4}, {0, 3}} {
			for _, i := range down {
				tr.vs[i].Proxy.Down()
			}
			all, err := listed(t.Context(), tr.d, "")
			if err != nil {
				t.Fatalf("without %v: %v", down, err)
			}
			for key, owner := range map[string]string{"all": "one", "first": "two", "last": "three"} {
				s, ok := all[key]
				holders := map[string][]int{"all": {0, 1, 2, 3, 4}, "first": {0, 1, 2}, "last": {2, 3, 4}}[key]
				left := slices.DeleteFunc(holders, func(i int) bool { return slices.Contains(down, i) })
				if want := len(left) >= 3; ok != want || ok && (!s.Held || s.Owner != owner || s.TTL <= 0) {
					t.Errorf("without %v: %s: %+v, listed %t, want %t", down, key, s, ok, want)
				}
				delete(all, key)
			}
			if down == nil {
				s := all["shared"]
				if !s.Held || s.Owner != "" || !slices.Equal(s.Shared, []string{"a", "b"}) {
					t.Errorf("shared: %+v", s)
				}
			}
			delete(all, "shared")
			if len(all) > 0 {
				t.Errorf("without %v: %+v", down, all)
			}
			for _, i := range down {
				tr.vs[i].Proxy.Up()
			}
			time.Sleep(time.Second)
		}
		time.Sleep(time.Minute / 2)
		if all, err := listed(t.Context(), tr.d, "last"); len(all) != 0 || err != nil {
			t.Errorf("after the end of one copy of three: %+v, %v", all, err)
		}
	})
}

func TestListInAnOutage(t *testing.T) {
	try(t, 3, nil, func(t *testing.T, tr trial) {
		for i := range 120 {
			tr.put(t, fmt.Sprint(i), token+"#me", time.Hour, 0, 1, 2)
		}
		tr.vs[1].Proxy.Stall()
		began := time.Now()
		all, err := listed(t.Context(), tr.d, "")
		if err != nil || len(all) != 120 {
			t.Errorf("one of three hangs: %d keys, %v", len(all), err)
		}
		if took := time.Since(began); took > 3*time.Second {
			t.Errorf("one of three hangs: took %v", took)
		}

		tr.vs[2].Proxy.Stall()
		_, err = listed(t.Context(), tr.d, "")
		isOutage(t, "two of three hang", err, "12")

		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Millisecond, cancel)
		if _, err := listed(ctx, tr.d, ""); !errors.Is(err, context.Canceled) {
			t.Errorf("cancelled: got %v", err)
		}
	})
}
