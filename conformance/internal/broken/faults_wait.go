package broken

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/hasplock/hasp/backend"
)

// sleepy is a Wait that polls only when the key is signalled and, if byTerm, when the
// holder's term ends. Its steps are in the right order.
func (d *driver) sleepy(ctx context.Context, c backend.Claim, byTerm bool) (backend.Grant, error) {
	for {
		changed := d.way.store.watch(d.key(c.Key))
		g, again, err := d.lookAndSleep(ctx, c, changed, byTerm)
		if !again {
			return g, err
		}
	}
}

// lookAndSleep is one round of a Wait.
func (d *driver) lookAndSleep(ctx context.Context, c backend.Claim, changed <-chan struct{}, byTerm bool) (g backend.Grant, again bool, err error) {
	called := time.Now()
	fence, err := d.lookOnce(ctx, c)
	if err == nil {
		return backend.Grant{Fence: fence, Until: d.deadline(c, called)}, false, nil
	}
	if changed == nil {
		changed = d.way.store.watch(d.key(c.Key))
	}
	return g, d.sleepUntil(ctx, c, changed, err, byTerm), err
}

func (d *driver) sleepUntil(ctx context.Context, c backend.Claim, changed <-chan struct{}, err error, byTerm bool) bool {
	var end <-chan time.Time
	if byTerm {
		t := time.NewTimer(max(retryAfter(err), time.Millisecond))
		defer t.Stop()
		end = t.C
	}
	select {
	case <-changed:
	case <-end:
	case <-ctx.Done():
		d.quit(c)
		return false
	}
	return true
}

var waitFaults = []Fault{
	{
		Name: "Wait sleeps before its first attempt", Clause: "wait-free", kind: waits,
		spoil: func(d *driver) {
			d.wait = func(ctx context.Context, c backend.Claim) (backend.Grant, error) {
				select {
				case <-d.way.store.watch(d.key(c.Key)):
				case <-ctx.Done():
					return backend.Grant{}, backend.ErrHeld
				}
				return d.soundWait(ctx, c)
			}
		},
	},
	{
		Name: "Wait makes its attempt before it listens, and misses wake-ups", Clause: "wait-woken", kind: waits,
		spoil: func(d *driver) {
			d.wait = func(ctx context.Context, c backend.Claim) (backend.Grant, error) {
				for {
					g, again, err := d.lookAndSleep(ctx, c, nil, true)
					if !again {
						return g, err
					}
				}
			}
		},
	},
	{
		Name: "Wait does not notice the end of a term", Clause: "wait-dead-holder", kind: waits,
		spoil: func(d *driver) {
			d.wait = func(ctx context.Context, c backend.Claim) (backend.Grant, error) { return d.sleepy(ctx, c, false) }
		},
	},
	{
		Name: "a hold by Wait lasts an hour", Clause: "wait-dead-successor", kind: waits,
		spoil: func(d *driver) { d.wait = asks(d.soundWait, func(c *backend.Claim) { c.TTL = max(c.TTL, time.Hour) }) },
	},
	{
		Name: "the deadline counts from the beginning of the Wait", Clause: "wait-deadline", kind: waits,
		spoil: func(d *driver) {
			d.wait = answers(d.soundWait, func(_ backend.Claim, g *backend.Grant, _ *error) { g.Until = time.Time{} })
		},
	},
	{
		Name: "the deadline of a hold by Wait is half a term late", Clause: "wait-deadline", kind: waits,
		spoil: func(d *driver) { d.wait = answers(d.soundWait, halfATermLate) },
	},
	{
		Name: "a cancelled Wait continues, and its grant has no owner", Clause: "wait-cancelled", kind: waits,
		spoil: func(d *driver) {
			d.wait = func(ctx context.Context, c backend.Claim) (backend.Grant, error) {
				on, stop := context.WithCancel(context.WithoutCancel(ctx))
				var g backend.Grant
				done := make(chan error, 1)
				go func() {
					var err error
					g, err = d.soundWait(on, c)
					done <- err
				}()
				go func() {
					<-d.way.store.ended
					stop()
				}()
				select {
				case err := <-done:
					return g, err
				case <-ctx.Done():
					return backend.Grant{}, backend.ErrHeld
				}
			}
		},
	},
	{
		Name: "a cancelled Wait leaves its place in the queue", Clause: "wait-cancelled", kind: orders,
		spoil: func(d *driver) {
			d.quit = func(c backend.Claim) {
				d.at(context.Background(), func(s *store, now time.Time) {
					r := s.get(d.key(c.Key), now)
					for i := range r.queue {
						if r.queue[i].token == c.Token {
							r.queue[i].alive = now.Add(time.Hour)
						}
					}
				})
			}
		},
	},
	{
		Name: "a cancelled Wait does not return the store's answer", Clause: "wait-cancelled", kind: waits,
		spoil: func(d *driver) {
			d.wait = func(ctx context.Context, c backend.Claim) (backend.Grant, error) {
				g, err := d.soundWait(ctx, c)
				if err != nil && ctx.Err() != nil {
					err = ctx.Err()
				}
				return g, err
			}
		},
	},
	{
		Name: "Wait ignores its cancellation", Clause: "wait-cancelled", kind: waits,
		spoil: func(d *driver) {
			d.wait = func(ctx context.Context, c backend.Claim) (backend.Grant, error) {
				for {
					g, err := d.soundAcquire(context.WithoutCancel(ctx), c)
					if !errors.Is(err, backend.ErrHeld) || isClosed(d.way.store.ended) {
						return g, err
					}
					time.Sleep(time.Millisecond)
				}
			}
		},
	},
	{
		Name: "Wait takes the key although its context has ended", Clause: "wait-dead-context", kind: waits,
		spoil: func(d *driver) {
			d.wait = func(ctx context.Context, c backend.Claim) (backend.Grant, error) {
				if ctx.Err() != nil {
					d.soundAcquire(context.Background(), c)
					return backend.Grant{}, ctx.Err()
				}
				return d.soundWait(ctx, c)
			}
		},
	},
	{
		Name: "a Wait cancelled during its attempt keeps the key", Clause: "wait-cancel-race", kind: waits,
		spoil: func(d *driver) { d.quit = func(backend.Claim) {} },
	},
	{
		Name: "a second waiter removes the signal of the first", Clause: "wait-everyone", kind: waits,
		spoil: func(d *driver) {
			d.wait = func(ctx context.Context, c backend.Claim) (backend.Grant, error) {
				for {
					d.way.store.mu.Lock()
					delete(d.way.store.changed, d.key(c.Key))
					d.way.store.mu.Unlock()
					g, again, err := d.lookAndSleep(ctx, c, d.way.store.watch(d.key(c.Key)), true)
					if !again {
						return g, err
					}
				}
			}
		},
	},
	{
		Name: "a driver waits for only one key at a time", Clause: "wait-independent", kind: waits,
		spoil: func(d *driver) {
			turn := make(chan struct{}, 1)
			d.wait = func(ctx context.Context, c backend.Claim) (backend.Grant, error) {
				select {
				case turn <- struct{}{}:
				case <-ctx.Done():
					return backend.Grant{}, backend.ErrHeld
				}
				defer func() { <-turn }()
				return d.soundWait(ctx, c)
			}
		},
	},
	{
		Name: "the end of a Wait ends the other Waits for its key", Clause: "wait-independent", kind: waits,
		spoil: func(d *driver) {
			all := map[string][]context.CancelFunc{}
			d.wait = func(ctx context.Context, c backend.Claim) (backend.Grant, error) {
				ctx, cancel := context.WithCancel(ctx)
				defer cancel()
				d.at(ctx, func(*store, time.Time) { all[c.Key] = append(all[c.Key], cancel) })
				g, err := d.soundWait(ctx, c)
				d.at(context.Background(), func(*store, time.Time) {
					for _, cancel := range all[c.Key] {
						cancel()
					}
				})
				return g, err
			}
		},
	},
	{
		Name: "Wait grants no fence", Clause: "wait-fence", kind: waits,
		spoil: func(d *driver) { d.wait = asks(d.soundWait, func(c *backend.Claim) { c.Fenced = false }) },
	},
}

// rearrange changes the queue of a key after the first poll of each waiter.
func (d *driver) rearrange(f func(queue []place, c backend.Claim)) {
	known := map[string]bool{} // tokens that had a place; guarded by the store
	d.wait = func(ctx context.Context, c backend.Claim) (backend.Grant, error) {
		d.at(ctx, func(s *store, now time.Time) {
			s.look(d.key(c.Key), d.asked(c), true, now)
			if r := s.keys[d.key(c.Key)]; r != nil && !known[c.Token] {
				known[c.Token] = true
				f(r.queue, c)
			}
		})
		return d.soundWait(ctx, c)
	}
}

var orderFaults = []Fault{
	{
		Name: "Ordered is claimed, but the last waiter is served first", Clause: "order-of-arrival", kind: orders,
		spoil: func(d *driver) { d.rearrange(func(queue []place, _ backend.Claim) { slices.Reverse(queue) }) },
	},
	{
		Name: "Ordered is claimed, but there is no queue", Clause: "order-of-arrival", kind: waits,
		spoil: func(d *driver) { d.claims(func(t *backend.Traits) { t.Ordered = true }) },
	},
	{
		Name: "Wait ignores Claim.Stays", Clause: "place-stays", kind: orders,
		spoil: func(d *driver) {
			d.claims(func(t *backend.Traits) { t.Turns = 4 })
			d.wait = asks(d.soundWait, func(c *backend.Claim) { c.Stays = false })
		},
	},
	{
		Name: "a waiter that gives up is replaced by the last in the queue", Clause: "order-kept", kind: orders,
		spoil: func(d *driver) {
			d.quit = func(c backend.Claim) {
				d.at(context.Background(), func(s *store, now time.Time) {
					r := s.get(d.key(c.Key), now)
					at := slices.IndexFunc(r.queue, func(p place) bool { return p.token == c.Token })
					if n := len(r.queue) - 1; at >= 0 {
						r.queue[at] = r.queue[n]
						r.queue = r.queue[:n]
					}
				})
				d.soundQuit(c)
			}
		},
	},
	{
		Name: "Acquire takes a free key past the queue", Clause: "order-no-barging", kind: orders,
		spoil: func(d *driver) {
			d.acquire = func(ctx context.Context, c backend.Claim) (g backend.Grant, err error) {
				called := time.Now()
				cerr := d.at(ctx, func(s *store, now time.Time) {
					r := s.get(d.key(c.Key), now)
					if r.token != "" {
						err = r.refusal(now)
						return
					}
					g = backend.Grant{Fence: s.give(d.key(c.Key), r, c, now), Until: d.deadline(c, called)}
				})
				return g, errors.Join(err, cerr)
			}
		},
	},
	{
		Name: "the order is kept, but Ordered is not claimed", Clause: "order-not-claimed", kind: orders,
		spoil: func(d *driver) { d.claims(func(t *backend.Traits) { t.Ordered = false }) },
	},
}
