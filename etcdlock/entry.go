package etcdlock

import (
	"bytes"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"

	"github.com/hasplock/hasp/backend"
)

// An entry is one place in the queue of a key: a hold, or a caller that waits. Its name is
//
//	hasp/KEY/xLEASE   or, if the claim is shared,   hasp/KEY/sLEASE
//
// KEY is the escaped key. LEASE is the number of the lease with which the entry was created. The
// create revision of the entry is its place in the queue, and the fence of its hold.
//
// The name contains the lease and not the token, because a deleted name stays in etcd's index until
// the next compaction. Leases are reused, so there are fewer names than tokens.
const root = "hasp/"

var escaper = strings.NewReplacer("%", "%25", "/", "%2F")
var unescaper = strings.NewReplacer("%25", "%", "%2F", "/")

// escape returns s without slashes. escape(a) is a prefix of escape(b) exactly if a is a prefix of
// b, so List can search for names by a prefix.
func escape(s string) string { return escaper.Replace(s) }

// queueOf returns the prefix of the entries of key. Entries of other keys do not have this prefix,
// because an escaped key has no slash.
func queueOf(key string) string { return root + escape(key) + "/" }

// entryName returns the name of an entry.
func entryName(key string, lease int64, shared bool) string {
	mark := "x"
	if shared {
		mark = "s"
	}
	return queueOf(key) + mark + fmt.Sprintf("%016x", lease)
}

// rivalsOf returns the prefix of the names of those entries that can exclude c. An exclusive claim
// is excluded by each entry of its key, a shared claim only by the exclusive entries.
func rivalsOf(c backend.Claim) string {
	if c.Shared {
		return queueOf(c.Key) + "x"
	}
	return queueOf(c.Key)
}

// isShared reports whether an entry belongs to a shared claim.
func isShared(name []byte) bool {
	return bytes.HasPrefix(name[bytes.LastIndexByte(name, '/')+1:], []byte("s"))
}

// keyOf returns the key that an entry belongs to. The result ok is false if the name is not that of
// an entry.
func keyOf(name string) (key string, ok bool) {
	rest, hasRoot := strings.CutPrefix(name, root)
	escaped, _, hasSlash := strings.Cut(rest, "/")
	return unescaper.Replace(escaped), hasRoot && hasSlash
}

// newEntry returns the entry for the claim c under the lease l. The entry's revisions are 0.
func newEntry(c backend.Claim, l *lease, since time.Time) *mvccpb.KeyValue {
	r := record{fenced: c.Fenced, token: c.Token, since: since, owner: c.Owner}
	return &mvccpb.KeyValue{Key: []byte(entryName(c.Key, l.id, c.Shared)), Value: r.encode(), Lease: l.id}
}

// record is the value of an entry.
type record struct {
	fenced bool // the claim asked for a fence
	token  string
	since  time.Time // when the hold was granted, by its process's clock; zero if that is not known
	owner  string
}

// The constant kept is the token of a hold that was released with KeepUntil. No claim has this
// token, because tokens consist of URL-safe characters.
const kept = "(kept)"

// encode returns the value of an entry. The value contains a version, a flag, the token, r.since in
// milliseconds, and the owner, which may contain any bytes.
func (r record) encode() []byte {
	mark := "-"
	if r.fenced {
		mark = "f"
	}
	return fmt.Appendf(nil, "1 %s %s %d %s", mark, r.token, max(r.since.UnixMilli(), 0), r.owner)
}

// parseRecord is the reverse of encode. The result ok is false if hasp did not write the value.
func parseRecord(value []byte) (r record, ok bool) {
	f := bytes.SplitN(value, []byte(" "), 5)
	if len(f) != 5 || string(f[0]) != "1" {
		return record{}, false
	}
	ms, err := strconv.ParseInt(string(f[3]), 10, 64)
	r = record{fenced: string(f[1]) == "f", token: string(f[2]), owner: string(f[4])}
	if ms != 0 {
		r.since = time.UnixMilli(ms)
	}
	return r, err == nil
}

// holders returns how many of a key's entries hold the key. These are the first ones, and the
// others wait. The entries must be in the order of their create revisions.
func holders(kvs []*mvccpb.KeyValue) int {
	exclusive := slices.IndexFunc(kvs, func(kv *mvccpb.KeyValue) bool { return !isShared(kv.Key) })
	if exclusive < 0 {
		return len(kvs) // all entries are shared, so all of them hold the key
	}
	// The shared entries before the first exclusive one hold the key. If there are none, the
	// exclusive entry holds the key.
	return max(exclusive, 1)
}
