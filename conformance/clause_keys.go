package conformance

import (
	"errors"
	"fmt"
	"strings"

	"github.com/hasplock/hasp/backend"
)

var keyClauses = []clause{
	{name: "keys-odd", optional: true, says: saysAnyKey,
		check: func(e *env) { e.keysApart(oddKeys(e.key())) },
		why:   "A key may have any bytes: control characters, braces, wildcards, invalid UTF-8."},
	{name: "keys-long", optional: true, says: saysKey,
		check: func(e *env) { e.keysApart(longKeys(e.key())) },
		why:   "A key may have 1,000 bytes, and every byte distinguishes it."},
	{name: "keys-apart", says: saysKey, check: func(e *env) { e.keysApart(alikeKeys(e.key())) },
		why: "Similar keys are different locks: a prefix of another key, or a key that differs " +
			"in case or white space only."},
	{name: "keys-derived", says: saysDerived, check: pair(keysDerived),
		why: "Two keys do not affect each other, even if one key looks like a name that the " +
			"store derives from the other."},
	{name: "owners-odd", says: saysOwner, check: pair(ownersOdd),
		why: "An owner may have any bytes, or none, and is never a proof."},
}

// oddKeys returns different keys that a store confuses if it cuts, folds or interprets some bytes.
func oddKeys(k string) []string {
	return []string{
		k + "-nul\x00a", k + "-nul\x00b", k + "-nul", k + "-nul\x00", "\x00" + k,
		k + "\r\nSET x 1\r\n", k + "\n", k + "\r", k + "\t",
		k + "-🔒", k + "-🔓", k + "-é", k + "-e\u0301",
		"{" + k + "}", "{" + k, k + "}", "{}" + k, "}{" + k, "{{" + k + "}}", "{" + k + "}-{b}",
		k + "-{a}-{b}",
		k + "-\xff", k + "-\xfe", k + "-\xff\xfe\xfd", k + "-\ufffd",
		k + "/a/b", k + "/../x", "../" + k, "/" + k, k + "/", k + "/.", k + "\\a", "C:\\" + k,
		k + "%2Fa", k + "%", k + "%00", k + "+a", k + " a", k + "*", k + "?", k + "[a]", k + "$a",
		k + "'\";--", k + "#a", k + "&a=b",
	}
}

// longKeys returns different keys of up to 1,000 bytes that a store confuses if it cuts long keys
// at some length, or at one end.
func longKeys(k string) []string {
	long := (k + strings.Repeat("0123456789abcdef", 1000/16))[:999]
	slashes := (k + strings.Repeat("/x", 500))[:999]
	return []string{
		long + "a", long + "b", long, long[:255], long[:256], long[:500],
		"a" + long, "b" + long,
		slashes + "a", slashes + "b",
		strings.Repeat("🔒", 200) + k + "-1", strings.Repeat("🔒", 200) + k + "-2",
	}
}

// alikeKeys returns different keys that a store confuses if it folds case, trims white space, or
// mistakes one key for the parent of another.
func alikeKeys(k string) []string {
	return []string{
		k, k + ":", k + ":a", k + ":a:b", k + "-a", k + "a", k + "aa", k + "-b", k + "b",
		k + "A", strings.ToUpper(k), strings.ToUpper(k[:1]) + k[1:],
		" " + k, k + " ", k + "  ", k + ".", k + "1", k + "01", k + "1.0",
		k[:len(k)-1] + "~", "x" + k,
	}
}

// keysApart takes all keys at the same time, each with a token of its own, and then releases them
// one by one. If the store confused two of the keys, the second would be refused, or a release
// would free both.
func (e *env) keysApart(keys []string) {
	a := e.open()
	b := e.open()
	cs := make([]backend.Claim, len(keys))
	fences := make([]uint64, len(keys))
	must(e.each(len(keys), func(i int) {
		cs[i] = e.fencedIfCan(e.claimOf(keys[i], e.long))
		g, err := a.acquire(cs[i])
		mustf(err, "acquire %s while others are held", brief(keys[i]))
		fences[i] = g.Fence
	}))

	must(e.each(len(cs), func(i int) {
		mustf(b.refused(cs[i].Key), "%s", brief(cs[i].Key))
		if e.inspector {
			b.shows(cs[i], fences[i])
		}
		// Renew all keys here, at the same time, so that their terms outlast the rest of the
		// clause.
		mustf(a.renews(cs[i]), "renew %s", brief(cs[i].Key))
	}))

	for i, c := range cs {
		mustf(a.release(c), "release %s", brief(c.Key))
		mustf(b.granted(c.Key), "%s after its release", brief(c.Key))

		// The two keys that follow are similar, and must still be held.
		for _, other := range cs[i+1 : min(i+3, len(cs))] {
			mustf(b.refused(other.Key),
				"%s after the release of %s", brief(other.Key), brief(c.Key))
		}
	}
}

// brief quotes a key. It leaves out the middle of a long key.
func brief(key string) string {
	if len(key) > 80 {
		return fmt.Sprintf("%q…%q (%d bytes)", key[:40], key[len(key)-20:], len(key))
	}
	return fmt.Sprintf("%q", key)
}

// derivedKeys returns names that stores derive from a key. Some belong to hasp, some belong to
// other libraries that share locks with hasp, and some have common suffixes.
func derivedKeys(k string) []string {
	ks := []string{
		"redisson_lock__channel:{" + k + "}", "redisson_lock__channel:" + k,
		"redisson_lock_queue:{" + k + "}", "redisson_lock_timeout:{" + k + "}",
		"registry:" + k, "lock:" + k, "locks/" + k, "{" + k + "}", "{" + k + "}:lock",
		"hasp:" + k, "hasp:{" + k + "}",
	}

	for _, kind := range []string{
		"fence", "queue", "alive", "wait", "waiters", "lock", "mark", "channel", "grant", "token",
		"owner",
	} {
		ks = append(ks, "hasp:{"+k+"}:"+kind+":"+k, "hasp:"+kind+":"+k, k+":"+kind, k+"."+kind,
			kind+":"+k, kind+":{"+k+"}")
	}

	return ks
}

// keysDerived holds a key with a fence, and locks the names that stores derive from it. A store may
// refuse one of these names, because its own entry with that name may look like a lock.
func keysDerived(e *env, a, b *driver) {
	c := e.fencedIfCan(e.claim(e.long))
	before := a.take(c)

	for _, key := range derivedKeys(c.Key) {
		derived := e.fencedIfCan(e.claimOf(key, e.long))
		_, err := b.acquire(derived)
		switch {
		case err == nil:
			mustf(b.release(derived), "release %q", key)
		case !errors.Is(err, backend.ErrHeld) && !errors.Is(err, backend.ErrInvalid):
			fail("acquire %q: %w", key, err)
		}
	}

	mustf(b.refused(c.Key), "after locks of derived keys")
	mustf(a.renews(c), "renewal after locks of derived keys")
	mustf(a.release(c), "release after locks of derived keys")
	next := e.fencedIfCan(e.claimOf(c.Key, e.long))
	g := b.take(next)
	require(!next.Fenced || g.Fence > before.Fence,
		"fence %d after %d and locks of derived keys", g.Fence, before.Fence)
	b.give(next)
}

// ownersOdd checks that a token of the same owner can neither take nor release a hold.
func ownersOdd(e *env, a, b *driver) {
	for _, owner := range []string{
		"", "\x00", "a\x00b", "a\r\nb", "#", "a#b", "a:b/c%2F", "🔒", "\xff\xfe", `{"a":1}`,
		strings.Repeat("x", 1000),
	} {
		c := e.claim(e.long)
		c.Owner = owner
		a.take(c)

		other := e.claimOf(c.Key, e.long)
		other.Owner = owner
		must(is(fmt.Sprintf("acquire by another token of owner %.20q", owner),
			errOf(b.acquire(other)), backend.ErrHeld))
		must(is(fmt.Sprintf("release by another token of owner %.20q", owner), b.release(other),
			backend.ErrLost))

		mustf(a.renews(c), "renew by owner %.20q", owner)
		mustf(a.release(c), "release by owner %.20q", owner)
	}
}
