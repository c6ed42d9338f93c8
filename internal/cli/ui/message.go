package ui

import (
	"encoding/base64"
	"strconv"
	"time"
	"unicode/utf8"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/cli/text"
)

// These are the messages to the browsers. Times are milliseconds since 1970 by this process's
// clock, or 0. Text is printable, and the page shows it unchanged.

// changes is a message of the stream.
type changes struct {
	Now    int64      `json:"now"`
	Whole  bool       `json:"whole,omitempty"` // forget what you know: Set has all keys
	Store  *store     `json:"store,omitempty"`
	Set    []tableRow `json:"set,omitempty"`
	Gone   []string   `json:"gone,omitempty"` // IDs
	Status status     `json:"status"`
}

// store says what is listed.
type store struct {
	Name    string `json:"name"`
	Prefix  string `json:"prefix"`
	Ordered bool   `json:"ordered"`
}

// status says how the last list went.
type status struct {
	Listed int64  `json:"listed"` // the last list that succeeded; 0 before the first
	Took   int64  `json:"took"`   // ms
	Rest   int64  `json:"rest"`   // ms until the next
	Keys   int    `json:"keys"`
	More   int    `json:"more,omitempty"` // keys beyond the bounds
	Error  string `json:"error,omitempty"`
	Since  int64  `json:"since,omitempty"` // of the error
}

// tableRow is a line of the table.
type tableRow struct {
	ID      string `json:"id"`
	Key     string `json:"key"`
	Held    bool   `json:"held,omitempty"`
	Owner   string `json:"owner,omitempty"`
	Shared  int    `json:"shared,omitempty"`  // owners of a shared hold; Owner is the first
	Foreign bool   `json:"foreign,omitempty"` // not a record of this strategy
	Since   int64  `json:"since,omitempty"`   // when the hold began
	Seen    int64  `json:"seen,omitempty"`    // when the hold was seen first
	Until   int64  `json:"until,omitempty"`   // the end of the term
	Late    bool   `json:"late,omitempty"`    // the holder seems to have stopped renewing
	Fence   string `json:"fence,omitempty"`   // may be too large for a number of JavaScript
	Waiting int    `json:"waiting,omitempty"`
}

// Foreign reports whether a key is held by a value that the strategy did not write: one without an
// owner or without a term, because every hold of a hasp Client has both.
func Foreign(s backend.Status) bool {
	return s.Held && (s.Owner == "" && len(s.Shared) == 0 || s.TTL < 0)
}

// SameHold reports whether two entries of a key are one hold. If the store does not record when
// holds began, they may be two holds of one owner.
func SameHold(a, b backend.Status) bool {
	return a.Held == b.Held && a.Owner == b.Owner && len(a.Shared) > 0 == (len(b.Shared) > 0) &&
		a.Since.Equal(b.Since) && a.Fence == b.Fence
}

// rowOf returns the row of a lock.
func rowOf(l *lock) tableRow {
	r := tableRow{ID: ID(l.Key), Key: shown(l.Key), Held: l.Held, Waiting: l.wait}
	if l.Fence != 0 {
		r.Fence = strconv.FormatUint(l.Fence, 10)
	}
	if !l.Held {
		return r
	}
	r.Owner, r.Shared = shown(l.Owner), l.share
	if len(l.Shared) > 0 {
		r.Owner = shown(l.Shared[0])
	}
	r.Foreign = Foreign(l.Status)
	r.Since, r.Seen, r.Until, r.Late = ms(l.Since), ms(l.first), ms(l.until()), l.unrenewed()
	return r
}

// like reports whether r and s show the same. Until may differ a little, because its error varies
// with the time of an answer.
func (r tableRow) like(s tableRow) bool {
	d := r.Until - s.Until
	r.Until, r.Seen = s.Until, s.Seen
	return r == s && -300 <= d && d <= 300
}

// detail is all that is known about one key.
type detail struct {
	Key     string         `json:"key"`
	Now     int64          `json:"now"`
	Listed  int64          `json:"listed"`
	Row     *tableRow      `json:"row"`     // nil if the key is free
	Waiters []string       `json:"waiters"` // the first of them
	Shared  []string       `json:"shared"`  // the first owners of a shared hold
	Lanes   []ownerHistory `json:"lanes"`
	Gaps    []unwatched    `json:"gaps"`
}

// ms returns a time for a message.
func ms(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMilli()
}

// ID returns the name of a key in messages and addresses, because a key may be any bytes. The page
// opens with the key's detail if its address ends with # and the ID.
func ID(key string) string { return base64.RawURLEncoding.EncodeToString([]byte(key)) }

func parseID(id string) (key string, err error) {
	b, err := base64.RawURLEncoding.DecodeString(id)
	return string(b), err
}

// maxShown is how many bytes of a key are shown.
const maxShown = 512

// shown returns at most maxShown bytes of a key or an owner as printable text, quoted unless it is
// one line of ordinary text.
func shown(s string) string {
	end := ""
	if len(s) > maxShown {
		s, end = s[:maxShown], "…"
	}
	return text.Label(s, utf8.MaxRune) + end
}
