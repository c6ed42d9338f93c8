package caslock

import (
	"bytes"
	"encoding/json"
	"errors"
	"slices"
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

// item is a hold, the rest of a min hold, or the intent of a waiting writer. It dies when an
// observer has seen its Token and N unchanged for TTL, by the observer's own clock.
type item struct {
	Kind   kind          `json:"kind"`
	Token  string        `json:"token"`
	N      uint64        `json:"n"` // the number of the write that made or renewed it, so no N is used twice
	TTL    time.Duration `json:"ttl"`
	Owner  []byte        `json:"owner,omitempty"`
	Fence  uint64        `json:"fence,omitempty"`
	Waited time.Duration `json:"waited,omitempty"`
	Since  time.Time     `json:"since"` // by the writer's clock, like Ends
	Ends   time.Time     `json:"ends"`  // for people; it also ends items of the kinds kept and intent: see the method rest

	seen time.Time // when this process first saw Token and N
}

type kind string

const (
	exclusive kind = "exclusive"
	shared    kind = "shared"
	kept      kind = "kept"   // by a release with KeepUntil
	intent    kind = "intent" // of a writer that waits for readers; a record has one at most
)

// view is what this driver has last seen of a key.
type view struct {
	version string
	rec     record
}

var errForeign = errors.New("the value was written by another program: remove it, or choose another key")

// newView returns the view of an entry. The argument before is the last view of key, or nil, and
// now is a time after the reply. The reply came after the write, and the writer began to count its
// term before the write. A time from before the call could be earlier than the write.
func newView(key string, e Entry, before *view, now time.Time) (*view, error) {
	v := &view{version: e.Version}
	if e.Version == "" {
		v.rec.Key = []byte(key)
		return v, nil
	}
	if json.Unmarshal(e.Value, &v.rec) != nil || !bytes.Equal(v.rec.Key, []byte(key)) {
		return nil, errForeign
	}
	v.observe(before, now.Add(-max(e.Age, 0)))
	return v, nil
}

// observe sets the field seen of each item to the time now, or an earlier one from the view before.
func (v *view) observe(before *view, now time.Time) {
	for i := range v.rec.Items {
		it := &v.rec.Items[i]
		it.seen = now
		if before == nil {
			continue
		}
		for _, old := range before.rec.Items {
			if old.Token == it.Token && old.N == it.N && old.seen.Before(now) {
				it.seen = old.seen
			}
		}
	}
}

// rest returns how long the item still lives, as far as this process can tell. A min hold and an
// intent guard no work, so they also end by the wall clock, for callers that ask only once.
func (it *item) rest(now time.Time) time.Duration {
	rest := it.TTL - now.Sub(it.seen)
	if it.Kind == kept || it.Kind == intent {
		rest = min(rest, it.Ends.Sub(now.Round(0)))
	}
	return rest
}

// live returns the items that have not died.
func (v *view) live(now time.Time) []item {
	return without(v.rec.Items, func(it *item) bool { return it.rest(now) <= 0 })
}

// without returns a copy of items that lacks each item for which the function drop returns true.
func without(items []item, drop func(it *item) bool) []item {
	return slices.DeleteFunc(slices.Clone(items), func(it item) bool { return drop(&it) })
}

func isIntent(it *item) bool { return it.Kind == intent }

// find returns the index of the hold of token, or -1.
func find(items []item, token string) int {
	return slices.IndexFunc(items, func(it item) bool {
		return it.Token == token && (it.Kind == exclusive || it.Kind == shared)
	})
}

// refusal returns the error for a claim that is refused because of items.
func refusal(items []item, now time.Time) *backend.HeldError {
	first := items[0]
	e := &backend.HeldError{Owner: string(first.Owner), Shared: first.Kind == shared, Waited: first.Waited}
	for _, it := range items {
		e.RetryAfter = max(e.RetryAfter, it.rest(now))
	}
	return e
}

// next returns a record with these items, which is to replace the record of v.
func (v *view) next(items []item, now time.Time) *record {
	r := v.rec
	r.Write, r.Items = max(r.Write+1, uint64(now.UnixMicro())), items
	return &r
}

// add adds an item for c, with the number of this write. So the term of a hold is not counted from
// an earlier item of its token.
func (r *record) add(c *backend.Claim, k kind, ttl time.Duration, now time.Time) *item {
	r.Items = append(r.Items, item{Kind: k, Token: c.Token, N: r.Write, TTL: ttl, Owner: []byte(c.Owner),
		Fence: r.Write, Waited: c.Waited, Since: now.Round(0), Ends: now.Round(0).Add(ttl)})
	return &r.Items[len(r.Items)-1]
}

// Holder returns an owner and the longest term of the holds in a value that a driver has written.
// If there are no holds, ttl is zero. It is for a store that shows its holds to other programs.
func Holder(value []byte) (owner string, ttl time.Duration) {
	var r record
	_ = json.Unmarshal(value, &r)
	for _, it := range without(r.Items, isIntent) {
		owner, ttl = string(it.Owner), max(ttl, it.TTL)
	}
	return owner, ttl
}

// Foreign returns a value for Get that shows a driver the hold of another program, or no hold if
// ttl is zero. The argument last is the value written last by a driver, or nil. The id must change
// with each renewal, because the driver takes the key when it has seen the same id for ttl.
func Foreign(key string, last []byte, id, owner string, ttl time.Duration) []byte {
	var r record
	_ = json.Unmarshal(last, &r)
	r.Key, r.Items = []byte(key), nil
	if ttl > 0 {
		r.add(&backend.Claim{Token: "foreign " + id, Owner: owner}, exclusive, ttl, time.Now())
	}
	value, _ := json.Marshal(&r) // no error, because each field can be encoded
	return value
}
