package redisstore

import (
	"slices"
	"strconv"
	"strings"

	"github.com/hasplock/hasp/backend"
)

// Mark separates the token from the owner in a record, token#owner. No token contains Mark.
const Mark = "#"

// Owner returns the owner in a record, or an empty string if the value is not a record of hasp.
func Owner(record string) string {
	if !hasToken(record) {
		return ""
	}
	_, owner, _ := strings.Cut(record, Mark)
	return owner
}

// Kept reports whether a record is that of a min hold, whose owner has released the key.
func Kept(record string) bool { return strings.HasPrefix(record, "kept-") }

// These are the bounds on the length of a token. They exclude values of other programs such as
// "user#7".
const (
	minToken = 16
	maxToken = 127
)

// hasToken reports whether a value begins with a token and Mark, as a record does. look.lua has the
// same rule for the members of a shared record.
func hasToken(record string) bool {
	token, _, ok := strings.Cut(record, Mark)
	return ok && len(token) >= minToken && isToken(token)
}

// isToken reports whether a text has only characters that can be in a token, or in the text token~n
// that redlock and spinlock store.
func isToken(text string) bool {
	const parts = "-_~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
	return text != "" && strings.Trim(text, parts) == ""
}

// Found is a script's report on a key: {PTTL, start of the record, fence}. If the record is shared,
// some of its members follow, and the start of the record is empty.
type Found struct {
	Record  string   // the start of the record; empty if the key is free or the record is shared
	Members []string // the starts of the members of a shared record
	pttl    int64
	fence   string
}

// Decode decodes a script's report on a key, and reports whether the reply is valid.
func Decode(reply any) (Found, bool) {
	parts, _ := reply.([]any)
	if len(parts) < 3 {
		return Found{}, false
	}
	pttl, ok1 := parts[0].(int64)
	record, ok2 := parts[1].(string)
	fence, ok3 := parts[2].(string)
	f := Found{Record: record, pttl: pttl, fence: fence}
	ok := ok1 && ok2 && ok3 && pttl >= -2 // no PTTL is below -2
	for _, part := range parts[3:] {
		member, isText := part.(string)
		f.Members = append(f.Members, member)
		ok = ok && isText
	}

	return f, ok
}

// Refusal decodes the reply {0, PTTL, start of the record} of a script that found the key held, and
// reports whether reply has this form. If the record is shared, one of its members follows.
func Refusal(reply any) (Found, bool) {
	parts, _ := reply.([]any)
	if len(parts) < 3 || parts[0] != int64(0) {
		return Found{}, false
	}
	// Decode wants a fence after the record. Clip makes Insert copy the reply.
	return Decode(slices.Insert(slices.Clip(parts[1:]), 2, any("")))
}

// Shared reports whether the record is shared.
func (f Found) Shared() bool { return len(f.Members) > 0 }

// IsOurs reports whether the key has a record of hasp. Such a record always has a term.
func (f Found) IsOurs() bool { return f.pttl >= 0 && (f.Shared() || hasToken(f.Record)) }

// Without returns the report without the records for which the function own returns true. If no
// record is left, the report says that the key is free.
func (f Found) Without(own func(record string) bool) Found {
	others := slices.DeleteFunc(slices.Clone(f.Members), own)
	isOnlyOwn := own(f.Record)
	if f.Shared() {
		isOnlyOwn = len(others) == 0
	}
	if isOnlyOwn {
		return Found{pttl: -2, fence: f.fence}
	}
	f.Members = others
	return f
}

// Free reports whether the key did not exist.
func (f Found) Free() bool { return f.pttl == -2 }

// Held returns the error for a key that is held. It is about the first member if the record is
// shared. If the key has no end, RetryAfter is 0.
func (f Found) Held() *backend.HeldError {
	e := &backend.HeldError{Owner: Owner(f.Record), Kept: Kept(f.Record)}
	if len(f.Members) > 0 {
		e.Owner = Owner(f.Members[0])
		e.Shared = true
	}

	e.Foreign = !f.Free() && !f.Shared() && !hasToken(f.Record)
	if f.pttl >= 0 {
		// Return at least 1 ms, because a RetryAfter of 0 would mean that the end is not known.
		e.RetryAfter = Term(max(f.pttl, 1))
	}

	return e
}

// Status returns the status of the key. The owner of a record that is not hasp's is "".
func (f Found) Status() backend.Status {
	var s backend.Status
	if f.pttl != -2 {
		s.Held = true
		s.Owner = Owner(f.Record)
		s.Kept = Kept(f.Record)
		s.TTL = Term(f.pttl)
	}

	for _, m := range f.Members {
		s.Shared = append(s.Shared, Owner(m))
	}

	// If the counter's value is not a number, leave out the fence, because the rest is valid.
	if n, err := strconv.ParseUint(f.fence, 10, 64); err == nil {
		s.Fence = n
	}
	return s
}
