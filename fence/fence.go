// Package fence provides guards for the resource that a lock protects. A guard remembers the
// largest fence of each resource, and refuses a write with a smaller one. Such a write comes late,
// because its holder was stopped or cut off, and another caller has had the lock since. No lock can
// prevent such a write by itself.
//
// The caller takes its lease with [hasp.WithFence] and passes the lease's context to the guard,
// which finds the fence there. A check before a write is not enough, because a program may be
// stopped between the two. So each guard makes the write itself: [SQL] in the transaction, package
// redisfence in a transaction of Redis, package filefence under a lock of the file, [Memory] under
// a mutex. [Transport] and [Handler] carry the fence to the service that has the resource.
//
// All writers of a resource use the same guard and the same key. With [hasp.WithSlots], each slot
// has fences of its own, and so needs a resource of its own. The guards refuse a shared lease
// ([hasp.WithShared]): a resource that has readers must keep two numbers, as WithShared describes.
package fence

import (
	"context"
	"errors"
	"fmt"

	"github.com/hasplock/hasp"
)

var (
	// ErrStale says that a later holder has written. The caller has lost the lock and must stop.
	// The error is a [*StaleError].
	ErrStale = errors.New("stale fence")

	// ErrNone says that the context has no fence: it is not derived from the context of a lease, or
	// the innermost lease was taken without [hasp.WithFence].
	ErrNone = errors.New("no fence")
)

// StaleError is [ErrStale] with both fences. It also matches [hasp.ErrLost].
type StaleError struct {
	Resource string
	Fence    uint64 // the fence of the write that was refused
	Seen     uint64 // the largest fence that the resource has seen
}

// Error names the resource and both fences.
func (e *StaleError) Error() string {
	return fmt.Sprintf(
		"fence: the lock of %q was lost: a holder with fence %d has written, and this one has %d",
		e.Resource, e.Seen, e.Fence)
}

// Is reports whether target is [ErrStale] or [hasp.ErrLost].
func (e *StaleError) Is(target error) bool { return target == ErrStale || target == hasp.ErrLost }

// Compare returns a [*StaleError] if the fence f is smaller than the fence seen. Use it to write a
// guard for another store. That guard must compare and write in one step.
func Compare(resource string, f, seen uint64) error {
	if f < seen {
		return &StaleError{resource, f, seen}
	}
	return nil
}

// Of returns the fence of the innermost lease that ctx is derived from, or the fence of a [With]
// inside that lease. If there is no fence, the error is [ErrNone].
//
// If the innermost lease is shared, or one of several leases of a LockAll, the error is
// [hasp.ErrInvalid]. If there are several leases, pass [hasp.Lease.Context] of the lease whose key
// protects the resource.
func Of(ctx context.Context) (uint64, error) {
	leases := hasp.LeasesOf(ctx)
	l := first(leases)

	// If l is not the lease around With, it was taken inside With, and its own fence counts.
	if w, ok := ctx.Value(withKey).(with); ok && w.around == l {
		return w.fence, nil
	}

	switch {
	case l == nil:
		return 0, fmt.Errorf("%w: the context is not of a lease", ErrNone)
	case len(leases) > 1:
		return 0, fmt.Errorf("fence: %w: the context is of %d leases; pass the context of one of them",
			hasp.ErrInvalid, len(leases))
	case l.Shared():
		return 0, fmt.Errorf("fence: %w: the lease of %q is shared", hasp.ErrInvalid, l.Key())
	case l.Fence() == 0:
		return 0, fmt.Errorf("%w: the lease of %q was taken without hasp.WithFence", ErrNone, l.Key())
	default:
		return l.Fence(), nil
	}
}

// first returns the first lease, or nil if there is none.
func first(leases []*hasp.Lease) *hasp.Lease {
	if len(leases) == 0 {
		return nil
	}
	return leases[0]
}

var withKey = new(int)

// with is the value that With stores in a context.
type with struct {
	fence  uint64
	around *hasp.Lease // the innermost lease around With, or nil
}

// With returns a context with the fence f, which came from another process with a request or a
// message. [Handler] uses it. If f is 0, With panics.
func With(ctx context.Context, f uint64) context.Context {
	if f == 0 {
		panic("fence: With: the fence is 0")
	}
	return context.WithValue(ctx, withKey, with{f, first(hasp.LeasesOf(ctx))})
}
