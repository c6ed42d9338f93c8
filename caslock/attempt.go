package caslock

import (
	"slices"
	"time"

	"github.com/hasplock/hasp/backend"
)

// intentTTL is longer than the sleeps of a writer that waits. See Claim.WillRetry. If the store is
// no Watcher, hasp.Options.Backoff decides on them, which should be seconds if calls cost money.
const (
	intentTTL        = 3 * time.Second
	intentTTLPolling = 12 * time.Second
)

// attempt is one call of Acquire.
type attempt struct {
	claim  backend.Claim
	writer string                   // the token of the intents of this driver
	polls  bool                     // the store is no Watcher
	sent   map[uint64]backend.Grant // what each Put grants if it succeeds, by the number of its write
	grant  backend.Grant            // means nothing if the call returns an error
}

// edit is the editor of Acquire. If v shows that the key is free for the claim, edit returns the
// record that takes the key, and sets a.grant. If v shows that an earlier Put of this call has
// taken the key, edit returns nil, nil, so that nothing is written. Then the grant is the one of
// that Put: its term counts from that Put, because other clients may have counted from its record
// since. Otherwise the error says who holds the key, and the record, if any, adds an intent: see
// refuse.
func (a *attempt) edit(v *view, now time.Time) (*record, error) {
	items := v.live(now)
	if i := find(items, a.claim.Token); i >= 0 {
		earlier, ours := a.sent[items[i].N]
		if !ours {
			return nil, refusal(items[i:i+1], now) // an earlier Acquire has taken the key
		}
		a.grant = earlier
		return nil, nil
	}

	// The intents go: the key is granted, or refuse adds an intent again.
	r := v.next(without(items, isIntent), now)
	if blockers := without(items, a.admits); len(blockers) > 0 {
		return a.refuse(r, items, blockers, now)
	}

	it := a.item(now)
	if a.claim.Shared {
		it.Kind = kindShared
	}
	if a.claim.Fenced {
		r.Fence = r.Write
	}
	r.add(it, a.claim.TTL, now)
	a.grant = grant(&a.claim, r.Write, now)
	a.sent[r.Write] = a.grant
	return r, nil
}

// admits reports whether the claim can have the key beside the item. An intent refuses shared
// claims, so that readers cannot keep a writer waiting for ever. It refuses no exclusive claim.
func (a *attempt) admits(it item) bool {
	if a.claim.Shared {
		return it.Kind == kindShared
	}
	return it.Kind == kindIntent
}

// refuse returns the error for a claim that blockers refuse. If they are shared holds and the claim
// is of a writer that waits, refuse also returns r with the intent of this driver.
//
// If the record has a fresh intent, refuse returns no record. Each write of an intent would wake
// the waiting writers, because a Watcher reports a write also to its writer.
func (a *attempt) refuse(r *record, items, blockers []item, now time.Time) (*record, error) {
	held := refusal(blockers, now)
	ttl := intentTTL
	if a.polls {
		ttl = intentTTLPolling
	}
	// An intent is written again in the second half of its term.
	isFresh := func(it item) bool { return isIntent(it) && it.rest(now) > ttl/2 }

	intends := a.claim.WillRetry && !a.claim.Shared && held.Shared
	if intends && a.polls {
		// Hide that the hold is shared, because for a shared hold the engine asks ten times a
		// second, whatever Backoff says.
		held.Shared = false
	}
	if !intends || slices.ContainsFunc(items, isFresh) {
		return nil, held
	}

	it := a.item(now)
	it.Kind = kindIntent
	it.Token = a.writer // the driver's token, so a release of any later claim removes it
	r.add(it, ttl, now)
	return r, held
}

// item returns the item of an exclusive hold, without the fields that record.add sets.
func (a *attempt) item(now time.Time) item {
	return item{
		Kind:   kindExclusive,
		Token:  a.claim.Token,
		Owner:  []byte(a.claim.Owner),
		Waited: a.claim.Waited,
		Since:  now,
	}
}

// grant returns the grant of a hold whose Put was sent at the time start. The grant ends a drift
// earlier than the term, because the clocks of other clients may run faster.
func grant(c *backend.Claim, fence uint64, start time.Time) backend.Grant {
	if !c.Fenced {
		fence = 0
	}
	return backend.Grant{Fence: fence, Until: start.Add(c.TTL - backend.Drift(c.TTL))}
}
