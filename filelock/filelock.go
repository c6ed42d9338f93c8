package filelock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/backend"
)

// Options are the settings of [New]. Nil and the zero value mean the defaults.
type Options struct {
	// Client has the options of the Client that New returns. NewDriver ignores it.
	Client hasp.Options

	// Mode is the mode of the directory if it has to be created. The files in it have the same mode
	// without the right to execute. The default is 0700: only this user. All bits of the owner must
	// be set. Bits above 0777 must not be set.
	Mode fs.FileMode
}

// defaultTimeout bounds the wait for a guard if the call has no timeout of its own.
const defaultTimeout = 3 * time.Second

// listFiles is how many names List reads from the directory at a time.
const listFiles = 256

var errClosed = errors.New("filelock: driver is closed")

// New returns a Client whose locks are files in dir, which is created when it is first used. If dir
// is empty, New uses the directory of the URL filelock://. A relative dir is resolved against the
// present working directory. If dir or o cannot be used, the error is hasp.ErrInvalid.
func New(dir string, o *Options) (*hasp.Client, error) {
	o = cmp.Or(o, &Options{})
	d, err := NewDriver(dir, o)
	if err != nil {
		return nil, err
	}
	return hasp.New(d, &o.Client)
}

// NewDriver returns only the driver that New would use. It is for the conformance suite, or for a
// wrapper that is passed to [hasp.New].
func NewDriver(dir string, o *Options) (backend.Driver, error) {
	d, err := newDriver(dir, o)
	if err != nil {
		return nil, fmt.Errorf("filelock: %w", err)
	}
	return d, nil
}

// driver is a [backend.Driver] that keeps its locks in a directory. It grants fences, is an
// Inspector and a Lister, and excludes all processes of the host.
type driver struct {
	folder  folder
	guards  *guards
	sweeper *sweeper
	clock   clock
	closed  atomic.Bool
}

var (
	_ backend.Inspector = (*driver)(nil)
	_ backend.Lister    = (*driver)(nil)
)

// newDriver returns a driver for New, NewDriver and open. It does not use dir yet. A nil o means
// the defaults.
func newDriver(dir string, o *Options) (*driver, error) {
	if dir == "" {
		var err error
		if dir, err = userDir(); err != nil {
			return nil, err
		}
	}
	if strings.Contains(dir, "://") {
		return nil, fmt.Errorf("%w: filelock has no transport: "+
			"pass the path of a directory, or use hasp.Open with filelock:///DIRECTORY",
			backend.ErrInvalid)
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}

	mode := fs.FileMode(0o700)
	if o != nil && o.Mode != 0 {
		mode = o.Mode
	}
	hasOtherBits := mode&^0o777 != 0
	if hasOtherBits || mode&0o700 != 0o700 {
		return nil, fmt.Errorf("%w: mode=%04o: want 0700 to 0777, the permissions of the directory",
			backend.ErrInvalid, mode)
	}

	f := folder{path: dir, mode: mode}
	gs := newGuards(f)
	return &driver{
		folder:  f,
		guards:  gs,
		sweeper: &sweeper{folder: f, guards: gs, clock: readClock},
		clock:   readClock,
	}, nil
}

// Traits reports fences and min holds, among the processes of a host.
func (d *driver) Traits() backend.Traits {
	return backend.Traits{Fenced: true, MinHold: true, Reach: backend.Host}
}

// Close makes every later call return an error. Between calls, a driver keeps no file open, except
// the directory while a sweep of it is not complete.
func (d *driver) Close() error {
	d.closed.Store(true)
	d.sweeper.close()
	return nil
}

// check returns the error of a call that cannot begin, or cannot go on.
func (d *driver) check(ctx context.Context) error {
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case d.closed.Load():
		return errClosed
	}
	return nil
}

// probe creates the directory if it does not exist, and locks and unlocks the first guard if that
// is free. Therefore a wrong configuration is an error of Open, and not of the first Lock. The
// directory has that guard since its creation, so Open needs no space on the disk.
func (d *driver) probe(ctx context.Context) error {
	if err := d.check(ctx); err != nil {
		return err
	}
	g, err := d.guards.try(0)
	if g != nil {
		g.unlock()
	}
	return explain(err)
}

// guarded locks the guard of key, calls f, and unlocks the guard. It returns f's error, or the
// reason why it did not call f. The timeout bounds only the wait for the guard.
func (d *driver) guarded(
	ctx context.Context, key string, timeout time.Duration, f func(g *guard) error,
) error {
	if err := d.check(ctx); err != nil {
		return err
	}
	ctx, cancel := withTimeout(ctx, timeout)
	defer cancel()
	g, err := d.guards.lock(ctx, stripeOf(key))
	if err != nil {
		return explain(err)
	}
	defer g.unlock()
	return explain(f(g))
}

// withTimeout bounds ctx by the timeout of a call, or by defaultTimeout if the call has none.
func withTimeout(ctx context.Context, timeout time.Duration) (context.Context, context.CancelFunc) {
	if timeout <= 0 {
		timeout = defaultTimeout
	}
	return context.WithTimeout(ctx, timeout)
}

// Acquire takes c.Key if no record says that the key is held. Otherwise the error is that record's
// refusal, a backend.HeldError.
func (d *driver) Acquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	if err := d.check(ctx); err != nil {
		return backend.Grant{}, err
	}

	// First only read the record, because most attempts of waiters then write nothing and, on most
	// platforms, need no guard.
	holder, now, err := d.peek(ctx, c.Key, c.Timeout)
	if err != nil {
		return backend.Grant{}, err
	}
	if holder != nil {
		return backend.Grant{}, holder.refusal(now)
	}

	// Sweep before the grant, because a later sweep would use up some of the term.
	d.sweeper.beforeKey(ctx)
	r := &record{key: c.Key, token: c.Token, owner: c.Owner, pid: os.Getpid(), waited: c.Waited}
	draft, err := d.folder.draft(r, c.Fenced)
	if err != nil {
		return backend.Grant{}, explain(err)
	}

	err = d.guarded(ctx, c.Key, c.Timeout, func(g *guard) error { return d.take(g, c, r, draft) })
	if err != nil {
		// If publish has already closed or renamed the draft, these calls have no effect.
		draft.Close()
		os.Remove(draft.Name())
		return backend.Grant{}, err
	}
	return backend.Grant{Fence: r.fence}, nil
}

// take takes c.Key. It completes the record r, and makes the draft the file of r. If it returns an
// error, the draft remains.
func (d *driver) take(g *guard, c backend.Claim, r *record, draft *os.File) error {
	// Read the clock only now, because a record may have expired while this call waited for the
	// guard.
	now := d.clock()
	holder, err := d.folder.load(c.Key, now)
	if err != nil {
		return err
	}
	if holder != nil {
		return holder.refusal(now)
	}

	r.since = now.wall.UTC()
	r.endIn(now, c.TTL)
	if c.Fenced {
		if r.fence, err = g.drawFence(now); err != nil {
			return err
		}
	}

	// However long publish takes, the record ends after the time until which the holder relies on
	// it: the holder counts the term from the start of Acquire, and r counts it from now.
	return g.publish(r, draft)
}

// Renew prolongs the terms of cs. Each claim has a goroutine, so that if another process has a
// guard, only the claims of that guard's stripe wait.
func (d *driver) Renew(
	ctx context.Context, cs []backend.Claim, done func(int, backend.Grant, error),
) {
	var mu sync.Mutex // held during each call of the function done, so that no two run at a time
	var wg sync.WaitGroup
	for i, c := range cs {
		wg.Go(func() {
			err := d.guarded(ctx, c.Key, c.Timeout, func(g *guard) error { return d.prolong(g, c) })
			mu.Lock()
			defer mu.Unlock()
			done(i, backend.Grant{}, err)
		})
	}
	wg.Wait() // the function done must not be called after Renew has returned
}

// prolong makes the record of c last for at least c.TTL from now.
func (d *driver) prolong(g *guard, c backend.Claim) error {
	now := d.clock()
	r, err := g.mine(c, now)
	if err != nil {
		return err
	}
	if r.rest(now) >= c.TTL {
		return nil // the record lasts long enough, and a renewal never shortens a term
	}
	return g.amend(r, now, c.TTL)
}

// Release removes the record if it has c.Token and its term has not ended. If c.KeepUntil is set,
// Release changes the record instead, so that it belongs to no claim and ends at that time.
func (d *driver) Release(ctx context.Context, c backend.Claim) error {
	return d.guarded(ctx, c.Key, c.Timeout, func(g *guard) error {
		// Compute the period before the clock is read. If the process pauses in between, the key
		// stays taken for longer, and not for a shorter time than the caller wants.
		minHold := time.Until(c.KeepUntil)

		now := d.clock()
		r, err := g.mine(c, now)
		if err != nil {
			return err
		}
		if minHold > 0 {
			r.isMinHold = true
			return g.amend(r, now, minHold)
		}

		err = os.Remove(d.folder.recordFile(c.Key))
		if errors.Is(err, fs.ErrNotExist) {
			return backend.ErrLost // the record was removed by hand a moment ago, without the guard
		}
		return err
	})
}

// Break removes the record of the key, whichever token the record has. It also removes a file that
// cannot be read, or is no regular file.
func (d *driver) Break(ctx context.Context, key string) error {
	return d.guarded(ctx, key, 0, func(*guard) error {
		err := os.Remove(d.folder.recordFile(key))
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	})
}

// Inspect reports the record of the given key. If the platform can read a record without a guard,
// Inspect needs no permission to write.
func (d *driver) Inspect(ctx context.Context, key string) (backend.Status, error) {
	if err := d.check(ctx); err != nil {
		return backend.Status{}, err
	}

	r, now, err := d.peek(ctx, key, 0)
	if r == nil {
		return backend.Status{}, err // if err is nil, the key is free
	}
	return r.status(now), nil
}

// peek returns the record that holds the key, or nil, and the instant of the read. It locks the
// guard only if the platform cannot read a record without a guard.
func (d *driver) peek(
	ctx context.Context, key string, timeout time.Duration,
) (r *record, now instant, err error) {
	read := func(*guard) error {
		now = d.clock()
		r, err = d.folder.load(key, now)
		return err
	}

	if readsNeedNoGuard {
		err = explain(read(nil))
	} else {
		err = d.guarded(ctx, key, timeout, read)
	}
	return r, now, err
}

// List yields the keys whose records are in the directory, in no particular order. It leaves out
// damaged and foreign files, although they may block keys. If the directory does not exist, List
// yields no key.
func (d *driver) List(
	ctx context.Context, prefix string, timeout time.Duration,
) iter.Seq2[backend.Entry, error] {
	return func(yield func(backend.Entry, error) bool) {
		next := func(e backend.Entry) bool { return yield(e, nil) }
		if err := d.listDir(ctx, prefix, timeout, next); err != nil {
			yield(backend.Entry{}, explain(err))
		}
	}
}

// listDir calls f with the entry of each held key that begins with prefix, until f returns false.
// The timeout bounds the wait for each guard.
func (d *driver) listDir(
	ctx context.Context, prefix string, timeout time.Duration, f func(backend.Entry) bool,
) error {
	if err := d.check(ctx); err != nil {
		return err
	}
	dir, err := os.Open(d.folder.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // no key was taken yet
	}
	if err != nil {
		return err
	}
	defer dir.Close()

	for {
		names, err := dir.Readdirnames(listFiles)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}

		for _, name := range names {
			if !mayBegin(name, prefix) {
				continue
			}
			r, err := d.recordByName(ctx, name, timeout)
			if err != nil {
				return err
			}

			now := d.clock()
			if r == nil || !strings.HasPrefix(r.key, prefix) || r.rest(now) <= 0 {
				continue
			}
			if !f(backend.Entry{Key: r.key, Status: r.status(now)}) {
				return nil
			}
		}
	}
}

// recordByName returns the record in the given file, or nil if that file has no valid record. It
// locks the guard of the record's key only if the platform cannot read a record without a guard.
func (d *driver) recordByName(
	ctx context.Context, name string, timeout time.Duration,
) (*record, error) {
	if err := d.check(ctx); err != nil {
		return nil, err
	}
	if readsNeedNoGuard {
		return d.folder.recordIn(name)
	}

	stripe, ok := stripeOfName(name)
	if !ok {
		return nil, nil // hasp gives no file such a name
	}
	within, cancel := withTimeout(ctx, timeout)
	defer cancel()
	g, err := d.guards.lock(within, stripe)
	if err != nil {
		return nil, err
	}
	defer g.unlock()
	return d.folder.recordIn(name)
}
