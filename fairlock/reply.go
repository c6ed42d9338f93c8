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

// fields is the array that a script returns.
type fields []any

func fieldsOf(reply any) fields {
	r, _ := reply.([]any)
	return r
}

// noInt is what int returns for a field that is not an integer.
const noInt = -1 << 62

func (r fields) int(i int) int64 {
	if i < len(r) {
		if n, ok := r[i].(int64); ok {
			return n
		}
	}
	return noInt
}

func (r fields) text(i int) string {
	if i < len(r) {
		s, _ := r[i].(string)
		return s
	}
	return ""
}

func (r fields) isText(i int) bool {
	if i >= len(r) {
		return false
	}
	_, ok := r[i].(string)
	return ok
}

// noPTTL is the PTTL of a brief report, which does not say it.
const noPTTL = -3

// report is the reply of the scripts that end with report.lua.
type report struct {
	pttl         int64 // noPTTL in a brief report
	foreign      bool  // the holder is of another strategy, or may be, because the record is shared
	shared       bool
	unsubscribed bool   // the server knows that the client's channel has no subscriber
	token        string // of the hold
	fence        uint64
	owner        string
	found        string // for each queried entry 1 if it is in the queue, and otherwise 0
	handed       fields // the return values of handOver, if the key was free
}

func reportOf(reply any) (report, bool) {
	r := fieldsOf(reply)
	if len(r) < 8 || r.int(1) < noPTTL || !r.isText(4) || !r.isText(5) || !r.isText(6) || !r.isText(7) {
		return report{}, false
	}

	fence, _ := strconv.ParseUint(r.text(5), 10, 64) // in a record of another strategy it may be anything
	return report{r.int(1), r.int(2) >= 1, r.int(2) == 2, r.int(3) == 1, r.text(4), fence, r.text(6), r.text(7), r[8:]}, true
}

// held returns the error for a key that is held, or waited for, with pttl ms left.
func held(pttl int64, owner string, shared bool) *backend.HeldError {
	e := &backend.HeldError{Owner: owner, Shared: shared}
	if pttl >= 0 {
		// In the last millisecond PTTL is 0, but a RetryAfter of 0 means unknown.
		e.RetryAfter = redisstore.Term(max(pttl, 1))
	}
	return e
}

// noFence returns the error for a fence counter that is none.
func noFence(key string) error {
	return redisstore.NoFence(redisstore.DerivedKey("fence", key))
}

// noQueue returns err, or a better error if err says that a key of the queue has
// another type. The script has written nothing then.
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
		redisstore.DerivedKey("places", key), redisstore.DerivedKey("clients", key), err)
}

func flag(b bool) int {
	if b {
		return 1
	}
	return 0
}

// flags returns the flags of c in an entry of the queue.
func flags(c backend.Claim) int { return flag(c.Fenced) + 2*flag(c.Shared) }

// split splits the return values of handOver into grants, and where it stopped in the queue.
func (r fields) split() (grants, stopped fields) {
	n := 0
	for n < len(r) && r.int(n) != 2 {
		n = min(n+4, len(r))
	}
	return r[:n], r[n:]
}
