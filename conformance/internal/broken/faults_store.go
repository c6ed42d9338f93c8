package broken

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/backend"
)

var inspectFaults = []Fault{
	{
		Name: "traits change with use", Clause: "traits-constant", kind: waits,
		spoil: func(d *driver) {
			var calls atomic.Int32
			d.traits = func() backend.Traits {
				return backend.Traits{Fenced: true, Reach: backend.Reach(1 + calls.Add(1)%2)}
			}
		},
	},
	{
		Name: "Inspect returns the last holder after its release", Clause: "inspect-holder", kind: waits,
		spoil: func(d *driver) {
			var last backend.Status
			d.inspect = func(ctx context.Context, key string) (backend.Status, error) {
				st, err := d.soundInspect(ctx, key)
				if st.Held {
					last = st
				}
				return last, err
			}
		},
	},
	{
		Name: "Inspect returns a negative term", Clause: "inspect-holder", kind: waits,
		spoil: func(d *driver) {
			d.inspect = func(ctx context.Context, key string) (backend.Status, error) {
				st, err := d.soundInspect(ctx, key)
				st.TTL = -st.TTL
				return st, err
			}
		},
	},
	{
		Name: "Inspect returns the waiters in reverse order", Clause: "inspect-waiters", kind: orders,
		spoil: func(d *driver) {
			d.inspect = func(ctx context.Context, key string) (backend.Status, error) {
				st, err := d.soundInspect(ctx, key)
				slices.Reverse(st.Waiters)
				return st, err
			}
		},
	},
	{
		Name: "Break does nothing", Clause: "break-frees", kind: waits,
		spoil: func(d *driver) { d.breakKey = func(context.Context, string) error { return nil } },
	},
	{
		Name: "Break wakes no waiter", Clause: "break-wakes", kind: waits,
		spoil: func(d *driver) {
			d.wait = func(ctx context.Context, c backend.Claim) (backend.Grant, error) { return d.sleepy(ctx, c, true) }
			d.breakKey = func(ctx context.Context, key string) error {
				return d.at(ctx, func(s *store, now time.Time) {
					if r := s.keys[d.key(key)]; r != nil {
						r.token = ""
					}
				})
			}
		},
	},
}

var closeFaults = []Fault{
	{
		Name: "Close leaves a goroutine", Clause: "close-leaves-nothing", kind: polls,
		spoil: func(d *driver) { go func() { <-d.way.store.ended }() },
	},
	{
		Name: "a Wait leaves a goroutine", Clause: "client-leaves-nothing", kind: waits,
		spoil: func(d *driver) {
			d.wait = func(ctx context.Context, c backend.Claim) (backend.Grant, error) {
				go func() { <-d.way.store.ended }()
				return d.soundWait(ctx, c)
			}
		},
	},
	{
		Name: "a hold of a closed driver cannot be released", Clause: "token-any-driver", kind: polls,
		spoil: func(d *driver) {
			var mine []backend.Claim // guarded by the store
			d.onGrant(func(_ *store, c backend.Claim, _ time.Time) { mine = append(mine, c) })
			d.close = func() error {
				return d.at(context.Background(), func(s *store, _ time.Time) {
					for _, c := range mine {
						if r := s.keys[d.key(c.Key)]; r != nil && r.token == c.Token {
							r.token = "orphan of " + c.Token
						}
					}
				})
			}
		},
	},
	{
		Name: "Close releases the holds of its driver", Clause: "close-keeps-holds", kind: polls,
		spoil: func(d *driver) {
			tokens := map[string]string{} // keys
			d.onGrant(func(_ *store, c backend.Claim, _ time.Time) { tokens[c.Token] = d.key(c.Key) })
			d.close = func() error {
				return d.at(context.Background(), func(s *store, now time.Time) {
					for token, key := range tokens {
						s.release(key, func(t string) bool { return t == token }, now)
					}
				})
			}
		},
	},
}

// anyErrorIs replaces every error by want.
func anyErrorIs(want error) func(c backend.Claim, g *backend.Grant, err *error) {
	return func(_ backend.Claim, _ *backend.Grant, err *error) {
		if *err != nil {
			*err = want
		}
	}
}

var outageFaults = []Fault{
	{
		Name: "an outage is reported as ErrHeld", Clause: "link-outage", kind: waits,
		spoil: func(d *driver) { d.acquire = answers(d.soundAcquire, anyErrorIs(backend.ErrHeld)) },
	},
	{
		Name: "a stopped store is reported as ErrLost", Clause: "restart-outage", kind: waits,
		spoil: func(d *driver) {
			d.release = func(ctx context.Context, c backend.Claim) error {
				if err := d.soundRelease(ctx, c); err != nil {
					return backend.ErrLost
				}
				return nil
			}
		},
	},
	{
		Name: "a call does not end while the store hangs", Clause: "link-outage", kind: polls,
		spoil: func(d *driver) {
			d.release = func(ctx context.Context, c backend.Claim) error {
				ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
				defer cancel()
				go func() {
					select {
					case <-d.way.store.ended:
						cancel()
					case <-ctx.Done():
					}
				}()
				return d.soundRelease(ctx, c)
			}
		},
	},
	{
		Name: "a driver does not work again after an outage", Clause: "link-outage", kind: polls,
		spoil: func(d *driver) {
			var dead atomic.Bool
			d.acquire = func(ctx context.Context, c backend.Claim) (backend.Grant, error) {
				if dead.Load() {
					return backend.Grant{}, errRefused
				}
				g, err := d.soundAcquire(ctx, c)
				if errors.Is(err, errRefused) {
					dead.Store(true)
				}
				return g, err
			}
		},
	},
	{
		Name: "a call whose reply is lost is repeated", Clause: "link-sent-once", kind: polls,
		spoil: func(d *driver) {
			d.acquire = func(ctx context.Context, c backend.Claim) (backend.Grant, error) {
				g, err := d.soundAcquire(ctx, c)
				if errors.Is(err, errNoReply) {
					return d.soundAcquire(ctx, c)
				}
				return g, err
			}
		},
	},
	{
		Name: "a call of two commands whose reply is lost is repeated", Clause: "link-sent-once", kind: polls, cost: twice,
		spoil: func(d *driver) {
			d.acquire = func(ctx context.Context, c backend.Claim) (backend.Grant, error) {
				if err := d.at(ctx, func(*store, time.Time) {}); err != nil {
					return backend.Grant{}, err
				}
				g, err := d.soundAcquire(ctx, c)
				if errors.Is(err, errNoReply) {
					return d.soundAcquire(ctx, c)
				}
				return g, err
			}
		},
	},
	{
		Name: "Wait repeats an attempt whose reply is lost, and waits for its own hold", Clause: "link-wait-reply", kind: waits,
		spoil: func(d *driver) {
			d.wait = func(ctx context.Context, c backend.Claim) (backend.Grant, error) {
				g, err := d.soundAcquire(ctx, c)
				if err == nil {
					return g, nil
				}
				if errors.Is(err, errNoReply) {
					c.Token += "-again"
				}
				return d.soundWait(ctx, c)
			}
		},
	},
	{
		Name: "EndsPromptly is claimed, but the second command ignores the cancellation", Clause: "link-ends", kind: polls, cost: twice,
		spoil: func(d *driver) {
			d.claimEnds(backend.EndsPromptly)
			d.release = func(ctx context.Context, c backend.Claim) error {
				if err := d.at(ctx, func(*store, time.Time) {}); err != nil {
					return err
				}
				ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 3*time.Second)
				defer cancel()
				return d.soundRelease(ctx, c)
			}
		},
	},
	{
		Name: "a waiter that is cut off keeps its place", Clause: "link-cut-waiter", kind: orders,
		spoil: func(d *driver) { d.way.store.stay = time.Hour },
	},
	{
		Name: "EndsByDeadline is claimed, but a call ends a second later", Clause: "link-ends", kind: polls,
		spoil: func(d *driver) {
			d.claimEnds(backend.EndsByDeadline)
			d.acquire = func(ctx context.Context, c backend.Claim) (backend.Grant, error) {
				if deadline, ok := ctx.Deadline(); ok {
					later, cancel := context.WithDeadline(context.WithoutCancel(ctx), deadline.Add(time.Second))
					defer cancel()
					ctx = later
				}
				return d.soundAcquire(ctx, c)
			}
		},
	},
	{
		Name: "EndsPromptly is claimed, but a call ignores the cancellation", Clause: "link-ends", kind: polls,
		spoil: func(d *driver) {
			d.claimEnds(backend.EndsPromptly)
			d.release = func(ctx context.Context, c backend.Claim) error {
				deadline, ok := ctx.Deadline()
				ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
				defer cancel()
				if ok {
					ctx, cancel = context.WithDeadline(ctx, deadline)
					defer cancel()
				}
				return d.soundRelease(ctx, c)
			}
		},
	},
	{
		Name: "the deadline of a cut-off lease is late", Clause: "link-hung-store", kind: polls,
		spoil: func(d *driver) {
			d.deadline = func(c backend.Claim, called time.Time) time.Time { return called.Add(2 * c.TTL) }
		},
	},
	{
		Name: "a dropped script is not loaded again", Clause: "flush-unnoticed", kind: waits,
		spoil: func(d *driver) {
			flushes := func() int {
				d.way.store.mu.Lock()
				defer d.way.store.mu.Unlock()
				return d.way.store.flushes
			}
			loaded := flushes()
			d.renewOne = func(ctx context.Context, c backend.Claim) (backend.Grant, error) {
				if flushes() != loaded {
					return backend.Grant{}, errors.New("broken: no such script")
				}
				return d.soundRenewOne(ctx, c)
			}
		},
	},
	{
		Name: "a waiter does not notice that its connection has ended", Clause: "kick-ridden-out", kind: waits,
		spoil: func(d *driver) {
			d.wait = func(ctx context.Context, c backend.Claim) (backend.Grant, error) {
				d.way.store.mu.Lock()
				kicked := d.way.store.kicked
				d.way.store.mu.Unlock()
				on, stop := context.WithCancel(ctx)
				defer stop()
				go func() {
					select {
					case <-kicked:
						stop() // this connection carries nothing any more
					case <-on.Done():
					}
				}()
				g, err := d.soundWait(on, c)
				if err != nil && isClosed(kicked) {
					<-ctx.Done()
				}
				return g, err
			}
		},
	},
	{
		Name: "renewals trust the driver's memory", Clause: "restart-without-data", kind: polls,
		spoil: func(d *driver) {
			d.renewOne = answers(d.soundRenewOne, func(_ backend.Claim, _ *backend.Grant, err *error) {
				if errors.Is(*err, backend.ErrLost) {
					*err = nil
				}
			})
		},
	},
	{
		Name: "holds do not survive a restart of the store", Clause: "restart-with-data", kind: polls,
		spoil: func(d *driver) {
			s := d.way.store
			s.lose = func(bool) { clear(s.keys) }
		},
	},
	{
		Name: "Wait reports a restart as ErrHeld", Clause: "restart-waiter", kind: waits,
		spoil: func(d *driver) {
			short := asks(d.soundWait, func(c *backend.Claim) { c.Timeout = 4 * latency }) // rides out nothing
			d.wait = answers(short, anyErrorIs(backend.ErrHeld))
		},
	},
	{
		Name: "Network is claimed, but the driver reaches one process", Clause: "reach", kind: polls,
		spoil: func(*driver) {},
	},
}

var costFaults = []Fault{
	{
		Name: "a second record of a hold stays until the Release", Clause: "leftovers-expired", kind: polls, cost: twice,
		spoil: func(d *driver) {
			d.onGrant(func(s *store, c backend.Claim, now time.Time) {
				s.keys["history of "+c.Token] = &record{token: c.Token, until: now.Add(time.Hour)}
			})
			d.release = func(ctx context.Context, c backend.Claim) error {
				d.at(ctx, func(s *store, _ time.Time) { delete(s.keys, "history of "+c.Token) })
				return d.soundRelease(ctx, c)
			}
		},
	},
	{
		Name: "Break leaves a record of the broken hold", Clause: "leftovers-expired", kind: waits,
		spoil: func(d *driver) {
			d.breakKey = func(ctx context.Context, key string) error {
				d.at(ctx, func(s *store, now time.Time) {
					s.keys["broken "+key] = &record{token: "broken", until: now.Add(time.Hour)}
				})
				return d.soundBreak(ctx, key)
			}
		},
	},
	{
		Name: "a late vote is not released after Close", Clause: "leftovers-close", kind: polls,
		spoil: func(d *driver) {
			var closed atomic.Bool
			d.acquire = func(ctx context.Context, c backend.Claim) (backend.Grant, error) {
				g, err := d.soundAcquire(ctx, c)
				if err == nil {
					go func() {
						vote := "vote for " + c.Token
						time.Sleep(10 * time.Millisecond)
						d.at(context.Background(), func(s *store, now time.Time) {
							s.keys[vote] = &record{token: c.Token, until: now.Add(c.TTL)}
						})
						time.Sleep(10 * time.Millisecond)
						if !closed.Load() {
							d.at(context.Background(), func(s *store, _ time.Time) { delete(s.keys, vote) })
						}
					}()
				}
				return g, err
			}
			d.close = func() error { closed.Store(true); return nil }
		},
	},
	{
		Name: "Acquire checks in an extra call whether the key is free", Clause: "commands-per-operation", kind: polls,
		spoil: func(d *driver) {
			d.acquire = func(ctx context.Context, c backend.Claim) (backend.Grant, error) {
				if _, err := d.soundInspect(ctx, c.Key); err != nil {
					return backend.Grant{}, err
				}
				return d.soundAcquire(ctx, c)
			}
		},
	},
	{
		Name: "waiters poll without pause", Clause: "commands-waiting", kind: waits,
		spoil: func(d *driver) {
			d.wait = func(ctx context.Context, c backend.Claim) (backend.Grant, error) {
				for ctx.Err() == nil {
					g, err := d.soundAcquire(context.WithoutCancel(ctx), c)
					if !errors.Is(err, backend.ErrHeld) {
						return g, err
					}
				}
				return backend.Grant{}, backend.ErrHeld
			}
		},
	},
	{
		Name: "a refused attempt leaves a record", Clause: "leftovers", kind: polls,
		spoil: func(d *driver) {
			d.acquire = func(ctx context.Context, c backend.Claim) (backend.Grant, error) {
				g, err := d.soundAcquire(ctx, c)
				if errors.Is(err, backend.ErrHeld) {
					d.at(ctx, func(s *store, now time.Time) {
						s.keys["attempts:"+c.Key] = &record{token: c.Token, until: now.Add(time.Hour)}
					})
				}
				return g, err
			}
		},
	},
}
