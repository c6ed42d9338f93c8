package hasp

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
)

// Bounds of the pauses before Lead competes again.
const (
	lossPause    = 100 * time.Millisecond // the longest after a loss
	outagePause  = 100 * time.Millisecond // the longest after the first of several outages in a row; it doubles
	longestPause = time.Second            // the longest of all
)

// Lead runs fn while it holds key, and competes again whenever the lease was
// lost: leader election. It returns nil only if fn returned nil and the key
// was held until then. Otherwise it returns
//   - fn's error, joined with Unlock's, if the key was held until fn returned;
//   - the error of Lock if ctx ended or the Client was closed while waiting, and
//     at once ErrInvalid (fn is nil; WithMaxWait, WithShared) and errors.ErrUnsupported.
//
// After a loss Lead discards fn's result, even nil, since others may have led
// meanwhile: fn must be safe to run again. Before it competes again it waits
// up to 100 ms, and always until fn has returned. So fn never runs twice at
// once in one Lead. An outage does not end Lead: it tries again after a pause of up to
// a second. Options.Observe reports outages and losses.
//
// fn's context ends when ctx ends, or when the lease is lost, at its deadline at the
// latest. To tell which, call lease.Err: it is ErrLost after a loss, and nil if only
// ctx has ended. When ctx ends, the lease is renewed until fn has returned, so that no
// successor starts while fn cleans up. Then the key is unlocked, and a successor leads
// at once. If that lease is lost meanwhile, the error matches ErrLost. A fn that
// ignores its context after a loss runs beside the next leader: only a fence stops its
// writes.
//
// If fn panics or calls runtime.Goexit, the key is unlocked and the panic goes
// on. [Client.Inspect] shows who leads.
func Lead(ctx context.Context, l Locker, key string, fn func(ctx context.Context, lease *Lease) error, opts ...Option) error {
	if fn == nil {
		return &Error{"lead", key, errNoFunc}
	}
	var r request
	r.apply(opts)
	if r.bounded {
		return &Error{"lead", key, fmt.Errorf("%w: WithMaxWait: Lead waits until its context ends; bound that instead", ErrInvalid)}
	}

	if r.shared {
		return &Error{"lead", key, fmt.Errorf("%w: WithShared: several would lead at once", ErrInvalid)}
	}

	opts = append(slices.Clip(opts), func(r *request) { r.op = "lead" })
	refused := 0 // calls of Lock in a row that failed
	for {
		lease, err := l.Lock(ctx, key, opts...)
		if err != nil {
			if over, why := leadOver(ctx, key, err); over {
				return why
			}
			rest(ctx, nil, jitter(min(outagePause<<min(refused, 10), longestPause)))
			refused++
			continue
		}

		refused = 0
		all := Leases{[]*Lease{lease}}
		ferr, uerr := all.do(ctx, func() error { return fn(lease.Context(), lease) })
		if !errors.Is(uerr, ErrLost) || ctx.Err() != nil {
			return joined(ferr, uerr)
		}
		rest(ctx, nil, rand.N(lossPause)) // so that others that have lost theirs at the same moment do not come at once
	}
}

// leadOver reports whether err, which Lock returned, ends Lead, and with which error. An
// outage does not. Nor does ErrHeld, with which a wrapper may end a wait of its own.
func leadOver(ctx context.Context, key string, err error) (bool, error) {
	if end := ctx.Err(); end != nil {
		if !errors.Is(err, end) {
			err = &Error{"lead", key, withContextEnd(ctx, err)} // ctx ended just after an outage
		}
		return true, err
	}
	return errors.Is(err, ErrInvalid) || errors.Is(err, errUnsupported) || errors.Is(err, ErrClosed), err
}
