package strategytest

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/await"
)

// Listed lists the keys that begin with prefix. It returns a map from each key to its entry, and
// the error that ended the list.
func Listed(
	ctx context.Context, d backend.Driver, prefix string,
) (map[string]backend.Entry, error) {
	all := map[string]backend.Entry{}
	for e, err := range d.(backend.Lister).List(ctx, prefix, 3*time.Second) {
		if err != nil {
			return all, err
		}
		all[e.Key] = e
	}
	return all, nil
}

// wantListed fails the test unless a list contains exactly these keys.
func (r Rig[D]) wantListed(t *testing.T, what, prefix string, keys ...string) {
	t.Helper()
	all, err := Listed(t.Context(), r.Driver, prefix)
	Want(t, what, err, nil)
	slices.Sort(keys)
	if got := slices.Sorted(maps.Keys(all)); !slices.Equal(got, keys) {
		t.Errorf("%s: got %q, want %q", what, got, keys)
	}
}

// foreignKeys writes values of every Redis type, with and without a term. Some of them look a
// little like locks, and some are a megabyte long.
func (s Strategy) foreignKeys(t *testing.T, r rig) {
	t.Helper()
	s.foreignValues(t, r)
	long := strings.Repeat("long value ", 100_000)
	const token = "AAAABBBBCCCCDDDDEEEEFF"
	const record = token + "#me"

	for _, v := range []string{
		"1", token, "red#ff0000", "fairlock", "fairlock? x", "a b" + record, "\x00#",
	} {
		r.put(t, "string with an end "+v, "set", v, "ex", 3600)
	}

	r.put(t, "no end", "set", record)
	r.put(t, "fairlock without an end", "set", "fairlock- 1700000000000 "+token+" 0 1000 me")
	r.put(t, "hash without an end", "hset", record, 1)

	for i, field := range []string{"x", "user#7", long} {
		key := fmt.Sprint("hash ", i)
		r.put(t, key, "hset", field, 1)
		r.put(t, key, "expire", 3600)
		r.put(t, key+" of two fields", "hset", field, 1, "other", long)
	}

	for _, name := range []string{
		"hasp:{", "hasp:{x}", "hasp:{x}:lock:", "hasp:{x}:lock:x", "hasp:{x}:places:y",
		"hasp:{}:fence:", "hasp:{x}:fence:x",
	} {
		r.put(t, name, "set", record, "ex", 3600)
	}
}

// ListNamesOnlyOurOwn proves that List returns only hasp's records, and does not read values of
// other programs. List leaves out keys that the user has no right to. A user without the right to
// list receives an error.
func (s Strategy) ListNamesOnlyOurOwn(t *testing.T) {
	r := s.setup(t, real)
	ctx := t.Context()
	s.foreignKeys(t, r)
	r.wantListed(t, "no lock", "")

	odd := "hasp:{a}:fence:b"
	keys := []string{"k", "k{tag}", "k}", odd, "k*", "\x00\xff", "kept", "shared"}

	for _, key := range keys {
		c := Claim(key)
		c.Shared = key == "shared"
		r.Acquire(t, c)
		if key == "kept" {
			r.Release(t, Kept(c, Term))
		}
	}

	before := r.sent(t)
	r.wantListed(t, "all", "", keys...)
	if n := r.sent(t) - before; n > 100_000 {
		t.Errorf("the server sent %d bytes for a list", n)
	}

	r.wantListed(t, "k", "k", "k", "k{tag}", "k}", "k*", "kept")
	r.wantListed(t, "k*", "k*", "k*")

	for _, prefix := range []string{"h", "hasp:{", "hasp:{a", odd} {
		r.wantListed(t, prefix, prefix, odd)
	}

	all, err := Listed(ctx, r.Driver, "sh")
	e := all["shared"]
	if err != nil || len(all) != 1 || len(e.Shared) != 1 {
		t.Errorf("shared: got %+v, %v", all, err)
	}
	if e.TTL <= 0 || e.TTL > Term {
		t.Errorf("shared: got %+v, %v", all, err)
	}

	r.Forbid(t, "resetkeys", "~k*", "~hasp:*")
	r.wantListed(t, "rights to some keys", "", "k", "k{tag}", "k}", odd, "k*", "kept")
	// If the user may not read fences, a list fails, as Inspect does.
	r.Forbid(t, "resetkeys", "~k*")
	_, err = Listed(ctx, r.Driver, "")
	Outage(t, "without the right to fences", err)
	r.Forbid(t, "allkeys", "-scan")
	_, err = Listed(ctx, r.Driver, "")
	Outage(t, "without the right to scan", err)
}

// sent returns how many bytes the server has sent so far.
func (r Rig[D]) sent(t *testing.T) int64 {
	t.Helper()
	stats := r.Redis.InfoMap(t.Context(), "stats")
	n, err := strconv.ParseInt(stats.Item("Stats", "total_net_output_bytes"), 10, 64)
	await.Must(t, err)
	return n
}
