package redisstore

import (
	"cmp"
	"fmt"
	"strconv"
	"time"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/clock"
)

// Millis returns a term in milliseconds, rounded up.
func Millis(d time.Duration) string {
	return strconv.FormatInt((d + time.Millisecond - 1).Milliseconds(), 10)
}

// Rest returns the time that is left until then, in milliseconds rounded up. The argument is the
// KeepUntil of a claim, and the result is the term of the key after its release. If KeepUntil is
// zero or has passed, Rest returns "", and the key must be freed.
func Rest(then time.Time) string {
	left := time.Until(then)
	if left <= 0 {
		return ""
	}
	return Millis(left)
}

// Term returns a PTTL, which is in milliseconds, as a Duration. The result is at most a hundred
// years, because a PTTL can be longer than any Duration.
func Term(pttl int64) time.Duration {
	const most = 100 * 365 * 24 * time.Hour / time.Millisecond
	return min(time.Duration(pttl), most) * time.Millisecond
}

// FenceTTL parses the parameter fence_ttl. It returns zero if the parameter is missing.
func FenceTTL(params map[string]string) (time.Duration, error) {
	text, ok := params["fence_ttl"]
	if !ok {
		return 0, nil
	}
	ttl, err := clock.ParseDuration(text)
	if err != nil || ttl < time.Millisecond {
		return 0, fmt.Errorf("%w: parameter fence_ttl=%q: want at least 1ms, such as 720h",
			backend.ErrInvalid, text)
	}
	return ttl, nil
}

// DefaultFenceTTL is the default of each strategy's Options.FenceTTL.
const DefaultFenceTTL = 30 * 24 * time.Hour

// CheckFenceTTL returns the value of Options.FenceTTL: the default for zero, and an
// error for less than a millisecond.
func CheckFenceTTL(ttl time.Duration) (time.Duration, error) {
	ttl = cmp.Or(ttl, DefaultFenceTTL)
	if ttl < time.Millisecond {
		return 0, fmt.Errorf("%w: fence_ttl %v is below 1ms", backend.ErrInvalid, ttl)
	}
	return ttl, nil
}

// NoFence is the error of a fenced Acquire if the value of the fence counter is not a number that
// hasp wrote. hasp never overwrites that value.
func NoFence(counter string) error {
	return fmt.Errorf("%w: the value of %q is no fence counter; remove it, so that hasp can "+
		"begin a new one", backend.ErrInvalid, counter)
}
