// Package hasptest helps to test a service that uses hasp. Its locks are in memory, and the test
// says when the store fails, when a lease is lost, and when another program holds a key. In a
// bubble of testing/synctest the time is virtual, so a test of four nights takes milliseconds.
//
// The engine is the same as with every strategy, so a service meets the same errors, events and
// times as with a store in a network. The order of arrival, min holds, shared leases and slots work
// as with memlock. To [hasp.LockAll], a Locker is a wrapper, which takes one key after another;
// pass its Client to have all keys in one round trip.
package hasptest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"sync"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/memlock"
)

// Locker is the Client of one process of a service, with switches for the test. Several goroutines
// may use the switches, also while calls of the Client are in flight.
type Locker struct {
	*hasp.Client
	store *memlock.Store
	link  *link
	other *hasp.Client // another program, which has no faults
}

// New returns a Locker whose store is empty. If o is nil, the defaults apply. If an option is
// invalid, New panics.
func New(o *hasp.Options) *Locker { return newLocker(new(memlock.Store), o) }

// Another returns the Locker of another process on the same store, with options of its own, even
// the Prefix. It has switches of its own, so a test can cut off one of the two processes.
func (l *Locker) Another(o *hasp.Options) *Locker { return newLocker(l.store, o) }

// newLocker returns a Locker on s. It panics if an option is invalid.
func newLocker(s *memlock.Store, o *hasp.Options) *Locker {
	o = cmp.Or(o, &hasp.Options{})
	l := &Locker{store: s, link: newLink(cmp.Or(o.Timeout, hasp.DefaultTimeout))}

	// The other program needs the same Prefix, so that Hold and Lose mean the same keys.
	other := &hasp.Options{Owner: "hasptest", Prefix: o.Prefix}
	var err1, err2 error
	l.Client, err1 = hasp.New(newDriver(s, l.link), o)
	l.other, err2 = hasp.New(s.Driver(), other)
	if err := errors.Join(err1, err2); err != nil {
		panic(err)
	}
	return l
}

// Close closes the Client. In a bubble of synctest, close each Locker before the test ends.
func (l *Locker) Close() error {
	err := l.Client.Close()
	_ = l.other.Close() // its error names the keys that the test still holds
	return err
}

// Lose frees key in the store, although the service holds it. The holder learns of the loss at its
// next renewal, after a third of its term at the latest, and its lease ends with hasp.LostRevoked.
// Until then two callers can hold the key. If key is not held, Lose panics. With slots, the key of
// slot 0 is key#0.
func (l *Locker) Lose(key string) {
	if s, err := l.other.Inspect(context.Background(), key); err != nil || !s.Held {
		panic(fmt.Sprintf("hasptest: Lose: %q is not held", key))
	}
	if err := l.other.Break(context.Background(), key); err != nil {
		panic(err)
	}
}

// Hold lets another program hold key until the function release is called. If key is held already,
// Hold panics: call Lose first. Lose hands the key to a caller that waits for it, if there is one.
func (l *Locker) Hold(key string) (release func()) {
	lease, err := l.other.TryLock(context.Background(), key)
	if err != nil {
		panic(fmt.Errorf("hasptest: Hold: %w", err))
	}
	return func() { _ = lease.Unlock(context.Background()) } // its error is ErrLost after Lose
}

// Down makes the store unreachable for this process: all calls of the process fail, also those that
// wait for a key. If the store is down for the term of a lease, the lease is lost with
// hasp.LostUnanswered. The store keeps the hold until its term has ended.
func (l *Locker) Down() { l.link.set(true, 0) }

// Up ends Down and Delay.
func (l *Locker) Up() { l.link.set(false, 0) }

// Delay delays the answer to each later call by d. The store carries out the call at once. So with
// a d above [hasp.Options].Timeout, no call is answered, and a Lock that fails may have taken the
// key, until the Client cleans up. Delay ends Down.
func (l *Locker) Delay(d time.Duration) { l.link.set(false, d) }

// link is the connection of a process to the store.
type link struct {
	timeout time.Duration // bounds a call, so with a longer delay no call is answered

	mu      sync.Mutex         // guards the fields below
	down    bool               // no call is answered
	delay   time.Duration      // how long each answer takes
	waiters sync.WaitGroup     // calls in the queue of the store
	uncut   context.Context    // ends when the waiters are cut off
	cut     context.CancelFunc // ends uncut
}

func newLink(timeout time.Duration) *link {
	l := &link{timeout: timeout}
	l.uncut, l.cut = context.WithCancel(context.Background())
	return l
}

// set changes the state of the link. It cuts the waiters off if they can get no answer in the new
// state. They have left the queue when set returns. Otherwise they could get the key without
// learning of it, and keep it from others.
func (l *link) set(down bool, delay time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.down = down
	l.delay = delay

	noAnswer := down || delay >= l.timeout
	if noAnswer {
		l.cut()
		l.waiters.Wait() // cannot deadlock, because a waiter does not lock mu before it has left
	} else if l.uncut.Err() != nil {
		// The link was cut, and later waiters must not be.
		l.uncut, l.cut = context.WithCancel(context.Background())
	}
}

// state returns the state that set has stored.
func (l *link) state() (down bool, delay time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.down, l.delay
}

var errDown = errors.New("hasptest: the store is down")

// answer sends a call to the store, and returns the store's answer after the delay. If the link is
// down before or after the call, or ctx ends, there is no answer.
func answer[T any](ctx context.Context, d *driver, call func() (T, error)) (v T, err error) {
	down, delay := d.link.state()
	if !down {
		v, err = call()
	}

	if delay > 0 {
		select {
		case <-time.After(delay):
		case <-ctx.Done():
			return *new(T), ctx.Err()
		}
		down, _ = d.link.state() // the test may have called Down during the delay
	}

	if down {
		return *new(T), errDown
	}
	return v, err
}

// store has the methods of memlock's drivers.
type store interface {
	backend.Waiter
	backend.Inspector
	backend.Lister
}

// driver is a driver of memlock behind a link.
type driver struct {
	store
	link *link
}

func newDriver(s *memlock.Store, l *link) *driver { return &driver{s.Driver().(store), l} }

// Traits are those of a store in a network.
func (d *driver) Traits() backend.Traits {
	t := d.store.Traits()
	t.Reach = backend.Network
	t.Cancellation = backend.CancelPrompt
	return t
}

func (d *driver) Acquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	return answer(ctx, d, func() (backend.Grant, error) { return d.store.Acquire(ctx, c) })
}

// Wait queues in the store until it grants the key, until the link is cut, or until ctx ends.
func (d *driver) Wait(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	d.link.mu.Lock()
	uncut := d.link.uncut
	if uncut.Err() != nil {
		// The link is cut. Do not queue, but fail: at once if the store is down, and otherwise
		// after the claim's Timeout, because the answer is delayed for longer.
		d.link.mu.Unlock()
		call, cancel := context.WithTimeout(ctx, c.Timeout)
		defer cancel()
		return answer(call, d, func() (g backend.Grant, err error) { return g, errDown })
	}
	d.link.waiters.Add(1) // under mu, so that set waits for each waiter that it cuts off
	d.link.mu.Unlock()

	queued, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(uncut, cancel)()
	g, err := d.store.Wait(queued, c)
	d.link.waiters.Done() // c is not in the queue any more

	if uncut.Err() != nil { // even if the store has granted the key, the answer does not arrive
		return backend.Grant{}, errDown
	}
	if err != nil {
		return g, err
	}
	return answer(ctx, d, func() (backend.Grant, error) { return g, nil }) // after the delay
}

// Renew makes one call for each claim. The error of a claim is errDown if its call is not answered.
func (d *driver) Renew(
	ctx context.Context, cs []backend.Claim, done func(int, backend.Grant, error),
) {
	backend.RenewEach(ctx, cs, done, d.renew)
}

// renew renews the hold of c.
func (d *driver) renew(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	return answer(ctx, d, func() (grant backend.Grant, err error) {
		err = errDown // if ctx has ended, the store does not call the function below
		d.store.Renew(ctx, []backend.Claim{c}, func(_ int, g backend.Grant, e error) {
			grant = g
			err = e
		})
		return grant, err
	})
}

func (d *driver) Release(ctx context.Context, c backend.Claim) error {
	_, err := answer(ctx, d, func() (int, error) { return 0, d.store.Release(ctx, c) })
	return err
}

func (d *driver) Inspect(ctx context.Context, key string) (backend.Status, error) {
	return answer(ctx, d, func() (backend.Status, error) { return d.store.Inspect(ctx, key) })
}

func (d *driver) Break(ctx context.Context, key string) error {
	_, err := answer(ctx, d, func() (int, error) { return 0, d.store.Break(ctx, key) })
	return err
}

// List first makes a call that does nothing, so that List fails if the link does not answer. The
// entries that follow are not delayed.
func (d *driver) List(
	ctx context.Context, prefix string, timeout time.Duration,
) iter.Seq2[backend.Entry, error] {
	return func(yield func(backend.Entry, error) bool) {
		call, cancel := context.WithTimeout(ctx, timeout)
		defer cancel()
		if _, err := answer(call, d, func() (int, error) { return 0, nil }); err != nil {
			yield(backend.Entry{}, err)
			return
		}
		d.store.List(ctx, prefix, timeout)(yield)
	}
}
