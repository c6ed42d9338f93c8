package redisstore

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/hasplock/hasp/backend"
)

// Mark ends the token in a record, token#owner. No token contains it.
const Mark = "#"

// Owner returns the owner in a record of hasp's, and nothing of any other
// value, which may be anybody's.
func Owner(record string) string {
	token, owner, ok := strings.Cut(record, Mark)
	for _, r := range token {
		if !strings.ContainsRune("-_", r) && (r < '0' || r > '9') && (r < 'A' || r > 'Z') && (r < 'a' || r > 'z') {
			return ""
		}
	}
	if !ok || token == "" {
		return ""
	}
	return owner
}

// Millis is a term in the unit of Redis, rounded up.
func Millis(d time.Duration) int64 {
	return int64((d + time.Millisecond - 1) / time.Millisecond)
}

// Term is a time to live as Redis has it, in ms. One that is longer than a
// hundred years is cut, since it may be longer than a Duration can be.
func Term(pttl int64) time.Duration {
	const most = 100 * 365 * 24 * time.Hour / time.Millisecond
	return min(time.Duration(pttl), most) * time.Millisecond
}

// Found is what a script tells of a key: {PTTL, start of the record, fence}.
type Found struct {
	pttl          int64
	record, fence string
}

// Decode reads the reply of such a script.
func Decode(reply any) (Found, bool) {
	parts, _ := reply.([]any)
	if len(parts) != 3 {
		return Found{}, false
	}
	pttl, ok1 := parts[0].(int64)
	record, ok2 := parts[1].(string)
	fence, ok3 := parts[2].(string)
	return Found{pttl, record, fence}, ok1 && ok2 && ok3 && pttl >= -2
}

// Record returns the start of the record, and nothing of a key that is free.
func (f Found) Record() string { return f.record }

// Free reports whether there was nothing under the key.
func (f Found) Free() bool { return f.pttl == -2 }

// Held is the error of a key that is held as f says.
func (f Found) Held() error {
	e := &backend.HeldError{Owner: Owner(f.record)}
	if f.pttl >= 0 {
		e.RetryAfter = Term(max(f.pttl, 1))
	}
	return e
}

// Status is f for people.
func (f Found) Status() backend.Status {
	var s backend.Status
	if f.pttl != -2 {
		s.Held, s.Owner, s.TTL = true, Owner(f.record), Term(f.pttl)
	}
	if n, err := strconv.ParseUint(f.fence, 10, 64); err == nil {
		s.Fence = n
	}
	return s
}

// Owned is the outcome of a script that says whether its token held the key.
func (s *Store) Owned(reply any, err error) error {
	switch {
	case err != nil:
		return err
	case reply == int64(1):
		return nil
	case reply == int64(0):
		return backend.ErrLost
	}
	return s.Unexpected(reply)
}

// NoFence is the error of a fenced Acquire if the value of the fence counter is
// not a number that hasp wrote. hasp never overwrites it.
func NoFence(counter string) error {
	return fmt.Errorf("%w: the value of %q is no fence counter; remove it, so that hasp can begin a new one", backend.ErrInvalid, counter)
}

// FenceTTL reads the parameter fence_ttl: zero if it is not given.
func FenceTTL(params map[string]string) (time.Duration, error) {
	text, ok := params["fence_ttl"]
	if !ok {
		return 0, nil
	}
	ttl, err := time.ParseDuration(text)
	if err != nil || ttl < time.Millisecond {
		return 0, fmt.Errorf("%w: parameter fence_ttl=%q: want a positive duration such as 720h", backend.ErrInvalid, text)
	}
	return ttl, nil
}
