package conformance

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hasplock/hasp/backend"
)

var releaseClauses = []clause{
	{name: "release-lost", says: saysRefuses,
		check: func(e *env) { e.lostHolds("release", (*driver).release) },
		why: "Release with a token that does not hold the key returns ErrLost and changes " +
			"nothing, whether the key was never held, was released, has expired, or has a new " +
			"holder."},
	{name: "release-for-good", says: saysEnds, check: pair(releaseForGood),
		why: "After a Release the token holds nothing, and others get the key with terms of their own."},
	{name: "token-whole", says: saysToken, check: pair(tokenWhole),
		why: "Only the whole token proves a hold: not a part of it, not another case of it, not the owner."},
	{name: "token-any-driver", says: saysAnyDriver, check: pair(tokenAnyDriver),
		why: "Renew and Release work with the token alone, without a handle, from any driver, also " +
			"when the driver that acquired the key is closed."},
}

// lostHolds makes the given call with tokens that do not hold their keys. It checks that the call
// neither takes a key nor affects a successor.
func (e *env) lostHolds(what string, call func(d *driver, c backend.Claim) error) {
	a := e.open()
	b := e.open()
	never := e.claim(e.long)
	released := a.hold(e.long)
	expired := a.hold(e.term)
	a.give(released)
	beforeLong := a.hold(e.term)
	beforeShort := a.hold(e.term)

	// Wait until beforeLong and beforeShort have ended and have successors. Then the hold in the
	// variable expired has also ended, because it began earlier with the same term.
	long := b.succeed(beforeLong.Key, e.long)
	short := b.succeed(beforeShort.Key, e.term)
	for state, c := range map[string]backend.Claim{
		"never was": never, "was released": released, "has expired": expired,
		"expired before a long hold": beforeLong, "expired before a short hold": beforeShort,
	} {
		c.TTL = e.long // a renewal would prolong the hold of the short successor
		must(is(what+" of a hold that "+state, call(a, c), backend.ErrLost))
	}

	mustf(a.refused(long.Key), "after a late %s by the previous holder", what)
	mustf(b.release(long), "release by the successor after a late %s by the previous holder", what)

	// All keys must become free: none was taken, and the term of the short successor was not
	// prolonged. After a loss a store may refuse the key to every caller for a while.
	for _, c := range []backend.Claim{never, released, expired, short} {
		mustf(b.grantedAtLast(c.Key), "after a late %s", what)
	}
}

// releaseForGood lets a successor take a key that was released before the end of its term. The end
// of that term must not affect the successor.
func releaseForGood(e *env, a, b *driver) {
	c := a.hold(e.term)
	mustInTime(a.release(c), "release by its holder") // the term may have ended
	next := e.claimOf(c.Key, e.long)
	b.take(next)

	// The second hold must outlast the end of the first holder's term.
	a.outlast(e.term)
	mustf(a.refused(c.Key), "after the term of a hold that was released")
	b.give(next)
}

// tokenWhole renews and releases a hold with tokens that resemble its token. Each call must return
// ErrLost, and the hold must last.
func tokenWhole(e *env, a, b *driver) {
	c := a.hold(e.long)
	for what, token := range map[string]string{
		"a prefix of the token":            c.Token[:len(c.Token)-1],
		"a suffix of the token":            c.Token[1:],
		"a longer token":                   c.Token + "A",
		"the token in lower case":          strings.ToLower(c.Token),
		"the owner's label":                c.Owner,
		"another token and the same owner": e.claim(e.long).Token,
	} {
		like := c
		like.Token = token
		for _, d := range []*driver{a, b} {
			must(is("renew with "+what, d.renews(like), backend.ErrLost))
			must(is("release with "+what, d.release(like), backend.ErrLost))
		}
	}

	must(b.refused(c.Key))
	a.give(c)
}

// tokenAnyDriver calls the drivers without the handles of their grants: the driver that acquired
// the key, another driver, and another driver after the first one is closed.
func tokenAnyDriver(e *env, a, b *driver) {
	for i, d := range []*driver{a, b, b} {
		c := a.hold(e.long)
		if i == 2 {
			must(a.Close())
		}

		// The methods renew and release of driver would pass the handle.
		ctx, cancel := d.soon()
		mustf(errOf(renewBy(ctx, d.Driver, c)), "renewal without a handle, in round %d", i)
		mustf(d.Release(ctx, c), "release without a handle, in round %d", i)
		cancel()

		// Driver b gets the key immediately after its own release. After a release by driver a, it
		// may take several attempts.
		acquire := b.granted
		if d == a {
			acquire = b.grantedAtLast
		}
		mustf(acquire(c.Key), "after a release without a handle, in round %d", i)
	}
}

var renewClauses = []clause{
	{name: "renew-never-shortens", says: saysNoShorter, check: pair(renewNeverShortens),
		why: "A renewal never shortens a term, in whatever order renewals arrive."},
	{name: "renew-lost", says: saysNoShorter,
		check: func(e *env) { e.lostHolds("renewal", (*driver).renews) },
		why: "A renewal with a token that has lost its key returns ErrLost. It does not take " +
			"the key again, and neither ends nor prolongs a successor's hold."},
	{name: "renew-many", says: saysOutcomes, check: pair(renewMany),
		why: "Renew answers every claim of a batch once, each with its own outcome."},
	{name: "renew-answers", says: saysDone, check: renewAnswers,
		why: "Renew calls done at most once for each claim, and never after it has returned, " +
			"also when its context ends."},
}

// renewNeverShortens renews long holds for a short term. After the short term they must still
// exist.
func renewNeverShortens(e *env, a, b *driver) {
	one := a.hold(e.long)
	short := one
	short.TTL = e.term
	a.keep(short)

	// A long and a short renewal of each of these holds run at the same time.
	many := a.holdMany(8, e.long)
	err := e.each(2*len(many), func(i int) {
		c := many[i/2]
		if i%2 == 0 {
			c.TTL = e.term
		}

		must(a.renews(c))
	})

	mustf(err, "two renewals of one hold at once")

	a.outlast(e.term)
	for _, c := range append(many, one) {
		mustf(b.refused(c.Key), "after a renewal for %v a hold of %v ended", e.term, e.long)
		a.give(c)
	}
}

// answers records how a Renew calls the function done.
type answers struct {
	mu    sync.Mutex // guards the fields below, but not errs after Renew has returned
	errs  []error    // the answer for each claim; errUnanswered if there is none
	over  bool       // set when Renew has returned
	wrong error      // describes a call of done that Renew must not make
}

// renewAll renews cs in one call, and records the answers. It passes the handles that were noted
// for the tokens of cs, and notes the new handles.
func renewAll(ctx context.Context, d *driver, cs []backend.Claim) *answers {
	a := &answers{errs: slices.Repeat([]error{errUnanswered}, len(cs))}
	noted := make([]backend.Claim, len(cs))
	for i, c := range cs {
		noted[i] = d.noted(c)
	}

	// A call of done may be wrong. Only the last wrong call is kept.
	d.Renew(ctx, noted, func(i int, g backend.Grant, err error) {
		a.mu.Lock()
		defer a.mu.Unlock()
		switch {
		case a.over:
			a.wrong = errors.New("done was called after Renew had returned")
		case i < 0 || i >= len(cs):
			a.wrong = fmt.Errorf("done was called with index %d of %d", i, len(cs))
		case a.errs[i] != errUnanswered:
			a.wrong = errors.New("done was called twice for one claim")
		default:
			a.errs[i] = err
			if err == nil {
				d.note(cs[i], g)
			}
		}
	})

	a.mu.Lock()
	defer a.mu.Unlock()
	a.over = true
	return a
}

// check ends the try if Renew has made a wrong call of done.
func (a *answers) check() {
	a.mu.Lock()
	defer a.mu.Unlock()
	must(a.wrong)
}

// renewMany renews holds, and keys that other tokens hold, in one batch. Of every four claims, the
// first and the last have holds. Of every eight claims, the last four are shared.
func renewMany(e *env, a, b *driver) {
	cs := make([]backend.Claim, 60)
	holds := func(i int) bool { return i%4 == 0 || i%4 == 3 }

	for i := range cs {
		// Take a long hold, so that it still exists when the batch is sent.
		cs[i] = e.claim(e.long)
		cs[i].Shared = e.traits.Shared && i%8 >= 4
		switch i % 4 {
		case 1:
			cs[i].Key = cs[i-1].Key // held by another token of the batch
		case 2:
			other := cs[i]
			other.Token = e.claim(e.long).Token
			b.take(other) // held by a token that is not in the batch
		case 3:
			if cs[i].Shared {
				cs[i].Key = cs[i-3].Key // two holds of one key
			}
		}
		if holds(i) {
			a.take(cs[i])
		}
	}

	renewAll(e.ctx, a, nil).check() // an empty batch
	got := renewAll(e.endingAfter(e.patience), a, cs)
	a.outlast(e.term) // so that late calls of done arrive
	got.check()

	for i := range cs {
		if holds(i) {
			mustf(got.errs[i], "claim %d of %d, which is held", i, len(cs))
		} else {
			must(is(fmt.Sprintf("claim %d of %d, whose token holds nothing", i, len(cs)),
				got.errs[i], backend.ErrLost))
		}
	}

	// Renew must have prolonged every hold that it answers without an error.
	cs = a.holdMany(10, e.term)
	for i := range cs {
		cs[i].TTL = e.long
	}

	got = renewAll(e.endingAfter(e.patience), a, cs)
	a.outlast(e.term)
	for i, c := range cs {
		// On a slow machine the term may have ended before the renewal.
		requireInTime(!errors.Is(got.errs[i], backend.ErrLost),
			"claim %d of %d was lost before its renewal", i, len(cs))
		mustf(b.refused(c.Key), "claim %d of %d was renewed for %v (answer: %v), and after %v", i,
			len(cs), e.long, got.errs[i], e.term)
		a.give(c)
	}
}

// renewAnswers ends the context of Renew before the call, or at different moments during the call.
func renewAnswers(e *env) {
	a := e.open()
	cs := a.holdMany(40, e.long)
	var all []*answers

	for round := range 6 {
		ctx, cancel := context.WithCancel(e.ctx)
		if round == 0 {
			cancel()
		}

		time.AfterFunc(time.Duration(round)*100*time.Microsecond, cancel)
		must(e.within("Renew whose context ends", func() error {
			all = append(all, renewAll(ctx, a, cs))
			return nil
		}))
	}

	a.outlast(e.term) // so that late calls of done arrive
	for _, got := range all {
		got.check()
		for i, err := range got.errs {
			require(!errors.Is(err, backend.ErrLost),
				"claim %d, which is held, when the context of Renew ended: %w", i, err)
		}
	}

	a.give(cs...)
}
