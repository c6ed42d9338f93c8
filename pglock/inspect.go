package pglock

import (
	"encoding/hex"
	"encoding/json"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/hasplock/hasp/backend"
)

// scanEntry reads a row that the statement inspect or list has returned.
func scanEntry(rows pgx.Rows) (backend.Entry, error) {
	var (
		key, owner        string
		held              bool
		since, fence, now int64
		left              *int64
		readers           *string
	)
	if err := rows.Scan(&key, &owner, &held, &since, &left, &fence, &readers, &now); err != nil {
		return backend.Entry{}, err
	}

	s := backend.Status{Held: held, Fence: uint64(fence)}
	if held {
		s.TTL = term(left)
		if readers == nil {
			s.Owner = unhex(owner)
			s.Since = time.UnixMicro(since)
		} else {
			s.Shared = owners(*readers, time.UnixMicro(now))
		}
	}

	return backend.Entry{Key: unhex(key), Status: s}, nil
}

// owners returns up to 1,000 owners of present shared holds. It ignores malformed holds.
func owners(readers string, now time.Time) (owners []string) {
	var holds map[string]struct{ Owner, End string }
	_ = json.Unmarshal([]byte(readers), &holds) // Unmarshal goes on after a value of a wrong type
	for _, token := range slices.Sorted(maps.Keys(holds)) {
		end, err := time.Parse(time.RFC3339, holds[token].End)
		if err == nil && end.After(now) && len(owners) < 1000 {
			owners = append(owners, unhex(holds[token].Owner))
		}
	}
	return owners
}

// unhex decodes an owner or a key, which the statements return in hexadecimal. If text is not
// hexadecimal, unhex returns it unchanged, because someone may have changed the value by hand.
func unhex(text string) string {
	b, err := hex.DecodeString(text)
	if err != nil {
		return text
	}
	return string(b)
}

// The function term converts microseconds to a Duration, and nil, which means no end, to -1.
func term(left *int64) time.Duration {
	if left == nil {
		return -1
	}
	const most = math.MaxInt64 / int64(time.Microsecond)
	return time.Duration(min(*left, most)) * time.Microsecond
}

// micros returns d in microseconds, rounded up.
func micros(d time.Duration) int64 {
	return int64((d + time.Microsecond - 1) / time.Microsecond)
}
