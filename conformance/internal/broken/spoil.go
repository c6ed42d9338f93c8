package broken

import (
	"context"
	"errors"
	"time"

	"github.com/hasplock/hasp/backend"
)

// spoil puts a fault into a driver.
type spoil func(d *driver)

// spoils returns a spoil that applies the given spoils, in their order.
func spoils(all ...spoil) spoil {
	return func(d *driver) {
		for _, spoil := range all {
			spoil(d)
		}
	}
}

// part is a method of the driver that faults change.
type part struct {
	call  func(d *driver) *call
	sound effect // the command that a correct driver sends
}

var (
	onAcquire = part{func(d *driver) *call { return &d.acquire }, (*command).acquire}
	onWait    = part{func(d *driver) *call { return &d.wait }, nil}
	onRenew   = part{func(d *driver) *call { return &d.renewOne }, (*command).renew}
	onRelease = part{func(d *driver) *call { return &d.release }, (*command).release}
	onBreak   = part{func(d *driver) *call { return &d.breakKey }, (*command).breakKey}
)

// op is one call of a part.
type op struct {
	d    *driver
	c    backend.Claim
	next call // the call that the fault replaces
}

// by replaces the call with the function f.
func (p part) by(f func(ctx context.Context, o op) (backend.Grant, error)) spoil {
	return func(d *driver) {
		next := *p.call(d)
		*p.call(d) = func(ctx context.Context, c backend.Claim) (backend.Grant, error) {
			return f(ctx, op{d, c, next})
		}
	}
}

// first lets f run before the call. If f fails, its error is returned, and the call is not made.
func (p part) first(f func(ctx context.Context, o op) error) spoil {
	return p.by(func(ctx context.Context, o op) (backend.Grant, error) {
		if err := f(ctx, o); err != nil {
			return backend.Grant{}, err
		}
		return o.next(ctx, o.c)
	})
}

// firstSends is like the method first, but f is a command that the store runs before the call.
func (p part) firstSends(f effect) spoil {
	return p.first(func(ctx context.Context, o op) error {
		_, err := o.d.send(ctx, o.c, f)
		return err
	})
}

// asks lets f change the claim of the call.
func (p part) asks(f func(c *backend.Claim)) spoil {
	return p.by(func(ctx context.Context, o op) (backend.Grant, error) {
		f(&o.c)
		return o.next(ctx, o.c)
	})
}

// grants lets f change the grant of a call that succeeded.
func (p part) grants(f func(o op, g *backend.Grant)) spoil {
	return p.by(func(ctx context.Context, o op) (backend.Grant, error) {
		g, err := o.next(ctx, o.c)
		if err == nil {
			f(o, &g)
		}
		return g, err
	})
}

// turns replaces an error by the argument to, if it matches the argument from or if from is nil.
func (p part) turns(from, to error) spoil {
	return p.by(func(ctx context.Context, o op) (backend.Grant, error) {
		g, err := o.next(ctx, o.c)
		if err != nil && (from == nil || errors.Is(err, from)) {
			err = to
		}
		return g, err
	})
}

// inStore lets the call send the command f.
func (p part) inStore(f effect) spoil {
	return p.by(func(ctx context.Context, o op) (backend.Grant, error) {
		return o.d.send(ctx, o.c, f)
	})
}

// after lets the store run f after the call's command, if the command's error matches answer.
func (p part) after(answer error, f func(x *command)) spoil {
	return p.inStore(func(x *command) (uint64, error) {
		fence, err := p.sound(x)
		if errors.Is(err, answer) {
			f(x)
		}
		return fence, err
	})
}

// doNothing is a command without an effect.
func doNothing(*command) (uint64, error) { return 0, nil }

// claims lets f change the Traits.
func claims(f func(t *backend.Traits)) spoil {
	return func(d *driver) {
		next := d.traits
		d.traits = func() backend.Traits {
			t := next()
			f(&t)
			return t
		}
	}
}

// claimsEnds lets the driver claim the given Cancellation.
func claimsEnds(ends backend.Cancellation) spoil {
	return claims(func(t *backend.Traits) { t.Cancellation = ends })
}

// listsBy replaces List by the function f. The argument next of f is the original List.
func listsBy(f func(ctx context.Context, d *driver, prefix string, next lists) seq) spoil {
	return func(d *driver) {
		list := d.list
		d.list = func(ctx context.Context, prefix string, timeout time.Duration) seq {
			next := func(ctx context.Context, prefix string) seq {
				return list(ctx, prefix, timeout)
			}
			return f(ctx, d, prefix, next)
		}
	}
}

// lists is a List with the timeout of its caller.
type lists = func(ctx context.Context, prefix string) seq

// yieldsBy lets f replace the yield function of each loop over a list.
func yieldsBy(f func(yield yield) yield) spoil {
	return listsBy(func(ctx context.Context, _ *driver, prefix string, next lists) seq {
		return func(yield yield) { next(ctx, prefix)(f(yield)) }
	})
}

// changes lets f change the store itself.
func changes(f func(s *store)) spoil {
	return func(d *driver) { d.way.store.locked(func() { f(d.way.store) }) }
}
