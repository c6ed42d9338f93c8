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

// Owner returns the owner in a record. If the value is not a record of hasp's, it
// returns an empty string.
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

// Millis returns a term in milliseconds, rounded up.
func Millis(d time.Duration) int64 {
	return int64((d + time.Millisecond - 1) / time.Millisecond)
}

// Term returns the duration of a PTTL, in milliseconds. It is a hundred years at
// most, because a PTTL can be longer than a Duration.
func Term(pttl int64) time.Duration {
	const most = 100 * 365 * 24 * time.Hour / time.Millisecond
	return min(time.Duration(pttl), most) * time.Millisecond
}

// Found is a script's report on a key: {PTTL, start of the record, fence}.
type Found struct {
	pttl          int64
	record, fence string
}

// Decode decodes the reply of such a script, and reports whether it is valid.
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

// Record returns the start of the record. It is empty if the key is free.
func (f Found) Record() string { return f.record }

// Free reports whether the key did not exist.
func (f Found) Free() bool { return f.pttl == -2 }

// Held returns the error for a key that is held.
func (f Found) Held() error {
	e := &backend.HeldError{Owner: Owner(f.record)}
	if f.pttl >= 0 {
		e.RetryAfter = Term(max(f.pttl, 1))
	}
	return e
}

// Status returns the status of the key.
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

// Owned decodes the reply of a script that returns 1 if its token held the key, and
// 0 if not. Then the error is backend.ErrLost.
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

// FenceTTL parses the parameter fence_ttl. It returns zero if there is none.
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
