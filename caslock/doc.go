// Package caslock keeps locks in any store that can compare and set: one that replaces a value only
// if its version is the expected one. Subpackages have adapters for NATS, Kubernetes, SQL and S3.
//
// # A caller that asks once
//
// Most such stores have no clock that tells the age of a value. So a process can find out that a
// holder has died only by watching its hold: if the hold stays the same for the whole term, the
// holder has not renewed it. If a holder is killed, each process is refused until one term after
// its own first read of the hold. A Lock that waits gets the key at that time. A TryLock of a new
// process is refused, and so is a TryLock of the next process. A cron job that only calls TryLock
// would never run again, so let it call Lock with WithMaxWait of more than a term, or use a store
// whose clock tells the age of a value. The documentation of each adapter says whether it has one.
//
// # Guarantees
//
// A key has one holder at a time, if the store keeps each write that it has confirmed, and compares
// the version and writes in one step. For that, the clocks of clients need not agree: each client
// counts terms by its own clock, and backend.Drift covers different speeds. Only three things need
// wall clocks, and no hold depends on them. Fences grow if clocks agree within an hour; after a
// loss of all data, they grow once the writer's clock is later than the last write. A min hold
// lasts, and a waiting writer keeps out new readers, if clocks agree within a minute; a TryLock of
// a process that has not seen the min hold before is refused for a minute longer. Waiters get the
// key in no particular order. Inspect may report a refused key as free.
//
// # Cost
//
// A lock of a free key takes a write, and a read before it unless the driver has just seen the key
// free. An attempt at a held key takes a read. A renewal or an unlock takes a write. If another
// client has written since, each of these three takes one more read and write. A waiter reads when
// the store reports a change. If the store cannot do that, the waiter polls at the pace of
// hasp.Options.Backoff, which should be seconds if calls cost money. With more than 6 s, new
// readers may come before a writer that waits for readers. All shared leases of a key are in one
// record, which each renewal rewrites: in a distant store, let 20 callers share a key at most.
//
// One release in a hundred starts a sweep, if the store can list its records. A sweep reads a page
// of 200 records in the background, and makes at most 16 writes at the same time. It removes holds
// that have not changed for their whole term. It also removes the records of keys that were free
// for a minute, or for an hour if a caller has asked for a fence. Close ends it. So at least one
// process should run for several terms.
//
// # How it works
//
// A key has one record of JSON with its holds. Each write has a number, and a hold has the number
// of the write that made or renewed it. A driver takes over a hold if its token and number have not
// changed for a whole term. It starts to count when it has the first reply that shows them. That is
// safe, because the holder began to count before its write. If the holder renews before the
// take-over, the record has another version, so the store refuses the take-over. Before a driver
// reports a loss, it writes a new version, so that the store refuses any late write of the driver.
//
// # Write an adapter
//
// In Consul, Get is GET /v1/kv/NAME?consistent, and the version is ModifyIndex. Put is PUT /v1/txn,
// because only its answer has the new ModifyIndex. It has one operation with the verb cas, and with
// Index 0 for an absent key. Watch is a GET with index=VERSION. In DynamoDB, the version is an
// attribute that each Put sets to a new random value. The conditions are "version = :v", and
// "attribute_not_exists(name)" with the partition key. Get and Scan set ConsistentRead.
//
// Five rules for each adapter:
//
//   - Only the store's answer that the version differs is ErrConflict: no timeout, no other error.
//   - A version never comes again. A counter of the store may begin again when the store has lost
//     its data, and then an old holder can overwrite a new one. Say so in the documentation.
//   - Switch off the retries of a Put and a Delete in the client library.
//   - Set Age only from one clock that no client sets. It may be too small, but never too large.
//   - Run the suite of package conformance over the store, with conformance.TCP as its Link. The
//     suite does not check the first two rules. Its hook Open returns the result of NewDriver, and
//     Cost is {Acquire: 2, Refused: 1}. Leave out Entries, because the record of a free key stays.
package caslock
