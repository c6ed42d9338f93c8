// Package redisstore is the common part of the Redis strategies: it finds the servers that a URL
// names, sends commands, scripts and batches, and names keys.
//
// This package never repeats a command that a server may have executed, even if the caller passed a
// client that retries by itself. If a command that takes a key were sent twice, the second one
// could find the key held by the caller itself. A command that was redirected, or whose script the
// server does not know, was not executed, so it is sent again.
//
// # Connections
//
// A Store that was opened by a URL makes its own connections (package resp), because a read of
// go-redis ends at the deadline of its context, but not when that context is cancelled. go-redis is
// used only for a client that the caller passed. A pool keeps the connections of its largest burst,
// so hasp limits the memory of each connection to less than 10 KiB.
//
// The only caller of a server uses a connection of the pool. Concurrent callers share one
// connection, the wire, which gives 20 to 60 % more throughput. If a reply on the wire is lost, the
// outcome is unknown, because no command is sent twice. If commands on the wire stay unanswered for
// about 75 ms, the wire takes no more commands. Therefore few calls fail if a connection dies
// without an error. At 500 calls a second, 48 calls failed. When the wire waited for one to three
// seconds instead, 646 calls failed. Holds that replicas must confirm, commands after an ASK, the
// pipelines of RunEach, and commands of more than 64 KiB do not use a wire. A client that the
// caller passed has no wire, because its hooks and settings apply to all commands.
//
// The AutoPipeline of go-redis cannot replace the wire yet. Only its asynchronous form lets a
// caller stop waiting, and even then the command is still sent. If the AutoPipeline of a later
// go-redis reaches 90 % of the wire's throughput, it shall replace the wire.
//
// hasp does not trust replies. It allocates memory for the bytes that arrive, and not for the
// announced length. A reply that the script cannot return grants nothing. A wire ends if a status
// cannot be the reply to its command, because the next reply could be the OK for another caller.
//
// # Replicas
//
// With replicas=N, WAIT follows each command that takes a hold. WAIT blocks its connection until
// the replicas have received the connection's writes. Therefore all new holds at a server use one
// connection. Holds that are requested during a WAIT are sent together after that WAIT, with one
// WAIT for all. Renewals use the rest of the pool. When each hold had its own connection, 300
// callers with a replica 5 ms away used the whole pool, and 50 of 50 healthy leases were lost.
//
// # Subscriptions
//
// A Store uses one connection to each server for the subscriptions of all keys (package pubsub). A
// message never grants a key. It can only wake a waiter.
//
// # Sentinel and Cluster
//
// hasp finds the servers itself. It asks all sentinels, after each failure and every 10 s, and uses
// the answer with the highest epoch. The failover client of go-redis 9.23 uses the first answer,
// and holds its mutex while it dials. hasp does not subscribe to the sentinels' messages. These
// would show a new master sooner than the searches only if the old master still accepts writes.
//
// On a cluster, the reload of go-redis 9.23 would call one server after another without a deadline.
// Therefore a single server that hangs would stop the reload, and callers could not wait for the
// end of the reload. A WAIT in a pipeline of that client may go to another server than the write.
package redisstore
