// Package backend is what a store must do to keep locks for package hasp.
//
// Users of locks do not import it; authors of drivers do. A [Driver] makes
// one attempt at a time: it takes a key for a token, prolongs the term, gives
// the key back. It never sleeps, never retries and never logs. Everything a
// caller of hasp sees beyond that (waiting in line, backing off, renewing,
// deadlines, re-entry, clean-up after a lost reply) is the engine's work in
// package hasp, once, for all drivers.
//
// A driver alone is a spin lock. One that can wait better than by asking
// again is also a [Waiter]; one that can tell who holds a key is an
// [Inspector]. That is the whole difference between strategies.
//
// # Errors
//
// [ErrHeld], [ErrLost], [ErrInvalid] and [errors.ErrUnsupported] are definite:
// the store was asked and nothing was done. Every other error means that the
// outcome is unknown: the command may have been carried out. A driver returns
// such an error as it is, without a wrapper of its own; the engine wraps once.
//
// # Who owns what
//
// A driver belongs to one Client, whose Close closes it. A driver closes only
// what it opened itself.
//
// The suite in package conformance checks a driver against every clause of
// this page; a driver's own test is one call to it.
package backend

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// MinTTL is the shortest term that may be asked for. It leaves room for a
// renewal and its repeat over an ordinary network.
const MinTTL = 100 * time.Millisecond

var (
	// ErrHeld says that somebody else holds the key, or stands before the
	// caller in an ordered driver's queue. A driver returns it as a
	// [*HeldError] where it knows more.
	ErrHeld = errors.New("held by another")

	// ErrLost says that the token does not hold the key: the term ran out,
	// the key was broken, or the store lost its data.
	ErrLost = errors.New("lease lost")

	// ErrInvalid says that what was asked for can never succeed: a bad key,
	// a term out of range, a parameter that does not exist.
	ErrInvalid = errors.New("invalid")
)

// HeldError is ErrHeld with what the store told about the holder. Users of
// other libraries know RetryAfter as the TTL their TryLock returns.
type HeldError struct {
	// RetryAfter is how long the present term still runs, by the store's
	// clock; zero if the driver does not know. The key may be free sooner,
	// and is held longer when the holder renews.
	RetryAfter time.Duration

	// Owner is the holder's label for people; empty if the driver does not
	// know it.
	Owner string
}

// Error names the holder, quoted, since an owner may be any string.
func (e *HeldError) Error() string {
	if e.Owner == "" {
		return ErrHeld.Error()
	}
	return fmt.Sprintf("held by %q", e.Owner)
}

// Is reports that a HeldError is [ErrHeld].
func (e *HeldError) Is(target error) bool { return target == ErrHeld }

// Driver keeps claims in one store with one strategy.
//
// Its methods may be called from many goroutines at once. Every call is sent
// to the store at most once: a driver switches off the retries of the client
// below it, because a repeat whose first try was carried out would hear "held"
// from its own token.
type Driver interface {
	// Traits returns what the driver can do. The answer never changes.
	Traits() Traits

	// Acquire makes one attempt to take c.Key for c.Token. It grants the key
	// or says ErrHeld. It never takes a key that is held, not even by a token
	// of the same client.
	//
	// Acquire returns when its command has ended or its connection is dead,
	// or as Traits.Ends says. The engine calls it with a context that ends
	// after c.Timeout and, unless the driver EndsPromptly, not when the caller
	// goes away, and releases whatever lands later. A driver that returns
	// before all its commands have ended, as a quorum does, cleans up after
	// itself.
	Acquire(ctx context.Context, c Claim) (Grant, error)

	// Renew prolongs the holds of cs so that each has at least its TTL left,
	// and tells done the outcome of each: a grant, ErrLost if c.Token does
	// not hold c.Key, or an error of unknown outcome. It never shortens a
	// term and never takes a key again that its token had lost.
	//
	// Renew blocks until every claim is answered or ctx has ended. It calls
	// done at most once per index, from any goroutine, and never after it has
	// returned. What is left unanswered is of unknown outcome. The claims may
	// be of any keys; no two in one call are of the same hold.
	//
	// [RenewEach] makes a Renew out of a function for one claim.
	Renew(ctx context.Context, cs []Claim, done func(i int, g Grant, err error))

	// Release gives c.Key back if c.Token holds it, and else answers ErrLost
	// and changes nothing.
	Release(ctx context.Context, c Claim) error

	// Close ends what the driver has opened. The engine calls it once, last.
	Close() error
}

// Waiter is a [Driver] that knows better than to ask again and again.
//
// A wrapper of a driver that is a Waiter must be one too.
type Waiter interface {
	Driver

	// Wait returns when c.Token holds c.Key, or when ctx has ended; whatever
	// error it returns, nothing of c is left in the store, neither a hold nor
	// a place in a queue, once the calls under way have ended; but for what
	// Claim.Stays says.
	//
	// Wait arms its signal before the attempt that follows, so that no
	// release falls between the two. It bounds each call to the store by
	// c.Timeout and rides out an outage that long; an entry in a queue keeps
	// its place meanwhile. It repeats a call with c.Token only while no
	// release of that token was sent; otherwise an unknown outcome ends it,
	// and the engine calls again with a new token.
	//
	// When ctx ends the wait the error is ErrHeld if the store's last answer
	// was that, and else the outage. An error of unknown outcome may have a
	// method Since() time.Time that tells since when the store has not
	// answered; the engine, which bounds the whole outage by Options.Timeout,
	// else takes it to have begun a moment ago.
	Wait(ctx context.Context, c Claim) (Grant, error)
}

// Inspector is a [Driver] that can tell about a key and force it free.
type Inspector interface {
	Driver

	// Inspect returns what the store knows of key. A key nobody holds is a
	// zero Status with whoever still waits for it, not an error.
	Inspect(ctx context.Context, key string) (Status, error)

	// Break removes the hold of key, whoever has it. Breaking a key that
	// nobody holds is not an error. An ordered driver passes the key on to
	// the next waiter.
	Break(ctx context.Context, key string) error
}

// Traits is what a driver can do: the engine, the conformance suite and the
// documentation go by it. Claiming less or more than is true fails the suite.
type Traits struct {
	// Ordered drivers are Waiters that serve waiters of all processes in
	// order of arrival, and refuse an Acquire while anybody waits. The
	// engine lets every caller wait in the driver itself, unless Turns says
	// otherwise.
	Ordered bool

	// Turns is how many callers of one Client may have a key in a row on one
	// place in an Ordered driver's queue. Above 1 the engine lets one of them
	// wait in the driver, and sets Claim.Stays; the others stand in line
	// behind it. 0 and 1 mean that every caller has a place of its own.
	Turns int

	// Fenced drivers grant a fence when a claim asks for one. Others answer
	// errors.ErrUnsupported.
	Fenced bool

	// Reach is how far the exclusion goes.
	Reach Reach

	// Ends says when a call returns at the latest if the store does not
	// answer. The zero value is always right; more than that saves the engine
	// two switches between threads a call.
	Ends Ends
}

// Ends tells what ends a call whose store does not answer.
type Ends int

const (
	// EndsSometime: a call may outlast its context. The engine makes it on a
	// goroutine of its own, which it leaves behind if need be.
	EndsSometime Ends = iota

	// EndsByDeadline: a call returns a moment after the deadline of its
	// context. The engine makes it on the caller's goroutine if the caller
	// cannot be cancelled.
	EndsByDeadline

	// EndsPromptly: a call returns a moment after its context has ended, by
	// deadline or by cancellation. The engine makes it on the caller's
	// goroutine, with a context that ends with the caller's too. A call that
	// is ended so is of unknown outcome, as one whose reply was lost.
	EndsPromptly
)

// Reach tells which callers a driver excludes from one another.
type Reach int

const (
	// Process drivers exclude callers within one process. Their calls never
	// block on anything outside it, so the engine makes them on the caller's
	// own goroutine, whatever Ends says.
	Process Reach = iota

	// Host drivers exclude all processes of one host.
	Host

	// Network drivers exclude all processes that reach the same store.
	Network
)

// String returns "process", "host" or "network".
func (r Reach) String() string {
	switch r {
	case Process:
		return "process"
	case Host:
		return "host"
	case Network:
		return "network"
	}
	return fmt.Sprintf("Reach(%d)", int(r))
}

// Claim is what a driver is asked for. Drivers read the fields they need;
// Renew and Release go by Key and Token.
type Claim struct {
	// Key is the name that is locked: any bytes, never empty.
	Key string

	// Token is the proof of one attempt and the hold that comes of it: random,
	// unique, of URL-safe ASCII characters, never used for a second attempt.
	Token string

	// Owner is a label for people, and never a proof: any bytes.
	Owner string

	// TTL is the term that is asked for, at least MinTTL. A store that counts
	// in coarser units rounds it up.
	TTL time.Duration

	// Timeout bounds one call to the store.
	Timeout time.Duration

	// Fenced asks for a fence.
	Fenced bool

	// Renewed says that the hold will be renewed from a third of its term on,
	// so that Wait may grant less than TTL.
	Renewed bool

	// Stays says that a Wait that ends with ErrHeld leaves its place in the
	// queue. The engine then calls Wait with the same claim, for another
	// caller, or Release, which takes the place out of the queue. It is set
	// only if Traits.Turns is above 1.
	Stays bool
}

// Grant is what a driver answers.
type Grant struct {
	// Fence is a number that is larger with every new hold of the key, of
	// whatever client and after whatever release or expiry; zero unless the
	// claim asked for it. A renewal need not repeat it.
	Fence uint64

	// Until is the end of the term as far as the holder may trust it, read
	// from this process's clock. The zero value means: the moment the call
	// began + TTL − [Drift](TTL), which is right for every store that starts
	// the whole term when it is asked. The first renewal comes after a third
	// of what is left then.
	Until time.Time
}

// Status is what a store knows of a key. Its strings are labels for people.
type Status struct {
	Held    bool          `json:"held"`
	Owner   string        `json:"owner,omitempty"`
	Since   time.Time     `json:"since,omitzero"`    // zero where the record has no room for it
	TTL     time.Duration `json:"ttl_ns,omitempty"`  // what is left of the term; negative: held without an end
	Fence   uint64        `json:"fence,omitempty"`   // of the last fenced hold the store remembers
	Waiters []string      `json:"waiters,omitempty"` // in order, where there is one
}

// Drift is what is taken off a term because clocks do not run at one speed:
// a hundredth of it and 2 ms, as the Redlock algorithm has it
// (https://redis.io/docs/latest/develop/use/patterns/distributed-locks/).
func Drift(ttl time.Duration) time.Duration {
	return ttl/100 + 2*time.Millisecond
}

// eachAtOnce is how many claims RenewEach renews at a time.
const eachAtOnce = 16

// RenewEach turns a renewal of one claim into the form of [Driver.Renew]. It
// calls renew from up to 16 goroutines, so that one claim whose store does not
// answer holds up few others, begins none once ctx has ended, and returns when
// all have.
func RenewEach(ctx context.Context, cs []Claim, done func(i int, g Grant, err error),
	renew func(ctx context.Context, c Claim) (Grant, error)) {
	if len(cs) == 1 {
		g, err := renew(ctx, cs[0])
		done(0, g, err)
		return
	}
	var next atomic.Int64
	var wg sync.WaitGroup
	for range min(len(cs), eachAtOnce) {
		wg.Go(func() {
			for i := int(next.Add(1)) - 1; i < len(cs) && ctx.Err() == nil; i = int(next.Add(1)) - 1 {
				g, err := renew(ctx, cs[i])
				done(i, g, err)
			}
		})
	}
	wg.Wait()
}
