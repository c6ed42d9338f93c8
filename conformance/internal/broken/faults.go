package broken

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/hasplock/hasp/backend"
)

// at runs f in the store for d.
func (d *driver) at(ctx context.Context, f func(s *store, now time.Time)) error {
	return d.way.call(ctx, func(now time.Time) { f(d.way.store, now) })
}

var acquireFaults = []Fault{
	{
		Name: "no call reaches the store", Clause: "takes-and-releases", kind: polls,
		spoil: func(d *driver) {
			d.acquire = func(context.Context, backend.Claim) (backend.Grant, error) { return backend.Grant{}, errRefused }
		},
	},
	{
		Name: "every attempt is granted", Clause: "acquire-excludes", kind: polls,
		spoil: func(d *driver) {
			d.acquire = func(ctx context.Context, c backend.Claim) (g backend.Grant, err error) {
				return g, d.at(ctx, func(s *store, now time.Time) { s.give(d.key(c.Key), s.get(d.key(c.Key), now), c, now) })
			}
		},
	},
	{
		Name: "the check and the grant are two commands", Clause: "acquire-one-winner", kind: polls,
		spoil: func(d *driver) {
			d.acquire = func(ctx context.Context, c backend.Claim) (g backend.Grant, err error) {
				d.at(ctx, func(s *store, now time.Time) {
					if r := s.get(d.key(c.Key), now); r.token != "" {
						err = r.refusal(now)
					}
				})
				if err != nil {
					return g, err
				}
				return g, d.at(ctx, func(s *store, now time.Time) { s.give(d.key(c.Key), s.get(d.key(c.Key), now), c, now) })
			}
		},
	},
	{
		Name: "a driver takes a key again that it holds", Clause: "acquire-not-reentrant", kind: polls,
		spoil: func(d *driver) {
			mine := map[string]string{} // owners by key
			d.acquire = func(ctx context.Context, c backend.Claim) (g backend.Grant, err error) {
				d.at(ctx, func(s *store, now time.Time) {
					if r := s.get(d.key(c.Key), now); r.token != "" && r.owner == mine[c.Key] && r.owner == c.Owner {
						s.give(d.key(c.Key), r, c, now)
						return
					}
					if _, err = s.acquire(d.key(c.Key), c, now); err == nil {
						mine[c.Key] = c.Owner
					}
				})
				return g, err
			}
		},
	},
	{
		Name: "Acquire waits until the key is free", Clause: "acquire-one-attempt", kind: polls,
		spoil: func(d *driver) {
			d.acquire = func(ctx context.Context, c backend.Claim) (backend.Grant, error) {
				for {
					g, err := d.soundAcquire(context.WithoutCancel(ctx), c)
					if !errors.Is(err, backend.ErrHeld) || isClosed(d.way.store.ended) {
						return g, err
					}
					time.Sleep(10 * time.Millisecond)
				}
			}
		},
	},
	{
		Name: "a refused attempt prolongs the hold", Clause: "acquire-refused-changes-nothing", kind: polls,
		spoil: func(d *driver) {
			d.acquire = func(ctx context.Context, c backend.Claim) (backend.Grant, error) {
				g, err := d.soundAcquire(ctx, c)
				if errors.Is(err, backend.ErrHeld) {
					d.at(ctx, func(s *store, now time.Time) {
						s.renew(d.key(c.Key), c.TTL, anyToken, now)
					})
				}
				return g, err
			}
		},
	},
	{
		Name: "a held key is reported as an outage", Clause: "acquire-excludes", kind: waits,
		spoil: func(d *driver) {
			d.acquire = answers(d.soundAcquire, func(_ backend.Claim, _ *backend.Grant, err *error) {
				if errors.Is(*err, backend.ErrHeld) {
					*err = errors.New("broken: could not lock")
				}
			})
		},
	},
	{
		Name: "RetryAfter is in the wrong unit", Clause: "acquire-held-details", kind: polls,
		spoil: func(d *driver) {
			d.acquire = answers(d.soundAcquire, func(_ backend.Claim, _ *backend.Grant, err *error) {
				var he *backend.HeldError
				if errors.As(*err, &he) {
					*err = &backend.HeldError{RetryAfter: 1000 * he.RetryAfter, Owner: he.Owner} // ms for µs
				}
			})
		},
	},
	{
		Name: "MaxTTL is claimed, but longer terms are granted", Clause: "acquire-max-ttl", kind: polls,
		spoil: func(d *driver) { d.claims(func(t *backend.Traits) { t.MaxTTL = time.Hour }) },
	},
	{
		Name: "a context that has ended is reported as ErrHeld", Clause: "acquire-dead-context", kind: polls,
		spoil: func(d *driver) {
			d.acquire = func(ctx context.Context, c backend.Claim) (backend.Grant, error) {
				if ctx.Err() != nil {
					return backend.Grant{}, backend.ErrHeld
				}
				return d.soundAcquire(ctx, c)
			}
		},
	},
}

// halfATermLate moves a deadline.
func halfATermLate(c backend.Claim, g *backend.Grant, err *error) {
	if *err == nil {
		g.Until = g.Until.Add(c.TTL / 2)
	}
}

var termFaults = []Fault{
	{
		Name: "holds never end", Clause: "expiry-frees", kind: polls,
		spoil: func(d *driver) { d.ttl = func(backend.Claim) time.Duration { return 1000 * time.Hour } },
	},
	{
		Name: "terms are cut short", Clause: "expiry-not-early", kind: polls,
		spoil: func(d *driver) { d.ttl = func(c backend.Claim) time.Duration { return c.TTL * 3 / 4 } },
	},
	{
		Name: "all holds have the same term", Clause: "expiry-own-term", kind: polls,
		spoil: func(d *driver) { d.ttl = func(backend.Claim) time.Duration { return 400 * time.Millisecond } },
	},
	{
		Name: "long terms overflow", Clause: "expiry-long-term", kind: polls,
		spoil: func(d *driver) { d.ttl = func(c backend.Claim) time.Duration { return min(c.TTL, time.Hour) } },
	},
	{
		Name: "the deadline is half a term late", Clause: "deadline-in-time", kind: waits,
		spoil: func(d *driver) { d.acquire = answers(d.soundAcquire, halfATermLate) },
	},
	{
		Name: "the deadline of a renewal is half a term late", Clause: "deadline-after-renewal", kind: waits,
		spoil: func(d *driver) { d.renewOne = answers(d.soundRenewOne, halfATermLate) },
	},
	{
		Name: "a late deadline lets a lease live on", Clause: "lease-loss-before-others", kind: polls,
		spoil: func(d *driver) {
			d.deadline = func(c backend.Claim, called time.Time) time.Time { return called.Add(2 * c.TTL) }
		},
	},
	{
		Name: "the deadline counts from the reply", Clause: "link-deadline", kind: polls,
		spoil: func(d *driver) {
			d.deadline = func(c backend.Claim, _ time.Time) time.Time { return time.Now().Add(c.TTL - backend.Drift(c.TTL)) }
		},
	},
}

var releaseFaults = []Fault{
	{
		Name: "Release ignores the token", Clause: "release-foreign", kind: polls,
		spoil: func(d *driver) {
			d.release = func(ctx context.Context, c backend.Claim) (err error) {
				d.at(ctx, func(s *store, now time.Time) { err = s.release(d.key(c.Key), anyToken, now) })
				return err
			}
		},
	},
	{
		Name: "Release trusts the driver's memory of its holds", Clause: "release-stale", kind: polls,
		spoil: func(d *driver) {
			holds := map[string]bool{} // tokens
			d.onGrant(func(_ *store, c backend.Claim, _ time.Time) { holds[c.Token] = true })
			d.release = func(ctx context.Context, c backend.Claim) (err error) {
				d.at(ctx, func(s *store, now time.Time) {
					err = backend.ErrLost
					if holds[c.Token] {
						err = s.release(d.key(c.Key), anyToken, now)
					} else {
						err = s.release(d.key(c.Key), func(token string) bool { return token == c.Token }, now)
					}
					delete(holds, c.Token)
				})
				return err
			}
		},
	},
	{
		Name: "Release compares the token in one command and removes the record in another", Clause: "link-late-release", kind: polls, cost: twice,
		spoil: func(d *driver) {
			d.release = func(ctx context.Context, c backend.Claim) error {
				lost, err := d.lost(ctx, c)
				if err != nil {
					return err
				}
				if lost {
					return backend.ErrLost
				}
				return d.soundBreak(ctx, c.Key)
			}
		},
	},
	{
		Name: "a second Release is not an error", Clause: "release-double", kind: polls,
		spoil: func(d *driver) {
			d.release = func(ctx context.Context, c backend.Claim) error {
				if err := d.soundRelease(ctx, c); !errors.Is(err, backend.ErrLost) {
					return err
				}
				return nil
			}
		},
	},
	{
		Name: "Release of an expired hold is not an error", Clause: "release-expired", kind: polls,
		spoil: func(d *driver) {
			held := map[string]bool{}
			d.onGrant(func(_ *store, c backend.Claim, _ time.Time) { held[c.Token] = true })
			d.release = func(ctx context.Context, c backend.Claim) error {
				err := d.soundRelease(ctx, c)
				d.at(ctx, func(s *store, now time.Time) {
					if errors.Is(err, backend.ErrLost) && held[c.Token] && s.get(d.key(c.Key), now).token == "" {
						err = nil
					}
					delete(held, c.Token)
				})
				return err
			}
		},
	},
	{
		Name: "the timer of a hold outlives it and ends the next hold", Clause: "release-for-good", kind: polls,
		spoil: func(d *driver) {
			d.acquire = answers(d.soundAcquire, func(c backend.Claim, _ *backend.Grant, err *error) {
				if *err == nil {
					time.AfterFunc(c.TTL, func() { d.soundBreak(context.Background(), c.Key) })
				}
			})
		},
	},
	{
		Name: "tokens are compared up to the end of the shorter token", Clause: "token-whole", kind: polls,
		spoil: func(d *driver) {
			d.mine = func(c backend.Claim, token string) bool {
				return strings.HasPrefix(token, c.Token) || strings.HasPrefix(c.Token, token)
			}
		},
	},
	{
		Name: "tokens are compared without case", Clause: "token-whole", kind: polls,
		spoil: func(d *driver) {
			d.mine = func(c backend.Claim, token string) bool { return strings.EqualFold(c.Token, token) }
		},
	},
	{
		Name: "the owner is the proof", Clause: "token-whole", kind: polls,
		spoil: func(d *driver) {
			owners := map[string]string{} // by token
			d.onGrant(func(_ *store, c backend.Claim, _ time.Time) { owners[c.Token] = c.Owner })
			d.mine = func(c backend.Claim, token string) bool { return token == c.Token || owners[token] == c.Owner }
		},
	},
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
