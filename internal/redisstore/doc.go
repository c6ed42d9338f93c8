// Package redisstore has the parts that the Redis strategies share: servers that a
// URL names, commands, scripts, batches, and the names of keys.
//
// This package never repeats a command that a server may have executed, even if the
// caller passed a client that retries by itself. If a command was executed and then
// sent again, the second reply would be "held", by the caller's own token. A command
// that was redirected, or refused because the server does not know its script, was not
// executed, so it is sent again.
//
// # Connections
//
// A Store that was opened by a URL makes its own connections (package resp). go-redis serves the
// clients that callers pass. go-redis obeys only deadlines during a read, and hasp must end a
// call when its caller is cancelled. Connections are small, because a pool keeps those of its
// largest burst: each takes less than 10 KiB.
//
// A caller that uses a server alone uses a connection of the pool. Several callers share one, the
// wire, which brings 20 to 60 % more throughput. Nothing on it is sent twice: a lost reply is an
// unknown outcome. If commands on it stay unanswered, the wire takes no more of them, so a
// connection that dies in silence fails only the calls of about 75 ms. At 500 calls a second
// these were 48, and 646 with an earlier limit of one to three seconds. These commands do not use
// a wire: holds that replicas confirm, commands after an ASK, batches, commands of more than 64
// KiB, and all commands of a client that the caller passed, whose hooks and settings are the
// caller's.
//
// The AutoPipeline of go-redis would not do: only its asynchronous form lets a caller leave, and
// the command is still sent. If a later go-redis reaches 90 % of the wire's throughput, it
// replaces the wire.
//
// Replies are not trusted. hasp allocates for what arrives, and not for what a reply announces. A
// grant counts only if the script can give that reply. If a wire gets a status that no command
// asked for, it ends, because the next reply could be the OK of another caller.
//
// # Replicas
//
// With replicas=N each hold is followed by WAIT, which blocks its connection until the replicas
// have what that connection wrote. One connection to a server waits in this way for new holds.
// Holds that come meanwhile travel together after it, with one WAIT for all. Renewals use the rest
// of the pool. When each hold had a connection of its own, 300 callers with a replica 5 ms away
// took the whole pool, and 50 of 50 healthy leases were lost.
//
// # Subscriptions
//
// One connection to each server has the subscriptions of all keys of a Store (package pubsub). A
// message can wake a waiter and do nothing else.
//
// # Sentinel and Cluster
//
// hasp finds the servers itself. It asks all sentinels, after each failure and every 10 s, and the
// highest epoch wins. The failover client of go-redis 9.23 believes the first sentinel that
// answers, and holds its mutex while it dials. hasp does not subscribe to the sentinels' messages:
// they would show a switch sooner only if the old master still takes writes.
//
// On a cluster, the reload of go-redis 9.23 calls one server after another without a deadline, so
// a server that hangs stops it. A caller cannot wait for its end, and a WAIT through its pipeline
// may go to another server than the write.
package redisstore
