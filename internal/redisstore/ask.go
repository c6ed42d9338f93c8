package redisstore

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hasplock/hasp/internal/redisstore/resp"
)

// hedgeAfter is how long a question may be without an answer before it is asked again.
const hedgeAfter = 200 * time.Millisecond

// grace is how long askAll usually waits for more answers after the first one.
const grace = time.Second

// askAll calls the function ask for each of the servers in all. It begins the next call when any
// call has ended, or after the duration hedge. With a hedge of 0, it begins all calls at once. It
// returns when all calls have ended, or when the duration patience has passed since the first
// answer. Then it ends the other calls. Their servers are neither in answers nor in errs.
func askAll[S, T any](ctx context.Context, all []S, hedge, patience time.Duration,
	ask func(context.Context, S) (T, error)) (answers []T, errs []error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type result struct {
		answer T
		err    error
	}
	results := make(chan result, len(all))
	var late <-chan time.Time // nil before the first answer
	for asked := 0; len(answers)+len(errs) < len(all); {
		var slow <-chan time.Time // nil if there is no further server to ask
		if asked < len(all) {
			s := all[asked]
			asked++
			go func() {
				v, err := ask(ctx, s)
				results <- result{v, err}
			}()
			slow = time.After(hedge)
		}
		select {
		case r := <-results:
			if r.err != nil {
				errs = append(errs, r.err)
				continue
			}
			answers = append(answers, r.answer)
			if patience == 0 { // one answer is enough
				return answers, errs
			}
			if late == nil {
				late = time.After(patience)
			}
		case <-slow:
		case <-late:
			return answers, errs
		}
	}
	return answers, errs
}

// The function worst returns the most useful of the errors of several servers. If a server replied
// with an error, or is of another cluster, that error is the result, because it says more than a
// missing reply. Otherwise the result contains the first error. kind is a word for the servers in
// the plural.
func worst(errs []error, kind string) error {
	for _, err := range errs {
		if resp.IsReply(err) || errors.Is(err, errForeign) {
			return err
		}
	}

	if len(errs) == 1 {
		return errs[0]
	}
	return fmt.Errorf("none of %d %s can be used: %w", len(errs), kind, errs[0])
}
