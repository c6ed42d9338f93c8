package redisstore

import (
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
	// A value of another program may contain Mark. It is a record only if a token
	// precedes Mark.
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
		// A PTTL of 0 still means held, but a RetryAfter of 0 would mean that the
		// end is not known.
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

	// A counter that is no number gives no fence. The status is valid without it.
	if n, err := strconv.ParseUint(f.fence, 10, 64); err == nil {
		s.Fence = n
	}
	return s
}
