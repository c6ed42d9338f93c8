// Package backend defines what a store must do to keep locks for package hasp.
//
// Authors of drivers import it. Users of locks need only package hasp. Each call of a [Driver]
// makes one attempt: it takes a key for a token, prolongs the term, or gives the key back. A driver
// does not retry, and it never logs. The engine in package hasp does the rest, once for all
// drivers: queueing within a process, backoff, renewal in time, deadlines, re-entry, and clean-up
// after a lost reply. Package hasp keeps its promises over every driver that keeps this contract.
//
// With a plain driver, the engine polls. A driver that can say when to ask again is also a [Waker].
// One whose store queues the callers is a [Waiter] instead. A driver that can report who holds a
// key is an [Inspector], and one that can report which keys are held is a [Lister]. [Traits] describes
// the other differences.
//
// # Holds
//
// A hold is one token's possession of a key. At most one token holds a key at a time, however many
// callers ask for it. Shared holds are the exception: any number of them may hold a key together,
// but never beside a hold that is not shared.
//
// A hold lasts until the store's clock has passed the end of every term that was granted to its
// claim and its renewals. While the store keeps its data, a hold ends with its term, by Release, or
// by Break, and by nothing else. Then others get the key. But after a term has run out, a store may first refuse the
// key to every caller for some seconds.
//
// The token is the only proof of a hold. Release and Renew work with it from any driver on the same
// store, also when the driver that acquired the key is closed. The store compares the token and
// makes the change in one step: a command that arrives late changes nothing for the successor.
//
// What a hold or a waiter leaves in the store disappears after some time, even if no caller wants
// the key again. Only a fence counter may stay. A driver whose store removes such leftovers only
// from time to time keeps their number below a bound.
//
// # Stores that do not fit
//
// A lock that ends with a connection or a session is not a hold. Examples are an advisory lock of
// PostgreSQL, and a lock that a session of ZooKeeper or Consul keeps. Such a lock has no term of
// its own: it ends when the store notices that the connection or the session is gone. No other
// process can renew or release it. If the connection is lost, the lock ends while its holder is at
// work, and so do all other locks of the process. A row of a table, or a key with a term of its
// own, fits in the same store.
//
// Some stores cannot change the term of a key: a lease of etcd always has the term that it was
// created with. A driver for such a store creates a lease with the new term, and moves the key to
// that lease.
//
// # Stores without a clock
//
// Some stores only compare and set. Their driver ends the hold of a dead process by its own clock,
// when the record has not changed for a whole term. The driver starts to count when it has the
// first reply that shows the record. When a term has run out, such a store may still refuse the key
// to each caller, for one term from that caller's first attempt. So RetryAfter and Status.TTL are
// upper bounds, and Inspect and List may use the clock of the holder. The documentation of the
// driver says what an attempt of a new process means. Package caslock is such a driver.
//
// # Errors
//
// [ErrHeld], [ErrLost], [ErrInvalid] and [errors.ErrUnsupported] are definite: the call has changed
// nothing in the store. Every other error means that the outcome is unknown: the command may have
// been carried out. An outage is never reported as a definite error. A driver returns its errors
// without a wrapper of its own; the engine wraps once.
//
// # Outages
//
// After an outage, and after the store has ended the driver's connections, a driver works again
// without being opened anew. A store may drop at any time what it keeps only for speed, such as
// scripts. Holds survive a restart of a store that keeps its data. A store that has lost its data
// returns ErrLost to the holder and grants the key to the next caller.
//
// # Cost
//
// The documentation of a driver states how many commands a call takes. Callers that wait do not
// keep the store busy.
//
// # Ownership
//
// A driver belongs to one Client, whose Close closes it. A driver closes only what it opened
// itself. Drivers on one store do not disturb each other. Strategies that keep their locks under
// the same keys exclude each other, and their fences grow together.
//
// The suite in package conformance checks a driver against this contract. Each clause of the suite
// quotes a sentence of the contract. The test of a driver is one call of the suite.
package backend

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"sync"
	"sync/atomic"
	"time"
)

// MinTTL is the shortest term that may be asked for. It leaves room for a renewal and its repeat
// over an ordinary network.
const MinTTL = 100 * time.Millisecond

// SharedRetryEvery is the longest sleep of an exclusive caller with Claim.WillRetry after a shared
// hold has refused it. If the caller listens (see [Waker]), the bound is a second instead.
const SharedRetryEvery = 100 * time.Millisecond

var (
	// ErrHeld says that another token holds the key, or is before the caller's token in a driver's
	// queue. A driver that knows more returns a [*HeldError] instead.
	ErrHeld = errors.New("held by another")

	// ErrLost says that the token does not hold the key: the term ran out, the key was broken, or
	// the store lost its data.
	ErrLost = errors.New("lease lost")

	// ErrInvalid says that the call can never succeed, because of a bad key, a term out of range,
	// or a parameter that does not exist.
	ErrInvalid = errors.New("invalid")

	// ErrUnavailable is matched by an [*UnavailableError]. Drivers need not return it, because the
	// engine makes every error of an outage match it.
	ErrUnavailable = errors.New("store unavailable")
)

// Definite reports whether err is definite: the call that returned it has changed nothing in the
// store.
func Definite(err error) bool {
	return errors.Is(err, ErrHeld) || errors.Is(err, ErrLost) ||
		errors.Is(err, ErrInvalid) || errors.Is(err, errors.ErrUnsupported)
}

// Outage returns err as an [*UnavailableError], unless err is nil, definite, or about the end of ctx.
// A constructor that calls its store returns such an error, because no engine marks it.
func Outage(ctx context.Context, err error) error {
	endedByCtx := ctx.Err() != nil && errors.Is(err, ctx.Err())
	if err == nil || Definite(err) || endedByCtx {
		return err
	}
	return &UnavailableError{Err: err}
}

// HeldError is ErrHeld with the details that the store knows about the hold.
type HeldError struct {
	// RetryAfter is how long the present term still runs, by the store's clock; zero if the driver
	// does not know. The key may become free earlier, or be held longer if the holder renews.
	RetryAfter time.Duration

	// Owner is the holder's label for people; empty if the driver does not know it. If shared holds
	// have the key, Owner is the owner of one of them.
	Owner string

	// Shared says that the key is held by shared holds.
	Shared bool

	// Waited is [Claim.Waited] of the holder's claim; zero if the driver does not know it.
	Waited time.Duration

	// Foreign says that the key has a record of another program, or of another strategy, which
	// neither wakes the callers that wait here, nor waits behind them. The engine then polls, and
	// from time to time leaves a free key to that program for a moment.
	Foreign bool

	// Kept says that the last holder has released the key, and that its min hold keeps the key for
	// RetryAfter. It is false if the driver does not know that.
	Kept bool

	// Here says that the holder is a caller of the same Client. Only the engine sets it.
	Here bool
}

// Error names the holder, and says how long the key stays taken, as far as that is known. The name
// is quoted, because an owner may be any string.
func (e *HeldError) Error() string {
	var left time.Duration // 0 if it is not known
	switch {
	case e.RetryAfter >= time.Second:
		left = e.RetryAfter.Round(time.Second)
	case e.RetryAfter > 0:
		left = max(e.RetryAfter.Round(time.Millisecond), time.Millisecond)
	}

	text := ErrHeld.Error()
	switch {
	case e.Kept:
		text = fmt.Sprintf("kept for %v more by a min hold", left)
		if e.Owner != "" {
			text += fmt.Sprintf(" of %q", e.Owner)
		}
		return text
	case e.Here:
		text = "held by another caller of this Client" +
			" (a nested call needs the lease's context)"
	case e.Owner != "":
		text = fmt.Sprintf("held by %q", e.Owner)
	}
	if left > 0 {
		text += fmt.Sprintf(", %v left", left)
	}
	return text
}

// Is reports whether target is [ErrHeld], which every HeldError matches.
func (e *HeldError) Is(target error) bool { return target == ErrHeld }

// UnavailableError is an outage whose start may be known. A Waiter may return it. It matches
// [ErrUnavailable].
type UnavailableError struct {
	// Since is the time at which the store stopped answering; zero if that is not known.
	Since time.Time

	// Err is the store's error.
	Err error
}

// Error returns the text of e.Err.
func (e *UnavailableError) Error() string {
	if e.Err == nil {
		return ErrUnavailable.Error()
	}
	return e.Err.Error()
}

// Unwrap returns [ErrUnavailable] and e.Err, so that e matches both.
func (e *UnavailableError) Unwrap() []error { return []error{ErrUnavailable, e.Err} }

// Driver keeps claims in one store with one strategy.
//
// Many goroutines may call its methods at the same time. Every call but a Wait is sent to the store
// at most once. So a driver switches off the retries of its client library. Otherwise, if the reply
// to an Acquire was lost, the library would send the Acquire again. The store would refuse the
// second Acquire, because the call's own token holds the key.
type Driver interface {
	// Traits returns what the driver can do. The answer never changes.
	Traits() Traits

	// Acquire makes one attempt to take c.Key for c.Token, and does not wait for the key. It grants
	// a key that is free and returns ErrHeld for a key that is held. It never takes a key that is
	// held, not even if a token of the same client holds it.
	//
	// Acquire returns when the store has answered or its connection is dead. If the store does not
	// answer, Acquire returns as Traits.Cancellation says. Unless Traits.Reach is Process, the
	// engine calls Acquire with a context that ends after c.Timeout at the latest. If
	// Traits.Cancellation is CancelPrompt, that context also ends when the caller gives up. If ctx
	// has caused the error, the outcome is unknown: unless Traits.Cleans is set, the engine
	// releases c.Token, immediately and again after c.Timeout. The engine does so after every error
	// that is not definite. c.Timeout counts from the first answered release.
	//
	// If Acquire returns before all its commands have ended, as a quorum does, the driver cleans up
	// after them, also if it is closed immediately.
	Acquire(ctx context.Context, c Claim) (Grant, error)

	// Renew prolongs the hold of each claim in cs, so that at least the claim's TTL is left. It
	// calls done with the outcome of each claim: a grant, ErrLost if the claim's token does not
	// hold its key, or an error of unknown outcome. It never shortens a term, and it never takes a
	// key again that the token has lost.
	//
	// Renew blocks until every claim is answered or ctx has ended. It calls done at most once per
	// index, from any goroutine, and never after it has returned. If Renew does not call done for a
	// claim, that claim's outcome is unknown. The claims of one call may have any keys; no two
	// claims are of the same hold.
	//
	// A driver whose store renews one claim at a time can implement Renew with [RenewEach].
	Renew(ctx context.Context, cs []Claim, done func(i int, g Grant, err error))

	// Release gives c.Key back if c.Token holds it. Otherwise it returns ErrLost and changes
	// nothing. With c.KeepUntil it ends the hold of c.Token and leaves the key taken.
	Release(ctx context.Context, c Claim) error

	// Close ends what the driver has opened, and leaves no goroutine behind. It frees no key. It is
	// the engine's last call, and the engine makes it once.
	Close() error
}

// Waiter is a [Driver] whose callers wait in the driver, because its store queues them. A driver
// without a queue should be a [Waker] instead, which is simpler.
//
// A wrapper around a Waiter must be a Waiter as well.
type Waiter interface {
	Driver

	// Wait blocks until c.Token holds c.Key or ctx is done. It gets the key when the hold is
	// released or broken, or when its term runs out, whichever driver, strategy or process had the
	// hold. A waiter that died or that is cut off does not keep the others from the key. Waits do
	// not depend on each other: neither a wait for one key nor its end affects another wait.
	//
	// If it returns ErrHeld or another definite error, nothing of c is left in the store, neither a
	// hold nor a place in a queue. Any other error is of unknown outcome, as from Acquire: a
	// command may still be in flight, and the claim may be in the store. Unless Traits.Cleans is
	// set, the engine then releases c.Token, immediately and again after c.Timeout. Release removes
	// a place in a queue as well as a hold.
	//
	// If an error matches ctx's own error, the outcome is unknown even if it also matches ErrHeld.
	// So if ctx ends while c is in a queue, Wait need not leave the queue first: it returns
	// immediately, and joins the store's last answer and ctx.Err().
	//
	// Wait begins to listen before it makes an attempt, so that no release falls between the two.
	// It bounds each call to the store by c.Timeout. If an outage lasts for up to c.Timeout, Wait
	// either goes on and keeps its place in a queue, or it returns the outage, and the engine asks
	// again. After a call of unknown outcome, Wait may repeat the call with c.Token as long as no
	// release of c.Token was sent. Otherwise Wait returns, and the engine calls it again with a new
	// token.
	//
	// If ctx ends the wait, the error matches ErrHeld if the store's last answer was ErrHeld.
	// Otherwise Wait returns the outage, if there was one. Wait also returns the outage if, at the
	// end of ctx, a call has had no answer for a third of c.Timeout, because the last answer is too
	// old. An error of unknown outcome may be an [*UnavailableError], whose Since says when the
	// store stopped answering. The engine bounds the whole outage by Options.Timeout. Without
	// Since, it assumes that the outage has just begun.
	Wait(ctx context.Context, c Claim) (Grant, error)
}

// Waker is a [Driver] that says when it is time to ask again. If Acquire refuses a caller, the
// engine calls Listen, makes another attempt immediately, and then sleeps until the driver wakes
// it. The engine also asks when the holder's term ends, and once a second. The engine makes, bounds
// and cleans up after the attempts, as for a driver that polls. If shared holds have refused a
// caller, and the caller gives up, the engine releases the token of its last claim with WillRetry.
// So new shared claims need not wait for that caller. An Ordered driver cannot be a Waker.
//
// A wrapper around a Waker must be a Waker as well.
type Waker interface {
	Driver

	// Listen begins to listen for c.Key. If an Acquire with Claim.WillRetry is refused after Listen
	// has returned, the driver sends a signal on wake at the next change that may let the caller
	// in: a release, a Break, or a new end of the term, whichever driver of the strategy made it.
	// It also sends a signal if it may have missed messages. Too many signals do no harm. The
	// channel wake has room for one signal, and keeps it until the caller receives it.
	//
	// If the driver cannot listen, Listen returns an error. If the driver can listen no more, it
	// closes wake. In both cases the engine polls, and calls Listen again after a second.
	// Traits.Cancellation says when Listen returns after the end of ctx. Listen sends nothing with
	// a token, and reads only Key, Shared and Timeout of c.
	//
	// To end the listening, the engine calls stop once, even if wake was closed. stop never blocks.
	Listen(ctx context.Context, c Claim) (wake <-chan struct{}, stop func(), err error)
}

// Inspector is a [Driver] that can report on a key and force it free.
type Inspector interface {
	Driver

	// Inspect returns what the store knows of key: whether it is held, its holder, the rest of the
	// term, the fence, and the waiters. If the key is free, the error is nil, and every field of
	// the Status but Fence and Waiters is zero.
	Inspect(ctx context.Context, key string) (Status, error)

	// Break removes the hold of key, whichever token has it. Breaking a free key is not an error.
	// An Ordered driver hands the key over to the next waiter.
	Break(ctx context.Context, key string) error
}

// Degraded is a [Driver] that can be opened although a part of its store does not answer.
type Degraded interface {
	Driver

	// Missing says which parts did not answer when the driver was opened, and why. It returns nil if
	// all did.
	Missing() error
}

// Lister is a [Driver] that can list the keys that are held or waited for.
type Lister interface {
	Driver

	// List yields the keys that begin with prefix and are held or waited for, each with what the
	// store knows of it. The prefix is literal text. The list is no snapshot. If a key is held all
	// the time, it is in the list. A key that is taken or freed meanwhile may be missing, and a key
	// may come twice.
	//
	// A key is in the list only if its record names the owner in the form that this driver uses, or
	// if callers of this driver wait for the key.
	//
	// List sends nothing before the loop asks for the next entry, and nothing after the loop has
	// ended. One call to the store looks at 1,000 entries at most, and takes at most the duration
	// timeout. An error ends the list: List yields the error once, last, with a zero Entry. If ctx
	// ends before the list does, that error matches ctx's error.
	List(ctx context.Context, prefix string, timeout time.Duration) iter.Seq2[Entry, error]
}

// Traits says what a driver can do. The engine, the conformance suite and the documentation rely on
// it. If Traits says less or more than is true, the suite fails.
type Traits struct {
	// Ordered drivers are Waiters that serve the waiters of all processes in order of arrival. They
	// refuse an Acquire while any caller waits. If a waiter gives up, the order of the others does
	// not change. With an Ordered driver, the engine keeps no queue of its own: every caller waits
	// in the driver.
	Ordered bool

	// Fenced drivers grant a fence if a claim asks for one. Other drivers return
	// errors.ErrUnsupported for such a claim, and grant nothing.
	Fenced bool

	// MinHold drivers obey Claim.KeepUntil. Other drivers ignore it, and the engine returns
	// errors.ErrUnsupported to a Lock that needs it.
	MinHold bool

	// Shared drivers obey Claim.Shared. Other drivers ignore it, and the engine returns
	// errors.ErrUnsupported to a Lock that needs it.
	Shared bool

	// MaxTTL is the longest term that the driver grants; a longer one is ErrInvalid. Zero means
	// that there is no limit.
	MaxTTL time.Duration

	// MinTTL is the shortest term that the driver grants. Each term is a multiple of TTLUnit. A
	// driver rounds a term up to both. A zero MinTTL means the constant MinTTL, and a zero TTLUnit
	// means a millisecond or less.
	MinTTL, TTLUnit time.Duration

	// Cleans says that the driver removes what a failed Acquire or Wait has left in the store, even
	// after an unknown outcome. So the engine does not release the token of such a call.
	Cleans bool

	// Reach is how far the exclusion goes.
	Reach Reach

	// Cancellation says when a call returns at the latest if the store does not answer. The zero
	// value is safe for every driver. Other values save two switches of threads in each call.
	Cancellation Cancellation
}

// Cancellation says what ends a call whose store does not answer.
type Cancellation int

const (
	// CancelNone means that a call may outlast its context. The engine runs each call on a
	// goroutine of its own, and does not wait for that goroutine if the call outlasts its context.
	CancelNone Cancellation = iota

	// CancelByDeadline means that a call returns a moment after the deadline of its context, but
	// may outlast a cancellation. If the caller's context cannot be cancelled, the engine runs the
	// call on the caller's goroutine.
	CancelByDeadline

	// CancelPrompt means that a call returns a moment after its context has ended, by deadline or
	// by cancellation. The engine runs the call on the caller's goroutine. The context of an
	// Acquire also ends with the caller's context. If a call ended because of its context, the
	// outcome is unknown, as if the reply had been lost.
	CancelPrompt
)

// Reach says which callers a driver excludes from one another.
type Reach string

const (
	// Process drivers exclude callers within one process. Their calls never block on anything
	// outside the process, so the engine runs them on the caller's goroutine, whatever Cancellation
	// says.
	Process Reach = "process"

	// Host drivers exclude all processes of one host.
	Host Reach = "host"

	// Network drivers exclude all processes that reach the same store.
	Network Reach = "network"
)

// Claim is the request to a driver. Drivers read the fields that they need. Renew and Release find
// a hold by Key, Token and Shared, and Handle may save them a search.
type Claim struct {
	// Key is the name that is locked: any bytes, never empty. Keys of up to 1,000 bytes are
	// different locks if any byte differs. Two keys do not affect each other, even if one key looks
	// like a name that the store derives from the other.
	Key string

	// Token is the proof of one attempt, and of the hold that the attempt leads to. It is random
	// and unique, and consists of at least 16 URL-safe ASCII characters. Each attempt has a new
	// token. The store compares the whole token, and nothing else.
	Token string

	// Owner is a label for people, and never a proof: any bytes, or none.
	Owner string

	// TTL is the requested term, at least MinTTL. Drivers round it up: see Traits.TTLUnit.
	TTL time.Duration

	// Handle is the last Handle that a grant of this driver gave for the hold. It only saves Renew
	// and Release a search: the token is the proof. Handle is nil if another driver made the hold,
	// or if the call that made the hold had an unknown outcome. Then the driver searches by the
	// token. In a late call, Handle may be of a hold that has ended.
	Handle any

	// Timeout bounds one call to the store.
	Timeout time.Duration

	// Fenced requests a fence.
	Fenced bool

	// Shared asks for a shared hold. Several shared holds may have the key at the same time. A key
	// with a shared hold is held for every claim that is not shared, and free for a shared claim
	// unless other callers wait: see WillRetry. Each shared hold has its own token, term and fence:
	// a renewal or a release of one changes no other. The key is free when its last shared hold has
	// ended. KeepUntil has no effect on a shared hold.
	Shared bool

	// WillRetry says that the caller of Acquire will ask again if it is refused. If a shared hold
	// refuses a claim that is not shared, the caller sleeps for [SharedRetryEvery] at most, or for
	// a second if it listens. The driver refuses new shared claims until that caller has had the
	// key or has left, so that the caller gets the key even if shared claims keep coming. If the
	// caller has died, the driver grants shared claims again after some seconds at most. Callers of
	// Wait always wait, so a Waiter need not obey the field.
	WillRetry bool

	// Renewed says that the engine renews the hold, for the first time after a third of the granted
	// term at the latest. So Acquire and Wait may grant less than TTL.
	Renewed bool

	// Contended says that the store has refused the key to this Client lately, so it may refuse this
	// claim as well. It is only a hint at the cheapest command, and only set if Waited is.
	Contended bool

	// Waited is how long the Client had waited for the key when this attempt began: since its last
	// hold of the key, or since the caller came if that is later. It is zero if the caller has not
	// waited, and if the driver is a Waiter or a Waker. Another driver should store it with the
	// hold, and return it in [HeldError.Waited]. Clients that poll for a key then learn how long
	// others wait for it, and poll at the same pace. Without Waited they poll more often, and some
	// get the key more often than others.
	Waited time.Duration

	// Unheard is for Release, and may be nil. If a driver finds that nobody waits for the key, its
	// Release stores true. Then the engine leaves the key to nobody before this Client's next hold.
	Unheard *atomic.Bool

	// KeepUntil is zero if Release is to free the key. Only Release reads it. If KeepUntil is set
	// and c.Token holds the key, Release leaves the key taken by a token that no caller knows. The
	// key's term then ends at KeepUntil, be that sooner or later than before. KeepUntil may be
	// further ahead than Traits.MaxTTL. From then on c.Token has lost the key, so a late Renew or a
	// repeated Release returns ErrLost. A Break frees the key sooner. If KeepUntil has passed,
	// Release frees the key immediately. A Wait learns of the new end as it learns of a release.
	KeepUntil time.Time
}

// Grant describes a hold that was taken or renewed.
type Grant struct {
	// Fence is a number that grows with every new hold of the key, across clients, releases and
	// expiries; it is zero unless the claim asked for it. Only two shared holds that begin at the
	// same moment may have the same fence. After a restart of the store, fences still grow, even if
	// the store has lost its data. If a driver cannot promise that, its documentation says so. A
	// renewal need not repeat the fence.
	Fence uint64

	// Handle is what the driver wants to know in later calls for this hold, such as the number of a
	// lease in the store. The engine passes it to Renew and Release as Claim.Handle, and does not
	// read it. A renewal may give another Handle. If the renewal gives nil, the last Handle stays.
	Handle any

	// Until is the moment until which the holder may trust the hold, by this process's clock. The
	// store grants the key to another token only after Until. The zero value means: the moment at
	// which the call began + TTL − [Drift](TTL). That is right for every store that starts the
	// whole term during the call. The first renewal is due after a third of the term at the latest.
	// If the grant is shorter than TTL, the renewal is due after a third of the rest at the latest.
	Until time.Time
}

// Status is what the store knows of a key. Its strings are labels for people.
type Status struct {
	Held    bool          `json:"held"`
	Owner   string        `json:"owner,omitempty"`
	Kept    bool          `json:"kept,omitempty"`    // the holder has released the key, and its min hold keeps it for TTL; false if not known
	Since   time.Time     `json:"since,omitzero"`    // zero if the store does not record it
	TTL     time.Duration `json:"ttl_ns,omitempty"`  // the rest of the term; negative if the hold has no end
	Fence   uint64        `json:"fence,omitempty"`   // the fence of the last fenced hold that the store remembers
	Waiters []string      `json:"waiters,omitempty"` // owners, in order if the driver is Ordered; perhaps only the first 1,000

	// Shared has the owners of the key's shared holds, up to 1,000 of them. If Shared is not empty,
	// Owner is empty, Since is zero, and TTL is the rest of the longest term.
	Shared []string `json:"shared,omitempty"`
}

// Entry is one key of a [Lister]'s list.
type Entry struct {
	Key string `json:"key"`
	Status
}

// Drift returns the part of a term that a holder must not trust, because clocks run at different
// speeds. It is a hundredth of ttl plus 2 ms, as in the Redlock algorithm
// (https://redis.io/docs/latest/develop/clients/patterns/distributed-locks/).
func Drift(ttl time.Duration) time.Duration { return ttl/100 + 2*time.Millisecond }

// eachAtOnce is how many claims RenewEach renews at the same time, if no call is slow.
const eachAtOnce = 16

// RenewEach implements [Driver.Renew] with the function renew, which renews one claim. It makes up
// to 16 calls of renew at the same time. If ctx has a deadline and these calls are slow, it makes
// more calls, so that it sends every claim in the first half of the time until the deadline. Claims
// that get no answer do not delay the others past that half. If there are several claims, RenewEach
// begins no call after ctx has ended. It returns when all calls have returned.
func RenewEach(ctx context.Context, cs []Claim, done func(i int, g Grant, err error),
	renew func(ctx context.Context, c Claim) (Grant, error)) {
	if len(cs) == 1 {
		// The usual case needs no goroutine. It calls renew even after the end of ctx.
		g, err := renew(ctx, cs[0])
		done(0, g, err)
		return
	}

	// If eachAtOnce calls are in flight, each tick starts one more. With n claims there are 2n+1
	// ticks until the deadline. So even if no call returns, all n claims are sent in the first half
	// of the time.
	var ticks <-chan time.Time
	if end, ok := ctx.Deadline(); ok {
		t := time.NewTicker(max(time.Until(end)/time.Duration(2*len(cs)+1), 1))
		defer t.Stop()
		ticks = t.C
	}

	slots := make(chan struct{}, eachAtOnce) // has a value for each call that no tick has started
	var wg sync.WaitGroup
	defer wg.Wait() // done must not be called after RenewEach has returned

	for i, c := range cs {
		free := func() {}
		select {
		case slots <- struct{}{}:
			free = func() { <-slots }
		case <-ticks: // this call is beyond eachAtOnce, so it has no slot to free
		case <-ctx.Done():
		}
		if ctx.Err() != nil {
			return // select may have chosen another case although ctx had ended
		}

		wg.Go(func() {
			defer free()
			g, err := renew(ctx, c)
			done(i, g, err)
		})
	}
}
