// Package redisstore is the common part of the Redis strategies: it finds the servers that a URL
// names, sends commands, scripts and batches, and names keys.
//
// This package never repeats a command that a server may have executed, even if the caller passed a
// client that retries by itself. A second command to take a key would find the key held, by the
// caller's own token. A command that was redirected, or whose script the server does not know, was
// not executed, so it is sent again.
//
// # Connections
//
// A Store that was opened by a URL makes its own connections (package resp), because a read of
// go-redis ends at its deadline, but not when its caller is cancelled. go-redis is used only for a
// client that the caller passed. A pool keeps the connections of its largest burst, so a connection
// is kept small: it takes less than 10 KiB.
//
// A caller that uses a server alone uses a connection of the pool. Several callers together share
// one connection, the wire, which gives 20 to 60 % more throughput. Nothing on the wire is sent
// twice: if a reply is lost, the outcome is unknown. If commands on the wire stay unanswered for
// about 75 ms, the wire takes no more commands. So a connection that dies in silence fails few
// calls: 48 at 500 calls a second. When the wire waited for one to three seconds, 646 calls failed.
// These commands do not use a wire: holds that replicas confirm, commands after an ASK, batches,
// commands of more than 64 KiB, and all commands over a client that the caller passed, because its
// hooks and settings apply to them.
//
// The AutoPipeline of go-redis cannot replace the wire yet. A caller can stop waiting only with its
// asynchronous form, and even then the command is still sent. If a later go-redis reaches 90 % of
// the wire's throughput, it shall replace the wire.
//
// hasp does not trust replies. It allocates memory for the bytes that arrive, and not for the
// announced length. A reply that the script cannot return is no grant. A wire ends if it receives a
// status that its command cannot have, because the next reply could be the OK of another caller.
//
// # Replicas
//
// With replicas=N, WAIT follows each command that takes a hold. WAIT blocks its connection until
// the replicas have the connection's writes. New holds use only one connection to a server for
// this: holds that are requested during a WAIT are sent together after it, with one WAIT for all.
// Renewals use the rest of the pool. When each hold had a connection of its own, 300 callers with a
// replica 5 ms away used the whole pool, and 50 of 50 healthy leases were lost.
//
// # Subscriptions
//
// A Store uses one connection to each server for the subscriptions of all keys (package pubsub). A
// message can only wake a waiter.
//
// # Sentinel and Cluster
//
// hasp finds the servers itself. It asks all sentinels, after each failure and every 10 s, and uses
// the answer with the highest epoch. The failover client of go-redis 9.23 uses the first answer,
// and holds its mutex while it dials. hasp does not subscribe to the sentinels' messages, which
// show a switch sooner only if the old master still takes writes.
//
// On a cluster, the reload of go-redis 9.23 calls one server after another without a deadline. So a
// server that hangs stops the reload, and callers cannot wait for the end of the reload. A WAIT in
// a pipeline of that client may go to another server than the write.
package redisstore
