package caslock

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/hasplock/hasp/backend"
)

// record is the value of a key. The record of a free key stays for a while, to keep its numbers.
type record struct {
	Key []byte `json:"key"`

	// Write is the number of the write that made this value. It grows with each write of the key:
	// it is the last number plus one, or the writer's clock in microseconds if that is larger. So
	// no two values are equal, and numbers also grow after the store has lost the record.
	Write uint64 `json:"write"`
	Fence uint64 `json:"fence,omitempty"` // the last fence that a claim asked for
	Items []item `json:"items,omitempty"`
}

// encode returns r as the store has it.
func (r *record) encode() string {
	value, _ := json.Marshal(r) // no error, because each field can be encoded
	return string(value)
}

// isOf reports whether r is the record of key. A key that is not known is "".
func (r *record) isOf(key string) bool {
	if key == "" {
		return len(r.Key) > 0
	}
	return key == string(r.Key)
}

// add adds an item whose term of ttl begins at the time now. It gives the item the number of this
// write, so that nobody counts the term from the first sight of an earlier item.
func (r *record) add(it item, ttl time.Duration, now time.Time) {
	it.N = r.Write
	it.TTL = ttl
	it.Ends = now.Add(ttl)
	r.Items = append(r.Items, it)
}

// item is a hold, the rest of a min hold, or the intent of a waiting writer. It dies when an
// observer has seen its Token and N unchanged for TTL, by the observer's own clock.
type item struct {
	Kind   string        `json:"kind"`
	Token  string        `json:"token"`
	N      uint64        `json:"n"` // of the write that made or renewed it, so no N is used twice
	TTL    time.Duration `json:"ttl"`
	Owner  []byte        `json:"owner,omitempty"`
	Waited time.Duration `json:"waited,omitempty"`
	Since  time.Time     `json:"since,omitzero"` // by the writer's clock, like Ends
	Ends   time.Time     `json:"ends"`           // for people; for other uses see the method rest
	seen   time.Time     // when this process first saw Token and N
}

// These are the kinds of an item.
const (
	kindExclusive = "exclusive"
	kindShared    = "shared"
	kindMinHold   = "kept"    // by a release with KeepUntil
	kindIntent    = "intent"  // of a writer that waits for readers; a record has one at most
	kindForeign   = "foreign" // the hold of another program: see Foreign
)

// tokenMinHold is the token of the rest of a min hold. No caller has it.
const tokenMinHold = "kept"

// clockError is how far the wall clocks of clients may differ.
const clockError = time.Minute

// rest returns how long the item still lives, as far as this process can tell: the rest of its TTL
// since this process first saw it. A min hold and an intent also end by the wall clock, because a
// caller that asks only once has not seen them before. That is safe, because they guard no work.
// They then end a minute late, because wall clocks may differ.
func (it *item) rest(now time.Time) time.Duration {
	rest := it.TTL - now.Sub(it.seen)
	if it.Kind == kindMinHold || it.Kind == kindIntent {
		wall := now.Round(0) // without the monotonic clock
		rest = min(rest, it.Ends.Add(clockError).Sub(wall))
	}
	return rest
}

func isIntent(it item) bool { return it.Kind == kindIntent }

// without returns a copy of items that lacks each item for which the function drop returns true.
func without(items []item, drop func(it item) bool) []item {
	return slices.DeleteFunc(slices.Clone(items), drop)
}

// find returns the index of the hold of token, or -1. Other items have tokens that no caller has.
func find(items []item, token string) int {
	return slices.IndexFunc(items, func(it item) bool { return it.Token == token })
}

// refusal returns the error for a claim that is refused because of items, of which there is one at
// least. It describes the first item, and RetryAfter is when the last one ends.
func refusal(items []item, now time.Time) *backend.HeldError {
	first := items[0]
	e := &backend.HeldError{
		Owner:  string(first.Owner),
		Shared: first.Kind == kindShared,
		Kept:   first.Kind == kindMinHold,
		Waited: first.Waited,
	}

	for _, it := range items {
		e.RetryAfter = max(e.RetryAfter, it.rest(now))
	}

	return e
}

// name returns the name of a key in the store. It replaces each byte that is no letter, no digit
// and none of "-_." by "=" and its hex code. A name of 240 bytes or more is cut, and ends with a
// hash of the whole key. Such a name has 240 bytes, and all others are shorter, so no two are
// equal.
func name(key string) string {
	const most = 240 // leaves room for the ends of file names, which may have 255 bytes
	const hashed = most - 1 - 2*sha256.Size
	name := strings.NewReplacer("%", "=", "+", "=20", "~", "=7E").Replace(url.QueryEscape(key))
	if len(name) >= most {
		name = fmt.Sprintf("%s=%x", name[:hashed], sha256.Sum256([]byte(key)))
	}
	return name
}

// Holder returns an owner and the longest term of the holds in a value that a driver has written,
// for a store that shows its holds to other programs. If there are no holds, owner is empty and ttl
// is zero. If another program has a hold, ours is false.
func Holder(value []byte) (owner string, ttl time.Duration, ours bool) {
	var r record
	_ = json.Unmarshal(value, &r)

	for _, it := range without(r.Items, isIntent) {
		owner = string(it.Owner)
		ttl = max(ttl, it.TTL)
	}

	isForeign := func(it item) bool { return it.Kind == kindForeign }
	return owner, ttl, !slices.ContainsFunc(r.Items, isForeign)
}

// Foreign returns a value for Get that shows a driver the hold of another program, or no hold if
// owner is empty. The argument last is the value written last by a driver, or nil; its numbers are
// kept, but not its holds, which the other program has replaced. The id must change with each
// renewal, because the driver takes the key when it has seen the same id for ttl.
func Foreign(key string, last []byte, id, owner string, ttl time.Duration) []byte {
	var r record
	_ = json.Unmarshal(last, &r)

	r.Key = []byte(key)
	r.Items = nil

	if owner != "" {
		r.Items = []item{{
			Kind:  kindForeign,
			Token: id,
			TTL:   ttl,
			Owner: []byte(owner),
			Ends:  time.Now().Add(ttl),
		}}
	}

	return []byte(r.encode())
}
