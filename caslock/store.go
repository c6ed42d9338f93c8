package caslock

import (
	"context"
	"errors"
	"time"

	"github.com/hasplock/hasp/backend"
)

// ErrConflict is the answer of a Put or a Delete that has changed nothing, because the key has
// another version. Every other error means that the outcome is unknown.
var ErrConflict = errors.New("version conflict")

// Store is a key-value store that replaces a value only if its version is the expected one. An
// adapter implements it. Many goroutines may call its methods at the same time. A name has at most
// 240 bytes: letters, digits, and "-_.=". An adapter sends each call only once, so it switches off
// the retries of its client library. If a Put is repeated nevertheless and gets ErrConflict, the
// driver finds that out by further calls. A Store that is an io.Closer is closed with its driver.
type Store interface {
	// Get returns the value of name with its version, or an empty Version if the name is absent. It
	// sees every Put that was answered before. A stale answer breaks no lock, but makes the driver
	// refuse a key that is free, or return ErrLost for a hold of another driver.
	Get(ctx context.Context, name string) (Entry, error)

	// Put replaces the value of name if it has this version, or creates it if version is empty and
	// the name is absent. It returns the new version, or ErrConflict if neither applies.
	Put(ctx context.Context, name string, value []byte, version string) (newVersion string, err error)

	// Delete removes name if it has this version. If the name is absent, it returns nil or
	// ErrConflict. Otherwise it returns ErrConflict. If the store cannot compare the version, Delete
	// removes name whatever its version, or returns errors.ErrUnsupported. New finds that out, and
	// the driver then calls Delete no more: it serves the store without a sweep, so the record of
	// each key stays, and with ErrUnsupported also a record of each New.
	Delete(ctx context.Context, name, version string) error

	// Scan returns up to n entries after a position, which is empty in the first call, and later
	// the last call's next. At the end, next is empty. A store without pages returns all entries.
	// One that cannot list them returns errors.ErrUnsupported. Then the driver cannot list keys,
	// and nobody removes what dead processes have left.
	Scan(ctx context.Context, position string, n int) (es []Entry, next string, err error)

	// Limits returns how far the exclusion goes, and when a call ends if the store does not answer.
	Limits() (backend.Reach, backend.Cancellation)
}

// Entry is a value and its version. Versions are opaque. A driver never writes the same value
// twice, so a version may be a hash of the value.
type Entry struct {
	Value   []byte
	Version string

	// Age is a lower bound of the time since the value was written, by a clock that no client sets;
	// zero or less if it is not known. With Age, a new caller gets the key of a dead holder sooner.
	Age time.Duration
}

// Watcher is a Store that reports changes, so that waiters need not poll.
type Watcher interface {
	// Watch sends a signal after each later change of name, and when it may have missed a change.
	// The channel changes has room for one signal. If the watch breaks, the channel is closed. ctx
	// bounds only the call of Watch, so the watch goes on after ctx has ended. To end the watch,
	// the caller calls the function stop once, which does not block.
	Watch(ctx context.Context, name string) (changes <-chan struct{}, stop func(), err error)
}
