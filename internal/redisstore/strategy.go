package redisstore

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/hasplock/hasp/backend"
)

// This file has code that the strategies on Redis share, for the records of holds and for drivers.

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

// Decode decodes a script's report on a key, and returns whether the reply is valid.
func Decode(reply any) (Found, bool) {
	parts, _ := reply.([]any)
	if len(parts) < 3 {
		return Found{}, false
	}
	pttl, ok1 := parts[0].(int64)
	record, ok2 := parts[1].(string)
	fence, ok3 := parts[2].(string)
	f := Found{Record: record, pttl: pttl, fence: fence}
	ok := ok1 && ok2 && ok3 && pttl >= -2
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
	return Decode(slices.Insert(slices.Clip(parts[1:]), 2, any("")))
}

// Shared reports whether the record is shared.
func (f Found) Shared() bool { return len(f.Members) > 0 }

// Without returns the report without the records for which the function own returns true.
func (f Found) Without(own func(record string) bool) Found {
	members := slices.DeleteFunc(slices.Clone(f.Members), own)
	if f.Shared() && len(members) == 0 || !f.Shared() && own(f.Record) {
		return Found{pttl: -2, fence: f.fence}
	}
	f.Members = members
	return f
}

// Free reports whether the key did not exist.
func (f Found) Free() bool { return f.pttl == -2 }

// Held returns the error for a key that is held.
func (f Found) Held() *backend.HeldError {
	e := &backend.HeldError{Owner: Owner(f.Record), Kept: Kept(f.Record)}
	if len(f.Members) > 0 {
		e.Owner, e.Shared = Owner(f.Members[0]), true
	}
	if f.pttl >= 0 {
		// Return at least 1 ms, because a RetryAfter of 0 would mean that the end is not known.
		e.RetryAfter = Term(max(f.pttl, 1))
	}
	return e
}

// Status returns the status of the key.
func (f Found) Status() backend.Status {
	var s backend.Status
	if f.pttl != -2 {
		s.Held, s.Owner, s.Kept, s.TTL = true, Owner(f.Record), Kept(f.Record), Term(f.pttl)
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

// OpenOne opens the Store of a strategy that has one node.
func OpenOne(ctx context.Context, strategy string, nodes []string, params map[string]string) (*Store, error) {
	if len(nodes) != 1 {
		return nil, fmt.Errorf("%w: %d nodes: want one, as in %s+redis://localhost:6379", backend.ErrInvalid, len(nodes), strategy)
	}
	return Open(ctx, nodes[0], params)
}

// Renew runs sc once for each claim, and passes the results to the function done, as
// backend.Driver's Renew does. The script extends the hold on its key. Its arguments are the
// claim's token with the text mark after it, and the term in milliseconds. For a shared hold, the
// constant Mark follows the token, the owner is the third argument, and sharedrenew.lua extends the
// hold. The script returns 1, or 0 if the token does not hold the key.
func (s *Store) Renew(ctx context.Context, sc *Script, cs []backend.Claim, mark string, done func(i int, g backend.Grant, err error)) {
	calls := make([]Call, len(cs))
	for i, c := range cs {
		texts := []string{LockKey(c.Key), c.Token + mark, Millis(c.TTL)}
		if c.Shared {
			texts = []string{texts[0], c.Token + Mark, texts[2], c.Owner}
		}
		calls[i] = Call{Keys: texts[:1], Args: texts[1:]}
	}
	s.RunEach(ctx, sc, calls, func(i int, reply any, err error) {
		done(i, backend.Grant{}, s.Owned(reply, err))
	})
}

// Inspect runs a script that reports on a key; see [Found]. The keys of the script are the lock and
// the fence counter.
func (s *Store) Inspect(ctx context.Context, sc *Script, key string) (backend.Status, error) {
	reply, err := s.Run(ctx, sc, Call{Keys: []string{LockKey(key), DerivedKey("fence", key)}})
	if err != nil {
		return backend.Status{}, err
	}
	f, ok := Decode(reply)
	if !ok {
		return backend.Status{}, s.Unexpected(reply)
	}
	return f.Status(), nil
}

// Granted decodes the reply of a script that takes a hold. The reply is one of these:
//
//   - 1 is a grant without a fence. A text is a grant with that fence.
//   - {0, PTTL, start of the record} means that the key is held. If the record is shared,
//     a member of it follows.
//   - {-1} means that the value of the fence counter is not a number that hasp wrote.
func (s *Store) Granted(reply any, c backend.Claim) (backend.Grant, error) {
	switch r := reply.(type) {
	case int64:
		if r == 1 && !c.Fenced {
			return backend.Grant{}, nil
		}
	case string:
		if n, err := strconv.ParseUint(r, 10, 64); err == nil && n > 0 && c.Fenced {
			return backend.Grant{Fence: n}, nil
		}
	case []any:
		if found, ok := Refusal(reply); ok {
			return backend.Grant{}, found.Held()
		}
		if c.Fenced && len(r) == 1 && r[0] == int64(-1) {
			return backend.Grant{}, NoFence(DerivedKey("fence", c.Key))
		}
	}
	return backend.Grant{}, s.Unexpected(reply)
}

// NoFence is the error of a fenced Acquire if the value of the fence counter is not a number that
// hasp wrote. hasp never overwrites that value.
func NoFence(counter string) error {
	return fmt.Errorf("%w: the value of %q is no fence counter; remove it, so that hasp can begin a new one", backend.ErrInvalid, counter)
}

// FenceTTL parses the parameter fence_ttl. It returns zero if the parameter is missing.
func FenceTTL(params map[string]string) (time.Duration, error) {
	text, ok := params["fence_ttl"]
	if !ok {
		return 0, nil
	}
	ttl, err := time.ParseDuration(text)
	if err != nil || ttl < time.Millisecond {
		return 0, fmt.Errorf("%w: parameter fence_ttl=%q: want at least 1ms, such as 720h", backend.ErrInvalid, text)
	}
	return ttl, nil
}

// DefaultFenceTTL is the default of each strategy's Options.FenceTTL.
const DefaultFenceTTL = 30 * 24 * time.Hour

// CheckFenceTTL returns the value of Options.FenceTTL: the default for zero, and an
// error for less than a millisecond.
func CheckFenceTTL(ttl time.Duration) (time.Duration, error) {
	if ttl = cmp.Or(ttl, DefaultFenceTTL); ttl < time.Millisecond {
		return 0, fmt.Errorf("%w: fence_ttl %v is below 1ms", backend.ErrInvalid, ttl)
	}
	return ttl, nil
}
