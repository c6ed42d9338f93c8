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
// other elements. Each element of to is an *int64 or a *string. The result ok is false if an
// element of the reply is missing or has another type.
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
	// the holder uses another strategy, or may do so, because the record is shared; then no release
	// may hand the key over
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

// reportOf decodes the reply of a script that ends with report.lua. The result ok is false if the
// reply is not valid.
func reportOf(reply any) (r report, ok bool) {
	// The scripts' element mine is not needed, because callers compare r.token.
	var mine, foreign, lost int64
	var fence string
	r.handed, ok = decode(reply, &mine, &r.pttl, &foreign, &lost, &r.token, &fence, &r.owner,
		&r.found, &r.kept)

	// Ignore the error, because the fence of another strategy's record may be any text.
	r.fence, _ = strconv.ParseUint(fence, 10, 64)
	r.foreign = foreign >= 1 // 1 for another strategy, 2 for a shared record
	r.shared = foreign == 2
	r.unsubscribed = lost == 1
	return r, ok
}

// held returns the error for a key that is held, or is free but waited for. The argument pttl is
// the rest of the holder's term in ms, or negative if there is none.
func held(pttl int64, owner string, shared bool) *backend.HeldError {
	e := &backend.HeldError{Owner: owner, Shared: shared}
	if pttl >= 0 {
		// In the last millisecond, PTTL is 0, but a RetryAfter of 0 means that the time is unknown.
		e.RetryAfter = redisstore.Term(max(pttl, 1))
	}
	return e
}

// noQueue returns err, or a better error if err says that a key of the queue is no queue. That
// error is ErrInvalid, which is definite, because the script has then written nothing.
func noQueue(key string, err error) error {
	if err == nil {
		return nil
	}
	var reply redis.Error // what the server has replied
	if !errors.As(err, &reply) || !strings.Contains(err.Error(), "WRONGTYPE") {
		return err
	}

	// Name both keys, because Redis does not say which of them has the wrong type.
	return fmt.Errorf("%w: the value of %q or %q is no queue; remove it (%v)", backend.ErrInvalid,
		redisstore.DerivedKey("queue", key), redisstore.DerivedKey("timeouts", key), err)
}

// flags returns the flags of c in an entry of the queue: 1 if c is fenced, and 2 more if it is
// shared.
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
