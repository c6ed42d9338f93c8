// Package caslock keeps locks in any store that can compare and set: one that replaces a value only
// if its version is the expected one. Subpackages have adapters for NATS, Kubernetes, SQL and S3.
//
// # A caller that asks once
//
// Most such stores have no clock. A process can then find out that a holder has died only by
// watching: if it sees the same hold for the whole term, the holder has not renewed it. So after a
// holder was killed, the key stays taken for one term from the first look of each process that
// wants it. A Lock that waits gets the key then. A TryLock of a new process is refused, and so is
// that of the next one. A cron job that only calls TryLock would never run again: let it call Lock
// with WithMaxWait of more than a term, or use a store whose clock tells the age of a value. The
// documentation of each adapter says whether its store has one.
//
// # Guarantees
//
// A key has one holder at a time, as long as the store keeps what it has confirmed and compares
// versions in one step. The clocks of clients need not agree: each counts terms by its own, and
// backend.Drift covers different speeds. A suspended machine only counts longer. Fences grow also
// after the store has lost its data, if the clocks of clients agree within an hour. Waiters get the
// key in no particular order.
//
// A caller that keeps asking gets the key of a dead holder within a term of its first attempt.
// HeldError.RetryAfter is an upper bound. Inspect and List also go by the clock of the holder, so
// they may report that a key is free while callers are refused it.
//
// # Cost
//
// To lock a free key takes a write, and a read before it unless the driver has just seen the key
// free. To find a key held takes a read, and to renew or unlock takes a write. If another client
// has written the key meanwhile, each of these takes a read and a write more. A waiter reads when
// the store reports a change, or polls if the store cannot: hasp.Options.Backoff sets the pace, and
// where calls cost money it should be seconds. All shared leases of a key are in one record. Each
// renewal rewrites it, so a key that is far away should have 20 of them at most. A writer that
// waits for them writes at each attempt.
//
// One release in a hundred also reads a page of the records, if the store can list them, and
// removes what dead processes have left and the records of keys that were free for an hour.
//
// # How it works
//
// A key has one record of JSON with its holds. Each write has a number, and a hold has the number
// of the write that made or renewed it. A driver takes over a hold whose token and number it has
// seen unchanged for the term, counted from after the reply that showed it first. That is safe: the
// holder began to count before its write, and a renewal in between gives the record another
// version, so the write that takes over is refused. Before it reports a loss, a driver writes on
// top of what it has read, so that no late write of its own can bring the hold back.
//
// # Write an adapter
//
// An adapter has four short methods. In Consul, Get is GET /v1/kv/KEY?consistent, the version is
// ModifyIndex, Put is PUT /v1/kv/KEY?cas=VERSION with 0 for an absent key and the answer true or
// false, and Watch is a GET with index=VERSION. In DynamoDB, the version is an attribute that each
// Put sets to a new random value, with ConditionExpression "version = :v" or
// "attribute_not_exists(version)"; Get is a GetItem with ConsistentRead. Five rules:
//
//   - Only the store's answer that the version differs is ErrConflict. A timeout is not, and nor is
//     an error of the server.
//   - Switch off the retries of the client library.
//   - Keys are any bytes. If the store takes fewer, escape them, and end a long one with a hash.
//   - Set Age only from one clock that no client sets, and rather too small than too large.
//   - Run the suite of package conformance over the store, with a Link that loses replies.
package caslock
