package conformance

import (
	"fmt"
	"strings"
	"unicode"

	"github.com/hasplock/hasp/backend"
)

var releaseClauses = []clause{
	{
		name:  "release-foreign",
		why:   "Release with a token that does not hold the key returns ErrLost and changes nothing.",
		says:  saysRefuses,
		check: releaseForeign,
	},
	{
		name:  "release-double",
		why:   "Release of a key that is not held, or no longer held, returns ErrLost.",
		says:  saysRefuses,
		check: releaseDouble,
	},
	{
		name:  "release-stale",
		why:   "A late Release by a holder whose term has ended returns ErrLost and does not affect the successor.",
		says:  saysRefuses,
		check: releaseStale,
	},
	{
		name:  "release-expired",
		why:   "Release of an expired hold returns ErrLost, even if no caller has held the key since.",
		says:  saysRefuses,
		check: releaseExpired,
	},
	{
		name:  "release-for-good",
		why:   "After a Release the token holds nothing, and others get the key with terms of their own.",
		says:  saysEnds,
		check: releaseForGood,
	},
	{
		name:  "token-whole",
		why:   "Only the whole token proves a hold: not a part of it, not another case of it, not the owner.",
		says:  saysToken,
		check: tokenWhole,
	},
}

func releaseForeign(e *env) error {
	a, b := e.open(), e.open()
	c := a.hold(e.h.Long)
	for _, d := range []*driver{a, b} {
		must(is("release with a foreign token", d.release(e.claimOf(c.Key, e.h.Long)), backend.ErrLost))
	}
	mustf(b.refused(c.Key), "after a release with a foreign token")
	return a.release(c)
}

func releaseDouble(e *env) error {
	a := e.open()
	c := e.claim(e.h.Long)
	must(is("release of a key that was never held", a.release(c), backend.ErrLost))
	a.take(c)
	a.give(c)
	return is("second release", a.release(c), backend.ErrLost)
}

func releaseStale(e *env) error {
	a, b := e.open(), e.open()
	c := a.hold(e.term)
	next, _, err := b.seize(c.Key, e.h.Long)
	must(err)
	must(is("release by the holder before", a.release(c), backend.ErrLost))
	mustf(a.refused(c.Key), "after a late release by the holder before")
	return b.release(next)
}

func releaseExpired(e *env) error {
	a := e.open()
	c := a.hold(e.term)
	a.outlast(e.term)
	return is("release of a hold that has run out", a.release(c), backend.ErrLost)
}

func releaseForGood(e *env) error {
	a, b := e.open(), e.open()
	c := a.hold(e.term)
	if err := a.release(c); err != nil {
		return slow("release by its holder: %w", err)
	}
	next := e.claimOf(c.Key, e.h.Long)
	b.take(next)
	// The end of the first holder's term must not end the second hold.
	a.outlast(e.term)
	mustf(a.refused(c.Key), "after the term of a hold that was released")
	return b.release(next)
}

func tokenWhole(e *env) error {
	a, b := e.open(), e.open()
	c := a.hold(e.h.Long)
	n := len(c.Token)
	other := strings.Map(func(r rune) rune {
		if unicode.IsUpper(r) {
			return unicode.ToLower(r)
		}
		return unicode.ToUpper(r)
	}, c.Token)
	for what, token := range map[string]string{
		"a prefix of the token":            c.Token[:n-1],
		"a suffix of the token":            c.Token[1:],
		"a longer token":                   c.Token + "A",
		"the token in other cases":         other,
		"the owner's label":                c.Owner,
		"another token and the same owner": e.claim(e.h.Long).Token,
	} {
		like := c
		like.Token = token
		for _, d := range []*driver{a, b} {
			if _, err := d.renew(like); err == nil {
				return fmt.Errorf("renew with %s: success, want ErrLost", what)
			}
			must(is("release with "+what, d.release(like), backend.ErrLost))
		}
	}
	must(b.refused(c.Key))
	return a.release(c)
}
