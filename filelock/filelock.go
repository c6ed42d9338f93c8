// Package filelock keeps locks in files, for all processes of one host. It needs no server.
//
// # Guarantees
//
// Processes that name the same directory exclude each other while their terms last. They may belong
// to any user who may write in the directory, and run in any container that shares the directory
// and this host's kernel. On Linux and macOS a term is counted by the kernel's boot clock, which
// all these processes share. The boot clock counts through a suspend and cannot be set. On other
// systems, and between containers that have boot identifiers of their own, as LXC containers have,
// terms are counted by the wall clock. If that clock is set forward by a term, a lease ends early.
// After a reboot, the terms of earlier records end by the wall clock. Fences grow across reboots,
// even if the clock is set back. After a power failure, which may undo the last half minute of
// changes, fences grow if the clock is right.
//
// If the host sleeps for longer than the rest of a term, the lease ends, although no process of the
// host can have asked for the key. The Client ends its leases by a clock that counts through a
// suspend, because with most stores another host may have taken the key meanwhile.
//
// A process that dies at any instruction leaves a state that the next process can read. If it dies
// while it renews a record, the record keeps the earlier term.
//
// A full disk ends no lease, because only taking a key needs space. Renewals overwrite the record,
// and Unlock, Break, Inspect, List and Open work as well. This does not hold on file systems that
// write each change to a new place, such as btrfs and ZFS.
//
// The error names the file if the disk is full, if the directory cannot be read, or if a state file
// is damaged or foreign. None of these errors admits a second holder. A state file that cannot be read
// blocks its key until the file is removed, by Break or by hand. A foreign file with the name of a
// stripe stays unchanged, and the keys of the stripe get no fence until that file is removed by
// hand.
//
// # Limits
//
// Only processes of one host exclude each other, even if several hosts or virtual machines share
// the directory, as with NFS or SMB. The file system must support flock(2). A hostile process that
// may write in the directory can break locks. So use a directory that belongs to the users who
// share the locks, and not /tmp itself. Waiters have no order: the first caller that asks for the
// free key receives it.
//
// A process that is stopped while it takes, renews or releases a key may block a 64th of all keys
// until it continues or ends. SIGSTOP, a debugger and "docker pause" stop processes. The critical
// part of such a call lasts for tens of microseconds, and does not include the creation of the
// record's file. The error of other processes names the guard's file. A process that is stopped at
// any other time blocks only the keys that it holds, until their terms end.
//
// # Cost
//
// On Unix, an attempt at a held key reads one file and locks no file, which takes about 10 µs.
// Polling by many callers is therefore cheap. To take a key takes about twenty system calls, one of
// which creates a file. A renewal or a release takes about fifteen, and creates no file. On a local
// file system these calls take tens of microseconds. A list reads 256 names at a time, and the
// record of each name. On Unix, a list locks no guard. A claim with a fence writes a second file.
// No call waits for the disk. A power failure may lose records, but it also ends their holders. If a power
// failure leaves an incomplete record, the record's key is free after the next boot.
//
// # URL
//
// filelock:///var/lib/app/locks names a directory by its absolute path, and filelock://./locks or
// filelock://../locks by a path relative to the working directory. Nothing is percent-decoded.
// filelock:// alone names $XDG_STATE_HOME/hasp or ~/.local/state/hasp of this user.
//
//	mode   permissions of the directory if it has to be created, in octal (default 0700)
//
// # Files
//
// The directory is created if it is missing. The files in it have the directory's permissions
// without the right to execute. A user who may write may lock. A user who may only read may inspect
// with a Client from [New]. Such a user cannot open the directory by URL, because Open locks a
// guard. For several users, create the directory with mode=0770 and the group
// that they share; hasp sets the setgid bit. Missing parents get mode 0700. A sticky directory
// serves only one user, because other users cannot replace an expired record. If the directory is
// removed, its keys are free, as after Break.
//
//	key-NAME.lock          the record of a held key, twice, as text; NAME is the key
//	sha256-HEX.lock        with %xx escapes; a long key has its SHA-256 instead
//	guard-00 … guard-3f    locked while the records of one stripe of the keys are
//	                       changed; never remove a guard that may be in use
//	stripe-00 … stripe-3f  the last fence of the keys of the stripe
//	temp-*                 a file that does not have its name yet
//
// A key that was released or broken has no file, so a million keys that are not in use leave 128
// small files. The record of a holder that died or had a minimum hold expires. An expired record
// stays until the key is taken again or a sweep removes the record. A driver sweeps 256 files when
// it takes its first key, and each 128th key after that. Therefore expired records outnumber other
// records by a few hundred at most. Open by URL sweeps 1,000 files. A process that dies while it
// takes a key may leave a file temp-*, which a sweep removes after an hour. A process that dies
// while it creates the directory may leave .filelock-new-* beside it. hasp does not remove that.
package filelock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
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

// driver is a [backend.Driver] that keeps its locks in a directory. It grants fences, is an
// Inspector and a Lister, and excludes all processes of the host.
type driver struct {
	dir   string
	mode  fs.FileMode // the mode of the directory, if it has to be created
	clock func() instant

	// turns contains a channel for each guard. The channel has room for one goroutine, so only one
	// goroutine of this process polls the guard's file.
	turns [stripes]chan struct{}

	closed atomic.Bool

	taken    atomic.Uint64 // how many times this driver has tried to take a key
	sweeping sync.Mutex    // held during a sweep; guards unswept
	unswept  *os.File      // the open directory that the next sweep continues to read, or nil
}

var (
	_ backend.Inspector = (*driver)(nil)
	_ backend.Lister    = (*driver)(nil)
)

// defaultTimeout bounds the wait for a guard if the call has no timeout of its own.
const defaultTimeout = 3 * time.Second

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

func newDriver(dir string, o *Options) (*driver, error) {
	d := &driver{clock: readClock, mode: 0o700}
	for i := range d.turns {
		d.turns[i] = make(chan struct{}, 1)
	}

	var err error
	if dir == "" {
		if dir, err = userDir(); err != nil {
			return nil, err
		}
	}
	if d.dir, err = filepath.Abs(dir); err != nil {
		return nil, err
	}

	if o != nil && o.Mode != 0 {
		d.mode = o.Mode
	}
	if d.mode&^0o777 != 0 || d.mode&0o700 != 0o700 {
		return nil, fmt.Errorf("%w: mode=%04o: want 0700 to 0777, the permissions of the directory", backend.ErrInvalid, d.mode)
	}
	return d, nil
}

func (d *driver) Traits() backend.Traits {
	return backend.Traits{Fenced: true, MinHold: true, Reach: backend.Host}
}

// Acquire takes c.Key if no record says that the key is held.
func (d *driver) Acquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	if err := d.check(ctx); err != nil {
		return backend.Grant{}, err
	}

	// First only read the record, because most attempts of waiters then write nothing and, on most
	// platforms, need no guard.
	held, now, err := d.peek(ctx, c.Key, c.Timeout)
	if err != nil {
		return backend.Grant{}, err
	}
	if held != nil {
		return backend.Grant{}, held.refusal(now)
	}

	d.sweepOften(ctx) // sweep before the grant, because a later sweep would use up some of the term
	r := &record{key: c.Key, token: c.Token, owner: c.Owner, pid: os.Getpid(), waited: c.Waited}
	draft, err := d.draft(r, c.Fenced)
	if err != nil {
		return backend.Grant{}, d.explain(err)
	}
	err = d.guarded(ctx, c.Key, c.Timeout, func(g *guard) error { return g.acquire(c, r, draft) })
	if err != nil {
		draft.Close()
		os.Remove(draft.Name())
		return backend.Grant{}, err
	}
	return backend.Grant{Fence: r.fence}, nil
}

// acquire takes c.Key with the record r and its draft.
func (g *guard) acquire(c backend.Claim, r *record, draft *os.File) error {
	// Read the clock only now, because a record may have expired while this call waited for the
	// guard.
	now := g.d.clock()
	held, err := g.d.load(c.Key, now)
	if err != nil {
		return err
	}
	if held != nil {
		return held.refusal(now)
	}

	r.since = now.wall.UTC()
	r.endIn(now, c.TTL)
	if c.Fenced {
		if r.fence, err = g.drawFence(now); err != nil {
			return err
		}
	}
	// The record lasts longer than the holder relies on it, however long the method publish takes,
	// because the holder counts the term from the start of this call, before the clock was read.
	return g.publish(r, draft)
}

// Release removes the record if it has c.Token and its term has not ended. If c.KeepUntil is set,
// Release changes the record instead, so that it belongs to no claim and ends at that time.
func (d *driver) Release(ctx context.Context, c backend.Claim) error {
	return d.guarded(ctx, c.Key, c.Timeout, func(g *guard) error {
		left := time.Until(c.KeepUntil) // before now is read: if the process pauses in between, the key stays taken for longer
		now := d.clock()
		r, err := g.mine(c, now)
		if err != nil {
			return err
		}

		if left > 0 {
			r.kept = true
			return g.amend(r, now, left)
		}

		err = os.Remove(d.path(c.Key))
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
		err := os.Remove(d.path(key))
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	})
}

func (d *driver) guarded(ctx context.Context, key string, timeout time.Duration, f func(g *guard) error) error {
	ctx, cancel := withTimeout(ctx, timeout)
	defer cancel()
	g, err := d.lockGuard(ctx, stripeOf(key))
	if err != nil {
		return d.explain(err)
	}
	defer g.drop()
	return d.explain(f(g))
}

// Inspect reports the record of the given key. If the platform can read a record without a guard,
// Inspect needs no permission to write.
func (d *driver) Inspect(ctx context.Context, key string) (backend.Status, error) {
	if err := d.check(ctx); err != nil {
		return backend.Status{}, err
	}
	r, now, err := d.peek(ctx, key, 0)
	if r == nil {
		return backend.Status{}, err
	}
	return r.status(now), nil
}

// peek returns what the method load returns, and the instant of that call. It locks the guard only
// if the platform cannot read a record without a guard.
func (d *driver) peek(ctx context.Context, key string, timeout time.Duration) (r *record, now instant, err error) {
	read := func(*guard) (err error) {
		now = d.clock()
		r, err = d.load(key, now)
		return err
	}
	if readsNeedNoGuard {
		err = d.explain(read(nil))
	} else {
		err = d.guarded(ctx, key, timeout, read)
	}
	return r, now, err
}

func (r *record) status(now instant) backend.Status {
	return backend.Status{Held: true, Owner: r.owner, Since: r.since, Kept: r.kept, TTL: r.left(now), Fence: r.fence}
}

// Close makes every later call return an error. Between calls, a driver keeps no file open, except
// the directory while a sweep of it is not complete.
func (d *driver) Close() error {
	d.closed.Store(true)
	d.closeDir()
	return nil
}

// closeDir closes the directory that the next sweep continues to read. A sweep that runs may hang
// in the file system, so closeDir does not wait for it. The sweep calls closeDir at its end.
func (d *driver) closeDir() {
	if d.sweeping.TryLock() {
		d.unswept.Close() // returns an error if the directory is nil
		d.unswept = nil
		d.sweeping.Unlock()
	}
}

func (d *driver) check(ctx context.Context) error {
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case d.closed.Load():
		return errClosed
	}
	return nil
}

// withTimeout bounds ctx by one call's timeout.
func withTimeout(ctx context.Context, timeout time.Duration) (context.Context, context.CancelFunc) {
	if timeout <= 0 {
		timeout = defaultTimeout
	}
	return context.WithTimeout(ctx, timeout)
}
