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
		why:   "Release with a token that does not hold the key says ErrLost and changes nothing.",
		says:  saysRefuses,
		check: releaseForeign,
	},
	{
		name:  "release-double",
		why:   "Release of what is not held, or not any more, says ErrLost.",
		says:  saysRefuses,
		check: releaseDouble,
	},
	{
		name:  "release-stale",
		why:   "A late Release by a holder whose term ran out says ErrLost and spares the successor.",
		says:  saysRefuses,
		check: releaseStale,
	},
	{
		name:  "release-expired",
		why:   "Release of a hold that ran out says ErrLost, also if nobody has had the key since.",
		says:  saysRefuses,
		check: releaseExpired,
	},
	{
		name:  "release-for-good",
		why:   "After a Release its token holds nothing, and others get the key with terms of their own.",
		says:  saysEnds,
		check: releaseForGood,
	},
	{
		name:  "token-whole",
		why:   "A hold is told by its whole token, and by nothing but its token: no part of it, no other case of it, no owner.",
		says:  saysToken,
		check: tokenWhole,
	},
}

func releaseForeign(e *env) error {
	a, b := e.open(), e.open()
	c := e.claim(e.h.Long)
	a.take(c)
	for _, d := range []*driver{a, b} {
		if err := is("release with a foreign token", d.release(e.claimOf(c.Key, e.h.Long)), backend.ErrLost); err != nil {
			return err
		}
	}
	if err := b.refused(c.Key); err != nil {
		return fmt.Errorf("after a release with a foreign token: %w", err)
	}
	return a.release(c)
}

func releaseDouble(e *env) error {
	a := e.open()
	c := e.claim(e.h.Long)
	if err := is("release of a key that was never held", a.release(c), backend.ErrLost); err != nil {
		return err
	}
	a.take(c)
	a.give(c)
	return is("second release", a.release(c), backend.ErrLost)
}

func releaseStale(e *env) error {
	a, b := e.open(), e.open()
	c := e.claim(e.term)
	a.take(c)
	next, _, err := b.seize(c.Key, e.h.Long)
	if err != nil {
		return err
	}
	if err := is("release by the holder before", a.release(c), backend.ErrLost); err != nil {
		return err
	}
	if err := a.refused(c.Key); err != nil {
		return fmt.Errorf("after a late release by the holder before: %w", err)
	}
	return b.release(next)
}

func releaseExpired(e *env) error {
	a := e.open()
	c := e.claim(e.term)
	a.take(c)
	a.outlast(e.term)
	return is("release of a hold that has run out", a.release(c), backend.ErrLost)
}

func releaseForGood(e *env) error {
	a, b := e.open(), e.open()
	c := e.claim(e.term)
	a.take(c)
	if err := a.release(c); err != nil {
		return slow("release by its holder: %w", err)
	}
	next := e.claimOf(c.Key, e.h.Long)
	b.take(next)
	// The first holder's term must not end the second's.
	a.outlast(e.term)
	if err := a.refused(c.Key); err != nil {
		return fmt.Errorf("after the term of a hold that was released: %w", err)
	}
	return b.release(next)
}

func tokenWhole(e *env) error {
	a, b := e.open(), e.open()
	c := e.claim(e.h.Long)
	a.take(c)
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
			if err := is("release with "+what, d.release(like), backend.ErrLost); err != nil {
				return err
			}
		}
	}
	if err := b.refused(c.Key); err != nil {
		return err
	}
	return a.release(c)
}
