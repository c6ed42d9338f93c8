package ui

import (
	"encoding/base64"
	"strconv"
	"time"
	"unicode/utf8"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/cli/text"
)

// These are the messages to the browsers. A time is in milliseconds since 1970, by this process's
// clock; 0 means that there is no time. Text is printable, and the page shows it unchanged.

// table is the answer to a request for the next list.
type table struct {
	Now    int64      `json:"now"`
	Number int        `json:"number"` // the number of the list
	Store  store      `json:"store"`
	Rows   []tableRow `json:"rows"`
	Status status     `json:"status"`
}

// store describes the store and the prefix that is listed.
type store struct {
	Name    string `json:"name"`
	Prefix  string `json:"prefix"`
	Ordered bool   `json:"ordered"`
}

type status struct {
	Listed int64  `json:"listed"` // when the last list that succeeded began; 0 before the first
	Took   int64  `json:"took"`   // how long the list took, in ms
	Rest   int64  `json:"rest"`   // ms until the next list
	Keys   int    `json:"keys"`
	More   int    `json:"more,omitempty"` // how many keys are beyond the bounds
	Error  string `json:"error,omitempty"`
	Since  int64  `json:"since,omitempty"` // when the error began
}

type tableRow struct {
	ID      string `json:"id"`
	Key     string `json:"key"`
	Held    bool   `json:"held,omitempty"`
	Owner   string `json:"owner,omitempty"`
	Kept    bool   `json:"kept,omitempty"`    // the owner has unlocked, and a min hold keeps the key
	Shared  int    `json:"shared,omitempty"`  // how many owners share the key; Owner is the first
	Foreign bool   `json:"foreign,omitempty"` // see the function Foreign
	Since   int64  `json:"since,omitempty"`   // when the hold began
	Seen    int64  `json:"seen,omitempty"`    // when a list first showed the hold
	Until   int64  `json:"until,omitempty"`   // the end of the term
	Late    bool   `json:"late,omitempty"`    // see lock.unrenewed
	Fence   string `json:"fence,omitempty"`   // JavaScript has no exact number for all fences
	Waiting int    `json:"waiting,omitempty"`
}

// Foreign reports whether a key is held by a value that the strategy did not write. Such a value
// has no owner or no term. Every hold of a hasp Client has both.
func Foreign(s backend.Status) bool {
	hasOwner := s.Owner != "" || len(s.Shared) > 0
	return s.Held && (!hasOwner || s.TTL < 0)
}

// SameHold reports whether two entries of a key seem to show the same hold. If the store does not
// record when holds began, SameHold may mistake two holds of one owner for one hold. The times of
// one hold may differ a little, because a store may compute Since from the rest of the term, which
// it rounds to milliseconds.
func SameHold(a, b backend.Status) bool {
	sameKind := len(a.Shared) > 0 == (len(b.Shared) > 0) // both are shared, or none is
	sameOwner := a.Held == b.Held && a.Owner == b.Owner
	sameGrant := a.Fence == b.Fence && a.Since.Sub(b.Since).Abs() < 10*time.Millisecond
	return sameKind && sameOwner && sameGrant
}

// rowOf returns the row of the table about one key. If the key is free, the row has no hold.
func rowOf(l *lock) tableRow {
	r := tableRow{ID: ID(l.Key), Key: shown(l.Key), Held: l.Held, Waiting: l.waiterCount}
	if l.Fence != 0 {
		r.Fence = strconv.FormatUint(l.Fence, 10)
	}
	if !l.Held {
		return r
	}
	r.Owner = shown(l.Owner)
	r.Kept = l.Kept
	r.Shared = l.sharerCount
	if len(l.Shared) > 0 {
		r.Owner = shown(l.Shared[0])
	}
	r.Foreign = Foreign(l.Status)
	r.Since = ms(l.Since)
	r.Seen = ms(l.first)
	r.Until = ms(l.until())
	r.Late = l.unrenewed()
	return r
}

// detail has all that the page can show about one key.
type detail struct {
	Key     string         `json:"key"`
	Now     int64          `json:"now"`
	Listed  int64          `json:"listed"`
	Row     *tableRow      `json:"row"`     // nil if the key is free
	Waiters []string       `json:"waiters"` // the first waiters
	Shared  []string       `json:"shared"`  // the first owners of shared holds
	Lanes   []ownerHistory `json:"lanes"`
	Gaps    []unwatched    `json:"gaps"`
}

// ms returns t as a time of a message.
func ms(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMilli()
}

// ID encodes a key, which may be any bytes, for messages and addresses. If the address of the page
// ends with # and the ID, the page opens with the key's detail.
func ID(key string) string { return base64.RawURLEncoding.EncodeToString([]byte(key)) }

// shown returns a key or an owner as printable text. It is quoted if it is not one line of ordinary
// text, and cut if it is long.
func shown(s string) string { return text.Label(s, utf8.MaxRune) }
