package fairlock

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

// decode stores the first elements of a script's reply in *to[0], *to[1] and so on, and returns the
// other elements. The result ok is false if an element is missing or has another type.
func decode(reply any, to ...any) (others []any, ok bool) {
	r, _ := reply.([]any)
	if len(r) < len(to) {
		return nil, false
	}
	for i, v := range to {
		switch v := v.(type) {
		case *int64:
			*v, ok = r[i].(int64)
		case *string:
			*v, ok = r[i].(string)
		}
		if !ok {
			return nil, false
		}
	}

	return r[len(to):], true
}

// noPTTL stands for the PTTL that a brief report leaves out.
const noPTTL = -3

// report is the reply of the scripts that end with report.lua.
type report struct {
	pttl int64 // noPTTL in a brief report
	// the holder uses another strategy, or may do so, because the record is shared
	foreign      bool
	shared       bool
	unsubscribed bool   // the server knows that the client's channel has no subscriber
	token        string // the token of the hold
	fence        uint64
	owner        string
	found        string // for each queried token 1 if it is in the queue, and otherwise 0
	// the server's time in ms until which the call keeps the client's places; or 0
	kept   int64
	handed []any // the return values of handOver, if the script called it
}

func reportOf(reply any) (r report, ok bool) {
	var mine, foreign, lost int64
	var fence string
	r.handed, ok = decode(reply, &mine, &r.pttl, &foreign, &lost, &r.token, &fence, &r.owner,
		&r.found, &r.kept)

	// the fence of another strategy's record may be any text
	r.fence, _ = strconv.ParseUint(fence, 10, 64)
	r.foreign = foreign >= 1
	r.shared = foreign == 2
	r.unsubscribed = lost == 1
	return r, ok
}

// held returns the error for a key that is held or waited for. pttl is the rest of the term in ms.
func held(pttl int64, owner string, shared bool) *backend.HeldError {
	e := &backend.HeldError{Owner: owner, Shared: shared}
	if pttl >= 0 {
		// In the last millisecond, PTTL is 0, but a RetryAfter of 0 means that the time is unknown.
		e.RetryAfter = redisstore.Term(max(pttl, 1))
	}
	return e
}

// noQueue returns err, or a better error if err says that a key of the queue has another type. In
// that case, the script has written nothing.
func noQueue(key string, err error) error {
	if err == nil {
		return nil
	}
	var answer redis.Error
	if !errors.As(err, &answer) || !strings.Contains(err.Error(), "WRONGTYPE") {
		return err
	}

	// Redis does not say which of the keys has the wrong type.
	return fmt.Errorf("%w: the value of %q or %q is no queue; remove it (%v)", backend.ErrInvalid,
		redisstore.DerivedKey("queue", key), redisstore.DerivedKey("timeouts", key), err)
}

// flags returns the flags of c in an entry of the queue.
func flags(c backend.Claim) string {
	n := 0
	if c.Fenced {
		n = 1
	}
	if c.Shared {
		n += 2
	}
	return strconv.Itoa(n)
}
