package hasp

import (
	"context"
	"time"
)

// leaseContext ends no later than its lease, for whoever looks.
type leaseContext struct {
	context.Context // native, so that children attach to it
	lease           *Lease
	cancel          context.CancelCauseFunc
}

func newLeaseContext(l *Lease) *leaseContext {
	x := &leaseContext{lease: l}
	if l.outer() == nil {
		x.Context, x.cancel = context.WithCancelCause(l.parent)
		return x
	}
	// Lock's context ends when the outer lease is unlocked, and this one must
	// not: it is followed by hand.
	x.Context, x.cancel = context.WithCancelCause(context.WithoutCancel(l.parent))
	x.follow(l.parent, l.outer())
	return x
}

// follow ends x with ctx, unless ctx ended only because outer was unlocked;
// then it follows what outer followed.
func (x *leaseContext) follow(ctx context.Context, outer *Lease) {
	stop := context.AfterFunc(ctx, func() {
		next, outer := beyondUnlocked(ctx, outer)
		if next.Err() != nil {
			x.cancel(context.Cause(next))
		} else {
			x.follow(next, outer)
		}
	})
	context.AfterFunc(x.Context, func() { stop() })
}

// beyondUnlocked goes from ctx, which is derived from the context of outer,
// outwards past the contexts that have ended only because a lease of the same
// hold was unlocked.
func beyondUnlocked(ctx context.Context, outer *Lease) (context.Context, *Lease) {
	for outer != nil && ctx.Err() != nil && context.Cause(ctx) == ErrReleased && outer.state.Load() == released {
		ctx, outer = outer.parent, outer.outer()
	}
	return ctx, outer
}

// Err is nil until the context ends. It looks at the clock first.
func (x *leaseContext) Err() error {
	x.check()
	return x.Context.Err()
}

// Done is closed when the context ends. It looks at the clock first.
func (x *leaseContext) Done() <-chan struct{} {
	x.check()
	return x.Context.Done()
}

func (x *leaseContext) check() {
	if err := x.lease.Err(); err != nil {
		x.cancel(err)
	} else if outer := x.lease.outer(); outer != nil && x.lease.parent.Err() != nil {
		if ctx, _ := beyondUnlocked(x.lease.parent, outer); ctx.Err() != nil {
			x.cancel(context.Cause(ctx))
		}
	}
}

// Deadline is that of Lock's context; the lease's own moves with each renewal
// and is Lease.Expires.
func (x *leaseContext) Deadline() (time.Time, bool) {
	ctx, _ := beyondUnlocked(x.lease.parent, x.lease.outer())
	return ctx.Deadline()
}

// leaseKey is the key of the innermost lease in a context.
var leaseKey = new(int)

// Value finds the lease, for re-entry.
func (x *leaseContext) Value(key any) any {
	if key == any(leaseKey) {
		return x.lease
	}
	return x.Context.Value(key)
}
