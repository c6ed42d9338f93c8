// Package filelock keeps locks in files, for all processes of one host.
// Nothing has to run beside them.
//
// # What it guarantees
//
// Processes that name the same directory, of any user who may write in it and
// in any container that shares it with this host's kernel, exclude each other
// for as long as their terms last. A term is counted by the kernel's boot
// clock (Linux, macOS), which all of them share, which counts through a
// suspend and which nobody can set; elsewhere by the wall clock, and then
// setting it forward by a term ends a lease early. After a reboot a record
// lasts until its end by the wall clock. Fences survive reboots and clocks
// set back.
//
// A process that dies at any instruction leaves a state that the next one
// reads. A full disk, a directory that cannot be read, a state file that is
// damaged or not ours are errors that name the file; they never let a second
// holder in. A state file that nobody can read frees its key when it is
// removed, by Break or by hand.
//
// # What it does not
//
// It does not reach other hosts. On a network file system (NFS, SMB) or a
// directory shared by virtual machines, processes of one host still exclude
// each other where the file system knows flock(2); those of two hosts may
// not. It protects nobody from a process that may write in the directory and
// means harm: keep it to those who share the lock, not /tmp itself. It keeps
// no order: who asks at the right moment gets the key.
//
// # Cost
//
// Asking for a held key reads one file and takes no lock, some 10 µs, so that
// many may poll. Taking or giving back a key is some fifteen system calls,
// among them the creation of a file, tens of microseconds on a local file
// system. Renewals of a batch take each guard once. Nothing waits for the
// disk but the first fence of a half-minute: a record need not survive a power
// failure, because its holder does not. If a power failure leaves a torn
// record, the next boot takes the key for free.
//
// # URL
//
// filelock:///var/lock/app names a directory by its absolute path,
// filelock://./locks (or ../) one relative to the working directory at that
// moment, as it stands, without percent-encoding; anything else is refused,
// since a slash less would silently be another lock. filelock:// alone is
// $XDG_STATE_HOME/hasp, or ~/.local/state/hasp, of this user.
//
//	mode   permissions of the directory if it has to be created, in octal; 0700
//
// # Files
//
// The directory is created if it is missing. Files in it have its
// permissions, less the right to execute: who may write in it may lock, who
// may read may inspect. For several users make it mode=0770 and theirs by
// group (the setgid bit is set); a sticky directory serves one user only,
// since others cannot replace an expired record.
//
//	key-NAME.lock          the record of a held key, readable text; NAME is the
//	sha256-HEX.lock        key with %xx escapes, or, if too long, its SHA-256
//	guard-00 … guard-3f    locked while a stripe of the keys is changed; never
//	                       remove them while anybody uses the directory
//	stripe-00 … stripe-3f  pid of the guard's last holder, last fence
//	fence                  a number above every fence; with guard-fence and
//	                       stripe-fence
//	temp-*                 a file that is being written
//
// A key that was released or broken has no file; a million keys used once leave
// 131 small files. The record of a holder that died stays until the key is taken
// again, or until the directory is opened by URL at least an hour later. The same
// holds for temporary files of processes that died. Each opening checks up to
// 1,000 files. A process that died while it made the directory leaves
// .filelock-new-* beside it.
package filelock

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/hasplock/hasp/backend"
)

// Options are the settings of a [Driver]. Nil and the zero value mean the
// defaults.
type Options struct {
	// Mode is the mode of the directory if it has to be created, and so of
	// the files in it. Default 0700: this user only. The owner's bits must
	// all be set, and nothing above 0777.
	Mode fs.FileMode
}

// Driver is a [backend.Driver] on a directory. It is fenced, an Inspector, and
// reaches all processes of the host.
type Driver struct {
	dir     string
	bad     error // why there is no directory to use
	mode    fs.FileMode
	clock   func() instant
	turns   [stripes + 1]chan struct{} // one caller of this process at a time for each guard
	ceiling atomic.Pointer[ceiling]    // of fences, as last seen on the disk
	closed  atomic.Bool
}

var _ backend.Inspector = (*Driver)(nil)

// defaultTimeout bounds the wait for a guard of a call that brings no bound.
const defaultTimeout = 3 * time.Second

var errClosed = errors.New("filelock: driver is closed")

// New returns a driver on dir, which is created when it is first used. An
// empty dir means what the URL filelock:// means; a relative one belongs to
// the working directory of this moment. What is wrong with dir or opts is the
// error of every call.
func New(dir string, opts *Options) *Driver {
	d := &Driver{clock: readClock, mode: 0o700}
	d.ceiling.Store(&ceiling{})
	if dir == "" {
		dir, d.bad = userDir()
	}
	if d.bad == nil {
		d.dir, d.bad = filepath.Abs(dir)
	}
	if opts != nil && opts.Mode != 0 {
		d.mode = opts.Mode
	}
	if d.bad == nil && (d.mode&^0o777 != 0 || d.mode&0o700 != 0o700) {
		d.bad = fmt.Errorf("%w: mode %O of a directory: want 0700 to 0777", backend.ErrInvalid, d.mode)
	}
	for i := range d.turns {
		d.turns[i] = make(chan struct{}, 1)
	}
	return d
}

// Traits returns Fenced, Host.
func (d *Driver) Traits() backend.Traits {
	return backend.Traits{Fenced: true, Reach: backend.Host}
}

// Acquire takes c.Key if no record says that it is held.
func (d *Driver) Acquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	if err := d.usable(ctx); err != nil {
		return backend.Grant{}, err
	}
	if c.Key == "" || c.Token == "" || c.TTL < backend.MinTTL {
		return backend.Grant{}, fmt.Errorf("%w: want a key, a token and a term of %v or more, not %v", backend.ErrInvalid, backend.MinTTL, c.TTL)
	}
	// Most looks of those who wait end here, without the guard: the record
	// was whole, since it came to be by a rename, and held the key when it
	// was read. Any other finding is for the guard to confirm.
	if peekable {
		now := d.clock()
		if r, err := d.load(c.Key, now); err == nil && r != nil {
			return backend.Grant{}, r.refusal(now)
		}
	}
	ctx, cancel := bound(ctx, c.Timeout)
	defer cancel()
	g, err := d.acquire(ctx, c)
	return g, explain(err)
}

func (d *Driver) acquire(ctx context.Context, c backend.Claim) (backend.Grant, error) {
	if c.Fenced {
		if err := d.reserve(ctx, d.clock()); err != nil {
			return backend.Grant{}, err
		}
	}
	g, err := d.take(ctx, stripeOf(c.Key))
	if err != nil {
		return backend.Grant{}, err
	}
	defer g.drop()
	now := d.clock()
	held, err := d.load(c.Key, now)
	if err != nil {
		return backend.Grant{}, err
	}
	if held != nil {
		return backend.Grant{}, held.refusal(now)
	}
	r := record{key: c.Key, token: c.Token, owner: c.Owner, pid: os.Getpid(), since: now.wall.UTC()}
	r.extend(now, c.TTL)
	if c.Fenced {
		if r.fence, err = g.draw(ctx, now); err != nil {
			return backend.Grant{}, err
		}
	}
	// The term was counted from a moment after the call began, so the record
	// ends later than the holder's trust, however long the rest takes.
	if err := g.store(&r); err != nil {
		return backend.Grant{}, err
	}
	return backend.Grant{Fence: r.fence}, nil
}

// Release removes the record if it is c.Token's and its term has not ended.
// That needs no room on the disk.
func (d *Driver) Release(ctx context.Context, c backend.Claim) error {
	return d.guarded(ctx, c.Key, c.Timeout, func() error {
		r, err := d.load(c.Key, d.clock())
		if err != nil {
			return err
		}
		if r == nil || r.token != c.Token {
			return backend.ErrLost
		}
		err = os.Remove(d.path(c.Key))
		if errors.Is(err, fs.ErrNotExist) {
			return backend.ErrLost // somebody removed it by hand, just now
		}
		return err
	})
}

// Break removes the record of key, whoever's it is, and also one that cannot
// be read or is of another kind, such as a symbolic link or an empty directory.
func (d *Driver) Break(ctx context.Context, key string) error {
	return d.guarded(ctx, key, 0, func() error {
		err := os.Remove(d.path(key))
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	})
}

// guarded calls do under the guard of key.
func (d *Driver) guarded(ctx context.Context, key string, timeout time.Duration, do func() error) error {
	ctx, cancel := bound(ctx, timeout)
	defer cancel()
	g, err := d.take(ctx, stripeOf(key))
	if err != nil {
		return explain(err)
	}
	defer g.drop()
	return explain(do())
}

// Inspect returns what the record of key says. It asks for no right to write.
func (d *Driver) Inspect(ctx context.Context, key string) (backend.Status, error) {
	if err := d.usable(ctx); err != nil {
		return backend.Status{}, err
	}
	if peekable {
		s, err := d.status(key)
		return s, explain(err)
	}
	var s backend.Status
	err := d.guarded(ctx, key, 0, func() (err error) {
		s, err = d.status(key)
		return err
	})
	return s, err
}

func (d *Driver) status(key string) (backend.Status, error) {
	now := d.clock()
	r, err := d.load(key, now)
	if r == nil {
		return backend.Status{}, err
	}
	return backend.Status{Held: true, Owner: r.owner, Since: r.since, TTL: r.left(now), Fence: r.fence}, nil
}

// Close makes every later call an error. There is nothing to give back:
// between calls a driver has no file open.
func (d *Driver) Close() error {
	d.closed.Store(true)
	return nil
}

// usable returns why no call can succeed, if that is so.
func (d *Driver) usable(ctx context.Context) error {
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case d.closed.Load():
		return errClosed
	}
	return d.bad
}

// bound limits ctx to one call's timeout.
func bound(ctx context.Context, timeout time.Duration) (context.Context, context.CancelFunc) {
	if timeout <= 0 {
		timeout = defaultTimeout
	}
	return context.WithTimeout(ctx, timeout)
}
