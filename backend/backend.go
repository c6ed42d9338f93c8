// Package backend defines what a store must do to keep locks for package hasp.
//
// Authors of drivers import it. Users of locks need only package hasp.
// Each call of a [Driver] makes one attempt: it takes a key for a token, prolongs the term, or
// gives the key back. A driver does not retry, and it never logs. The engine in package hasp does
// the rest, once for all drivers: queueing within a process, backoff, renewal in time, deadlines,
// re-entry, and clean-up after a lost reply. Package hasp keeps its promises over every driver that
// keeps this contract.
//
// With a plain driver, the engine polls. A driver that can say when to ask again is
// also a [Waker]. One whose store queues the callers is a [Waiter] instead. A driver that can
// report who holds a key is an [Inspector], and one that can report which keys are held is a
// [Lister]. [Traits] describes the other differences.
//
// # Holds
//
// A hold is the grant of one key to one token. At most one token holds a key
// at a time, however many callers ask for it. Shared holds are the exception: any
// number of them may hold a key together, but never beside a hold that is not shared.
//
// A hold lasts until every term that its claim or a renewal was granted has run out, by
// the store's clock. While the store keeps its data, a hold ends with its term, by
// Release, or by Break, and by nothing else. Then others get the key. After a term has
// run out, a store may refuse the key to every caller for some seconds.
//
// The token is the only proof of a hold. Release and Renew work with it from any driver on the same
// store, also when the driver that acquired the key is closed. The store compares the token and
// makes the change in one step: a command that arrives late changes nothing for the successor.
//
// What a hold or a waiter leaves in the store disappears by itself, even if no
// caller wants the key again. Only a fence counter may stay. A store that
// removes such leftovers only from time to time bounds how much it keeps.
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
// In some stores a term cannot be made longer or shorter for one key, as in etcd, where a
// lease has the term that it was created with. Such a driver makes a lease for the new
// term and moves the key to it.
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
// A driver works again after an outage without being opened anew, and after the store has ended its
// connections. A store may drop at any time what it keeps only for speed, such as scripts. Holds
// survive a restart of a store that keeps its data. A store that has lost its data returns ErrLost
// to the holder and grants the key to the next caller.
//
// # Cost
//
// The documentation of a driver states how many commands a call takes. Callers
// that wait do not keep the store busy.
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
	"strings"
	"sync"
	"time"
)

// MinTTL is the shortest term that may be asked for. It leaves room for a
// renewal and its repeat over an ordinary network.
const MinTTL = 100 * time.Millisecond

// SharedRetryEvery bounds a sleep: if a shared hold has refused an exclusive caller with
// Claim.WillRetry, that caller asks again within this time. If a [Waker] wakes the caller, it asks
// again within a second.
const SharedRetryEvery = 100 * time.Millisecond

var (
	// ErrHeld says that another token holds the key, or is before the caller in a driver's queue. A
	// driver that knows more returns a [*HeldError] instead.
	ErrHeld = errors.New("held by another")

	// ErrLost says that the token does not hold the key: the term ran out,
	// the key was broken, or the store lost its data.
	ErrLost = errors.New("lease lost")

	// ErrInvalid says that what was asked for can never succeed: a bad key,
	// a term out of range, a parameter that does not exist.
	ErrInvalid = errors.New("invalid")

	// ErrUnavailable is matched by an [*UnavailableError]. Drivers need not return it, because the
	// engine makes every error of an outage match it.
	ErrUnavailable = errors.New("store unavailable")
)

// Definite reports whether err is definite: the call that returned it has changed nothing in
// the store.
func Definite(err error) bool {
	return errors.Is(err, ErrHeld) || errors.Is(err, ErrLost) || errors.Is(err, ErrInvalid) || errors.Is(err, errors.ErrUnsupported)
}

// HeldError is ErrHeld with the details that the store knows about the hold.
type HeldError struct {
	// RetryAfter is how long the present term still runs, by the store's clock; zero if the driver
	// does not know. The key may become free sooner, or be held longer if the holder renews.
	RetryAfter time.Duration

	// Owner is the holder's label for people; empty if the driver does not know it. For shared
	// holds, it is the owner of one of them.
	Owner string

	// Shared says that the key is held by shared holds.
	Shared bool

	// Waited is the Waited of the holder's claim; zero if the driver does not know. See
	// [Claim.Waited].
	Waited time.Duration
}

// Error names the holder, if it is known. The name is quoted, because an owner may be any string.
func (e *HeldError) Error() string {
	if e.Owner == "" {
		return ErrHeld.Error()
	}
	return fmt.Sprintf("held by %q", e.Owner)
}

// Is reports whether target is [ErrHeld], which every HeldError matches.
func (e *HeldError) Is(target error) bool { return target == ErrHeld }

// UnavailableError is how [Waiter.Wait] reports an outage that began at Since. It
// matches [ErrUnavailable].
type UnavailableError struct {
	// Since is when the store stopped answering; zero if that is not known.
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
// Its methods may be called from many goroutines at once. Every call but a Wait is sent to the
// store at most once. So a driver switches off the retries of its client library. Otherwise, if the
// store carried out an Acquire and the reply was lost, it would refuse the repeat, because the
// call's own token holds the key.
type Driver interface {
	// Traits returns what the driver can do. The answer never changes.
	Traits() Traits

	// Acquire makes one attempt to take c.Key for c.Token, and does not wait for the key. It grants
	// a key that is free and returns ErrHeld for a key that is held. It never takes a key that is
	// held, not even if a token of the same client holds it.
	//
	// Acquire returns when the store has answered or its connection is dead. If
	// the store does not answer, Traits.Cancellation says when Acquire returns. Unless the
	// Reach is Process, the engine calls Acquire with a context that ends after
	// c.Timeout at the latest. If Cancellation is CancelPrompt, that context also ends when
	// the caller gives up. An error that ctx has caused is of unknown outcome: unless
	// Traits.Cleans is set, the engine releases c.Token, at once and again after c.Timeout.
	//
	// A driver that returns before all its commands have ended, as a quorum
	// does, cleans up after itself, also when it is closed at once.
	Acquire(ctx context.Context, c Claim) (Grant, error)

	// Renew prolongs the holds of cs so that each has at least its TTL left.
	// It calls done with the outcome of each claim: a grant, ErrLost if c.Token
	// does not hold c.Key, or an error of unknown outcome. It never shortens a
	// term and never takes a key again that its token had lost.
	//
	// Renew blocks until every claim is answered or ctx has ended. It calls done at most once per
	// index, from any goroutine, and never after it has returned. If Renew does not call done for a
	// claim, that claim's outcome is unknown. The claims of one call may have any keys; no two are
	// of the same hold.
	//
	// [RenewEach] makes a Renew out of a function for one claim.
	Renew(ctx context.Context, cs []Claim, done func(i int, g Grant, err error))

	// Release gives c.Key back if c.Token holds it. Otherwise it returns ErrLost and changes
	// nothing. With c.KeepUntil it ends the hold of c.Token and leaves the key taken.
	Release(ctx context.Context, c Claim) error

	// Close ends what the driver has opened, and leaves no goroutine behind.
	// It frees no key. The engine calls it once, last.
	Close() error
}

// Waiter is a [Driver] whose callers wait in the driver, because its store queues them. A driver
// without a queue is a [Waker], which is simpler.
//
// A wrapper around a Waiter must be a Waiter as well.
type Waiter interface {
	Driver

	// Wait blocks until c.Token holds c.Key or ctx is done. It gets a key that is released, that is
	// broken, or whose term runs out, whichever driver, strategy or process had it. A waiter that
	// died or that is cut off does not keep the others from the key. Waits do not depend on each
	// other: neither a wait for one key nor its end affects another wait.
	//
	// If it returns ErrHeld or another definite error, nothing of c is left in the store, neither a
	// hold nor a place in a queue. Any other error is of unknown outcome, as from Acquire: a
	// command may still be under way, and the claim may be in the store. Unless Traits.Cleans is
	// set, the engine then releases c.Token, at once and again after c.Timeout. Release removes a
	// place in a queue as well as a hold.
	//
	// An error that matches ctx's own error is of unknown outcome even if it
	// also matches ErrHeld. So a Wait that ctx ends while c is in a queue
	// joins the store's last answer and ctx.Err(), and returns at once.
	//
	// Wait begins to listen before it makes an attempt, so that no release falls between the two.
	// It bounds each call to the store by c.Timeout. During an outage of up to that time it goes
	// on, with its place in a queue, or returns the outage, and the engine asks again. Wait repeats
	// a call with c.Token only while no release of that token was sent. Otherwise an unknown
	// outcome ends the Wait, and the engine calls again with a new token.
	//
	// If ctx ends the wait, the error matches ErrHeld if the store's last answer was ErrHeld.
	// Otherwise Wait returns the outage, if there was one. Wait also returns the outage if a call
	// has had no answer for a third of c.Timeout by then, because the last answer is too old. An
	// error of unknown outcome may be an [*UnavailableError], whose Since says when the store
	// stopped answering. The engine bounds the whole outage by Options.Timeout. Without Since, it
	// assumes that the outage has just begun.
	Wait(ctx context.Context, c Claim) (Grant, error)
}

// Waker is a [Driver] that says when it is time to ask again. A caller that Acquire has refused
// calls Listen, asks once more at once, and then sleeps until it is woken. It also asks when the
// holder's term ends, and once a second. The engine makes the attempts, bounds them, and cleans
// up after them, as for a driver that polls. If shared holds have refused a caller that gives up,
// the engine releases the token of its last claim with WillRetry, so that new shared claims need
// not wait for it. An Ordered driver cannot be a Waker.
//
// A wrapper around a Waker must be a Waker as well.
type Waker interface {
	Driver

	// Listen begins to listen for c.Key. After it has returned, and an Acquire with Claim.WillRetry
	// was refused, the next change that may let a caller in wakes the caller: a release, a Break,
	// or a new end of the term, whichever driver of the strategy made it. If messages may have been
	// missed, that wakes the caller as well. A caller may be woken too often. Wake has room for one
	// signal, which it keeps until the caller receives it.
	//
	// If the driver cannot listen, Listen returns an error. If it can listen no more, it closes
	// wake. In both cases the engine polls, and calls Listen again after a second. If
	// Traits.Cancellation promises it for other calls, Listen also returns as soon as ctx has
	// ended. It sends nothing with a token, and reads only Key, Shared and Timeout of c.
	//
	// Stop ends the listening. It does not block, and the engine calls it once, also after wake
	// was closed.
	Listen(ctx context.Context, c Claim) (wake <-chan struct{}, stop func(), err error)
}

// RecallMark begins the token of a hold that may linger: ~ID~ and more. Other tokens have no mark.
const RecallMark = "~"

// RecallID returns the ID in a token, or in a record that begins with a token, if it has a mark.
func RecallID(token string) (id string, ok bool) {
	rest, ok := strings.CutPrefix(token, RecallMark)
	id, _, cut := strings.Cut(rest, RecallMark)
	return id, ok && cut
}

// Recaller is a [Driver] by which a caller that is refused can ask the holder's Client for a key
// that may linger. When Acquire or Wait learns that the key is held by a token with a RecallMark,
// the driver sends a message for its ID, which holds the key. The message may be lost.
type Recaller interface {
	Driver

	// Recalls begins to call f with the Key of each claim that was refused because of a token with
	// this ID. F does not block. It may be called too often, also after the hold has ended. Calls
	// end when the driver is closed.
	Recalls(ctx context.Context, id string, f func(key string)) error
}

// Inspector is a [Driver] that can report on a key and force it free.
type Inspector interface {
	Driver

	// Inspect returns what the store knows of key: whether it is held, its
	// holder, the rest of the term, the fence, and the waiters. For a free key
	// the error is nil, and every field of the Status but Fence and Waiters is zero.
	Inspect(ctx context.Context, key string) (Status, error)

	// Break removes the hold of key, whichever token has it. Breaking a key that is free is not an
	// error. An ordered driver hands the key over to the next waiter.
	Break(ctx context.Context, key string) error
}

// Lister is a [Driver] that can list the keys that are held or waited for.
type Lister interface {
	Driver

	// List yields the keys that begin with prefix and are held or waited for, each with
	// what the store knows of it. Prefix is literal text. The list is no snapshot. A key
	// that is held all the time is in it. A key that is taken or freed meanwhile may be
	// missing, and a key may come twice.
	//
	// A hold is in the list only if its record names an owner as this driver's records do,
	// or if callers of this driver wait for the key.
	//
	// List sends nothing before the loop asks for the next entry, and nothing after the
	// loop has ended. One call to the store looks at 1,000 entries at most, and lasts for
	// timeout at most. An error ends the list: it is yielded once, last, with a zero
	// Entry. If ctx ends before the list does, that error matches ctx's error.
	List(ctx context.Context, prefix string, timeout time.Duration) iter.Seq2[Entry, error]
}

// Traits is what a driver can do. The engine, the conformance suite and the
// documentation rely on it. Claiming less or more than is true fails the suite.
type Traits struct {
	// Ordered drivers are Waiters that serve the waiters of all processes in order of arrival. They
	// refuse an Acquire while any caller waits. A waiter that gives up leaves the order of the
	// others as it was. The engine lets every caller wait in the driver itself.
	Ordered bool

	// Fenced drivers grant a fence when a claim asks for one. Others return
	// errors.ErrUnsupported and grant nothing.
	Fenced bool

	// MinHold drivers obey Claim.KeepUntil. Others ignore it, and the engine
	// returns errors.ErrUnsupported to a Lock that needs it.
	MinHold bool

	// Shared drivers obey Claim.Shared. Others ignore it, and the engine returns
	// errors.ErrUnsupported to a Lock that needs it.
	Shared bool

	// MaxTTL is the longest term that the driver grants; a longer one is
	// ErrInvalid. Zero means that there is no limit.
	MaxTTL time.Duration

	// MinTTL is the shortest term that the driver grants, and TTLUnit is the unit of its terms. A
	// driver rounds a term up to both. Zero means MinTTL of this package for the first, and a
	// millisecond or less for the second.
	MinTTL, TTLUnit time.Duration

	// Cleans drivers remove whatever a failed Acquire or Wait may have left in the store, even if
	// its outcome is unknown. So the engine does not release the token of such a call.
	Cleans bool

	// Reach is how far the exclusion goes.
	Reach Reach

	// Cancellation says when a call returns at the latest if the store does not answer. The zero
	// value is always right. A larger value saves two switches between threads in each call.
	Cancellation Cancellation
}

// Cancellation says what ends a call whose store does not answer.
type Cancellation int

const (
	// CancelNone: a call may outlast its context. The engine runs each call on a goroutine of its
	// own, and does not wait for that goroutine if the call outlasts its context.
	CancelNone Cancellation = iota

	// CancelByDeadline: a call returns a moment after the deadline of its
	// context, but may outlast a cancellation. The engine runs it on the
	// caller's goroutine if the caller's context cannot be cancelled.
	CancelByDeadline

	// CancelPrompt: a call returns a moment after its context has ended, by
	// deadline or by cancellation. The engine runs it on the caller's goroutine. The
	// context of an Acquire also ends with the caller's context. The outcome of a call
	// that its context ended is unknown, as if its reply had been lost.
	CancelPrompt
)

// Reach says which callers a driver excludes from one another.
type Reach string

const (
	// Process drivers exclude callers within one process. Their calls never
	// block on anything outside the process, so the engine runs them on the
	// caller's goroutine, whatever Cancellation says.
	Process Reach = "process"

	// Host drivers exclude all processes of one host.
	Host Reach = "host"

	// Network drivers exclude all processes that reach the same store.
	Network Reach = "network"
)

// Claim is the request to a driver. Drivers read the fields that they need. Renew and Release find
// a hold by Key and Token, and a shared one also by Shared. Handle may help them.
type Claim struct {
	// Key is the name that is locked: any bytes, never empty. Keys of up to 1,000 bytes are
	// different locks if any byte differs. A key may look like a name that the store derives from
	// another key; that does the other lock no harm.
	Key string

	// Token is the proof of one attempt, and of the hold that it leads to. It is
	// random and unique, and consists of URL-safe ASCII characters. It is not used
	// for another attempt. The store compares all of it, and nothing else.
	Token string

	// Owner is a label for people, and never a proof: any bytes, or none.
	Owner string

	// TTL is the requested term, at least MinTTL. A store that counts in coarser
	// units rounds it up.
	TTL time.Duration

	// Handle is the last Handle that a grant of this driver gave for the hold. It is for Renew and
	// Release, and only saves the driver a search: the token is the proof. It is nil if another
	// driver made the hold, or if the outcome of the call that made it is unknown. Then the driver
	// goes by the token. A late call may bring the Handle of a hold that has ended.
	Handle any

	// Timeout bounds one call to the store.
	Timeout time.Duration

	// Fenced requests a fence.
	Fenced bool

	// Shared asks for a shared hold, which other shared holds may join. A key with
	// a shared hold is free for a shared claim and held for every other claim, unless
	// callers wait: see WillRetry. Each shared hold has its own token, term and fence: a
	// renewal or a release of one changes no other. The key is free when the last of
	// them has ended. KeepUntil has no effect on a shared hold.
	Shared bool

	// WillRetry says that the caller of Acquire will ask again if it is refused. If a shared hold
	// refuses a claim that is not shared, the caller sleeps for [SharedRetryEvery] at most, or for
	// a second if it listens. A caller that waits for a key with a shared hold gets it although
	// other shared claims keep coming: the driver refuses new shared claims until that caller has
	// had the key or has left. If it has died, the driver grants shared claims again after some
	// seconds at most. Callers of Wait are always waiting, so a Waiter need not obey the field.
	WillRetry bool

	// Renewed says that the engine renews the hold, from a third of the granted term on. So Acquire
	// and Wait may grant less than TTL.
	Renewed bool

	// Waited is how long the Client has waited for the key, since its last hold of it, when
	// this attempt begins. It is zero for the first attempt of a caller, and if the driver is
	// a Waiter or a Waker. Another driver should store it with the hold, and return it in
	// [HeldError.Waited]. Clients that poll a key then learn how long others wait for it,
	// and poll at the same pace. Without it they poll more often, and some get the key
	// more often than others.
	Waited time.Duration

	// KeepUntil is read by Release only, and zero if the key is to be freed. If c.Token holds the
	// key, Release leaves it taken, by no token that a caller knows. It sets the rest of the term
	// to end at KeepUntil, be that sooner or later than before. KeepUntil may be further ahead than
	// Traits.MaxTTL. From then on c.Token has lost the key, so a late Renew or a repeated Release
	// returns ErrLost. A Break frees the key sooner. If KeepUntil has passed, Release frees the key
	// at once. A Wait learns of the new end as it learns of a release.
	KeepUntil time.Time
}

// Grant describes a hold that was taken or renewed.
type Grant struct {
	// Fence is a number that grows with every new hold of the key, across clients, releases and
	// expiries; it is zero unless the claim asked for it. Only two shared holds that begin at the
	// same moment may have the same fence. Fences still grow after a restart of the store, even if
	// it has lost its data. A driver whose store cannot do that says so in its documentation. A
	// renewal need not repeat the fence.
	Fence uint64

	// Handle is what the driver wants to know in later calls for this hold, such as the number of a
	// lease in the store. The engine does not look at it. It passes it to Renew and Release as
	// Claim.Handle. A renewal may give another one; nil keeps the one before.
	Handle any

	// Until is the moment until which the holder may trust the hold, by this process's clock. Until
	// has passed before another token is granted the key. The zero value means: the moment the call
	// began + TTL − [Drift](TTL), which is right for every store that starts the whole term when it
	// is asked. The first renewal is due after a third of the term at the latest. If less than TTL
	// was granted, it is due after a third of the rest at the latest.
	Until time.Time
}

// Status describes a key, as far as the store knows. Its strings are labels for people.
type Status struct {
	Held    bool          `json:"held"`
	Owner   string        `json:"owner,omitempty"`
	Since   time.Time     `json:"since,omitzero"`    // zero if the store does not record it
	TTL     time.Duration `json:"ttl_ns,omitempty"`  // the rest of the term; negative if the hold has no end
	Fence   uint64        `json:"fence,omitempty"`   // the fence of the last fenced hold that the store remembers
	Waiters []string      `json:"waiters,omitempty"` // their owners, in order if the driver is Ordered

	// Shared is the owners of the holders of a shared hold, up to 1,000 of them. Owner
	// is empty then, TTL is the longest, and Since is zero.
	Shared []string `json:"shared,omitempty"`
}

// Entry is one key of a [Lister]'s list.
type Entry struct {
	Key string `json:"key"`
	Status
}

// Drift returns the part of a term that a holder must not trust, because clocks
// run at different speeds. It is a hundredth of ttl plus 2 ms, as in the Redlock
// algorithm (https://redis.io/docs/latest/develop/clients/patterns/distributed-locks/).
func Drift(ttl time.Duration) time.Duration {
	return ttl/100 + 2*time.Millisecond
}

// eachAtOnce is how many claims RenewEach renews at a time, if none is slow.
const eachAtOnce = 16

// RenewEach implements [Driver.Renew] by a function that renews one claim. It makes up to 16 calls
// of renew at a time. If ctx has a deadline and these calls are slow, it makes more: every claim is
// sent in the first half of the time that is left. So claims whose store does not answer do not
// delay the others past that half. If there are several claims, RenewEach begins no call after ctx
// has ended. It returns when all calls have returned.
func RenewEach(ctx context.Context, cs []Claim, done func(i int, g Grant, err error),
	renew func(ctx context.Context, c Claim) (Grant, error)) {
	if len(cs) == 1 {
		// This is the usual case. It needs no goroutine.
		g, err := renew(ctx, cs[0])
		done(0, g, err)
		return
	}

	// At each tick, one claim is sent without a slot. With 2n+1 ticks before the
	// deadline, n claims are sent in the first half, even if all slots are taken.
	var ticks <-chan time.Time
	if end, ok := ctx.Deadline(); ok {
		t := time.NewTicker(max(time.Until(end)/time.Duration(2*len(cs)+1), 1))
		defer t.Stop()
		ticks = t.C
	}

	slots := make(chan struct{}, eachAtOnce)
	var wg sync.WaitGroup
	defer wg.Wait() // done must not be called after RenewEach has returned

	for i, c := range cs {
		free := func() {}
		select {
		case slots <- struct{}{}:
			free = func() { <-slots }
		case <-ticks:
		case <-ctx.Done():
		}
		if ctx.Err() != nil {
			return // select may have taken another case that was ready as well
		}

		wg.Go(func() {
			defer free()
			g, err := renew(ctx, c)
			done(i, g, err)
		})
	}
}
