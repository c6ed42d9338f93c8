package conformance

import (
	"errors"
	"fmt"
	"strings"

	"github.com/hasplock/hasp/backend"
)

var keyClauses = []clause{
	{
		name:     "keys-odd",
		why:      "A key may have any bytes: control characters, braces, wildcards, invalid UTF-8.",
		says:     saysAnyKey,
		optional: yes,
		check:    func(e *env) error { return e.keysApart(oddKeys) },
	},
	{
		name:     "keys-long",
		why:      "A key may have 1,000 bytes, and every byte distinguishes it.",
		says:     saysKey,
		optional: yes,
		check:    func(e *env) error { return e.keysApart(longKeys) },
	},
	{
		name:  "keys-apart",
		why:   "Similar keys are different locks: a prefix of another key, or a key that differs in case or white space only.",
		says:  saysKey,
		check: func(e *env) error { return e.keysApart(alikeKeys) },
	},
	{
		name:  "keys-derived",
		why:   "A key may look like a name that the store derives from another key. That does the other lock no harm.",
		says:  saysDerived,
		check: keysDerived,
	},
	{
		name:  "owners-odd",
		why:   "An owner may have any bytes, or none, and is never a proof.",
		says:  saysOwner,
		check: ownersOdd,
	},
}

// oddKeys all differ in more than what a store might cut off.
func oddKeys(k string) []string {
	return []string{
		k + "-nul\x00a", k + "-nul\x00b", k + "-nul", k + "-nul\x00", "\x00" + k,
		k + "\r\nSET x 1\r\n", k + "\n", k + "\r", k + "\t",
		k + "-🔒", k + "-🔓", k + "-é", k + "-e\u0301",
		"{" + k + "}", "{" + k, k + "}", "{}" + k, "}{" + k, "{{" + k + "}}", "{" + k + "}-{b}", k + "-{a}-{b}",
		k + "-\xff", k + "-\xfe", k + "-\xff\xfe\xfd", k + "-\ufffd",
		k + "/a/b", k + "/../x", "../" + k, "/" + k, k + "/", k + "/.", k + "\\a", "C:\\" + k,
		k + "%2Fa", k + "%", k + "%00", k + "+a", k + " a", k + "*", k + "?", k + "[a]", k + "$a", k + "'\";--", k + "#a", k + "&a=b",
	}
}

func longKeys(k string) []string {
	long := k + strings.Repeat("0123456789abcdef", 1000/16)
	long = long[:999]
	slashes := (k + strings.Repeat("/x", 500))[:999]
	return []string{
		long + "a", long + "b", long, long[:255], long[:256], long[:500],
		"a" + long, "b" + long,
		slashes + "a", slashes + "b",
		strings.Repeat("🔒", 200) + k + "-1", strings.Repeat("🔒", 200) + k + "-2",
	}
}

func alikeKeys(k string) []string {
	return []string{
		k, k + ":", k + ":a", k + ":a:b", k + "-a", k + "a", k + "aa", k + "-b", k + "b",
		k + "A", strings.ToUpper(k), strings.ToUpper(k[:1]) + k[1:],
		" " + k, k + " ", k + "  ", k + ".", k + "1", k + "01", k + "1.0",
		k[:len(k)-1] + "~", "x" + k,
	}
}

// keysApart holds all keys at once, each with a token of its own, and releases one
// after another.
func (e *env) keysApart(keys func(string) []string) error {
	a, b := e.open(), e.open()
	var cs []backend.Claim
	for _, key := range keys(e.key()) {
		c := e.claimOf(key, e.h.Long)
		c.Fenced = e.traits.Fenced
		if _, err := a.acquire(c); err != nil {
			return fmt.Errorf("acquire %s while others are held: %w", brief(key), err)
		}
		cs = append(cs, c)
	}
	for _, c := range cs {
		if err := b.refused(c.Key); err != nil {
			return fmt.Errorf("%s: %w", brief(c.Key), err)
		}
		if e.inspector {
			if s := b.inspect(c.Key); !s.Held || s.Owner != "" && s.Owner != c.Owner {
				return fmt.Errorf("inspect %s: %+v, want held by %s", brief(c.Key), s, c.Owner)
			}
		}
	}
	for i, c := range cs {
		mustf(a.renews(c), "renew %s", brief(c.Key))
		if err := a.release(c); err != nil {
			return fmt.Errorf("release %s: %w", brief(c.Key), err)
		}
		if err := b.granted(c.Key); err != nil {
			return fmt.Errorf("%s after its release: %w", brief(c.Key), err)
		}
		for _, other := range cs[i+1 : min(i+3, len(cs))] {
			if err := b.refused(other.Key); err != nil {
				return fmt.Errorf("%s after the release of %s: %w", brief(other.Key), brief(c.Key), err)
			}
		}
	}
	return nil
}

// brief quotes a key. It leaves out the middle of a long key.
func brief(key string) string {
	if len(key) > 80 {
		return fmt.Sprintf("%q…%q (%d bytes)", key[:40], key[len(key)-20:], len(key))
	}
	return fmt.Sprintf("%q", key)
}

// derivedKeys returns names that stores derive from a key: the names of hasp, those
// of other libraries that share locks with hasp, and the usual suffixes.
func derivedKeys(k string) []string {
	ks := []string{
		"redisson_lock__channel:{" + k + "}", "redisson_lock__channel:" + k,
		"redisson_lock_queue:{" + k + "}", "redisson_lock_timeout:{" + k + "}",
		"registry:" + k, "lock:" + k, "locks/" + k, "{" + k + "}", "{" + k + "}:lock",
		"hasp:" + k, "hasp:{" + k + "}",
	}
	for _, kind := range []string{"fence", "queue", "alive", "wait", "waiters", "lock", "mark", "channel", "grant", "token", "owner"} {
		ks = append(ks, "hasp:{"+k+"}:"+kind+":"+k, "hasp:"+kind+":"+k, k+":"+kind, k+"."+kind, kind+":"+k, kind+":{"+k+"}")
	}
	return ks
}

// keysDerived locks derived names while their key is held with a fence. The store
// may grant them or not, because it may take its own entry under that name for a
// lock.
func keysDerived(e *env) error {
	a, b := e.open(), e.open()
	c := e.claim(e.h.Long)
	c.Fenced = e.traits.Fenced
	before := a.take(c)
	for _, key := range derivedKeys(c.Key) {
		d := e.claimOf(key, e.h.Long)
		d.Fenced = e.traits.Fenced
		switch _, err := b.acquire(d); {
		case err == nil:
			mustf(b.release(d), "release %q", key)
		case !errors.Is(err, backend.ErrHeld) && !errors.Is(err, backend.ErrInvalid):
			return fmt.Errorf("acquire %q: %w", key, err)
		}
	}
	mustf(b.refused(c.Key), "after locks of keys made of it")
	mustf(a.renews(c), "renewal after locks of keys made of it")
	mustf(a.release(c), "release after locks of keys made of it")
	next := e.claimOf(c.Key, e.h.Long)
	next.Fenced = c.Fenced
	if g := b.take(next); next.Fenced && g.Fence <= before.Fence {
		return fmt.Errorf("fence %d after %d and locks of keys made of it", g.Fence, before.Fence)
	}
	return b.release(next)
}

func ownersOdd(e *env) error {
	a, b := e.open(), e.open()
	for _, owner := range []string{"", "\x00", "a\x00b", "a\r\nb", "#", "a#b", "a:b/c%2F", "🔒", "\xff\xfe", `{"a":1}`, strings.Repeat("x", 1000)} {
		c := e.claim(e.h.Long)
		c.Owner = owner
		a.take(c)
		other := e.claimOf(c.Key, e.h.Long)
		other.Owner = owner
		if _, err := b.acquire(other); err == nil || !errors.Is(err, backend.ErrHeld) {
			return is(fmt.Sprintf("acquire by another token of owner %.20q", owner), err, backend.ErrHeld)
		}
		must(is(fmt.Sprintf("release by another token of owner %.20q", owner), b.release(other), backend.ErrLost))
		mustf(a.renews(c), "renew by owner %.20q", owner)
		mustf(a.release(c), "release by owner %.20q", owner)
	}
	return nil
}
