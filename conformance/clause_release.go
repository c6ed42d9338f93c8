package conformance

import (
	"strings"

	"github.com/hasplock/hasp/backend"
)

var releaseClauses = []clause{
	{name: "release-foreign", says: saysRefuses, check: pair(releaseForeign),
		why: "Release with a token that does not hold the key returns ErrLost and changes nothing."},
	{name: "release-double", says: saysRefuses, check: releaseDouble,
		why: "Release of a key that is not held, or no longer held, returns ErrLost."},
	{name: "release-stale", says: saysRefuses, check: pair(releaseStale),
		why: "A late Release by a holder whose term has ended returns ErrLost and does not affect the successor."},
	{name: "release-expired", says: saysRefuses, check: releaseExpired,
		why: "Release of an expired hold returns ErrLost, even if no caller has held the key since."},
	{name: "release-for-good", says: saysEnds, check: pair(releaseForGood),
		why: "After a Release the token holds nothing, and others get the key with terms of their own."},
	{name: "token-whole", says: saysToken, check: pair(tokenWhole),
		why: "Only the whole token proves a hold: not a part of it, not another case of it, not the owner."},
	{name: "token-alone", says: saysHandle, check: pair(tokenAlone),
		why: "Renew and Release work with the token alone, without a handle, in every driver on the store."},
}

func releaseForeign(e *env, a, b *driver) {
	c := a.hold(e.long)
	for _, d := range []*driver{a, b} {
		must(is("release with a foreign token", d.release(e.claimOf(c.Key, e.long)), backend.ErrLost))
	}
	mustf(b.refused(c.Key), "after a release with a foreign token")
	a.give(c)
}

func releaseDouble(e *env) {
	a := e.open()
	c := e.claim(e.long)
	must(is("release of a key that was never held", a.release(c), backend.ErrLost))

	a.take(c)
	a.give(c)
	must(is("second release", a.release(c), backend.ErrLost))
}

func releaseStale(e *env, a, b *driver) {
	c := a.hold(e.term)
	next := b.succeed(c.Key, e.long)

	must(is("release by the previous holder", a.release(c), backend.ErrLost))
	mustf(a.refused(c.Key), "after a late release by the previous holder")
	b.give(next)
}

func releaseExpired(e *env) {
	a := e.open()
	c := a.hold(e.term)
	a.outlast(e.term)
	must(is("release of a hold that has expired", a.release(c), backend.ErrLost))
}

func releaseForGood(e *env, a, b *driver) {
	c := a.hold(e.term)
	mustInTime(a.release(c), "release by its holder")
	next := e.claimOf(c.Key, e.long)
	b.take(next)

	// The end of the first holder's term must not end the second hold.
	a.outlast(e.term)
	mustf(a.refused(c.Key), "after the term of a hold that was released")
	b.give(next)
}

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
			require(d.renews(like) != nil, "renew with %s: success, want ErrLost", what)
			must(is("release with "+what, d.release(like), backend.ErrLost))
		}
	}

	must(b.refused(c.Key))
	a.give(c)
}

// tokenAlone calls the drivers without the handles of their grants.
func tokenAlone(e *env, a, b *driver) {
	for _, d := range []*driver{a, b} {
		c := a.hold(e.long)
		ctx, cancel := d.soon()
		mustf(errOf(renewBy(ctx, d.Driver, c)), "renewal without a handle")
		mustf(d.Release(ctx, c), "release without a handle")
		cancel()
		mustf(b.grantedAtLast(c.Key), "after a release without a handle")
	}
}
