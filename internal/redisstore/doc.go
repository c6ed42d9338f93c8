// Package redisstore is the common part of the Redis strategies: it finds the servers that a URL
// names, sends commands, scripts and batches, and names keys.
//
// All commands go through a client of go-redis. Either the caller of hasp passed it, or Open made
// it for a URL. Both ways share all code but the dialer, wires, WAIT and the search for servers.
//
// # Sent once
//
// This package never repeats a command that a server may have executed, even if the client retries
// by itself (see resp.Command). If a command that takes a key were sent twice, the second one could
// find the key held by the caller itself. A command that a server certainly did not execute is sent
// again: the server redirected it, did not know its script, or was a replica behind the address of
// the master; no connection could be made while another one works; or another server became the
// master while the connection was made.
//
// # Gather and flights
//
// A gather sends the commands of concurrent callers to one Redis process in pipelines. A goroutine,
// the flight, sends all commands that wait, receives their replies, and repeats this. A second
// flight starts at once if at least 16 calls wait, and as many as the first one carries. Otherwise
// it starts after 1 ms without a reply, and further ones after 4, 16, 64 and 256 ms. So a distant
// server is used well, and a connection that dies without an error delays few callers.
//
// The caller waits on a channel, and leaves when its context ends. A read of go-redis does not end
// when its context is cancelled. One timer for each gather ends the calls whose deadline has
// passed. AutoPipeline of go-redis 9.23 cannot replace gather: a caller of its blocking form cannot
// leave, and its asynchronous form has no channel to wait on.
//
// Commands of more than 64 KiB, commands after an ASK, and renewals that replicas must confirm have
// pipelines of their own.
//
// # Wires
//
// With a URL of one server or of sentinels, each flight has a wire, a client with one connection,
// except those of holds that replicas must confirm. So hasp knows which connection a call uses,
// whether the command was written, and which run of the server replied. A lone caller sends its
// command on its own goroutine, which saves two wake-ups of a goroutine. Without this, a lone
// caller whose server is on the same machine would have 0.6 times the rate of a bare client instead
// of 0.9. The end of its context interrupts the connection. The clients of a cluster, and a client
// that the caller passed, choose connections themselves, so they have no wires.
//
// If a reply on a wire is late, connections that were not used since are in doubt, and are replaced
// before their next use. A firewall may have forgotten all of them, and each would cost a call.
//
// # Replicas
//
// With replicas=N, WAIT follows the commands that take a hold, in the same pipeline, because it
// covers only writes of its own connection. WAIT blocks its connection. Therefore all new holds at
// a server share one flight, and renewals do not use it. On a cluster, such a pipeline goes to the
// client of one node, because the client of the cluster may send the WAIT to another node.
//
// # What go-redis does not replace
//
// These reasons were tried with go-redis 9.23.
//
//   - The search of sentinels: FailoverClient uses the first answer, keeps the connection to a
//     master that was replaced without a failing call, and ends the program if a sentinel's answer
//     has one element. hasp uses the answer with the highest epoch, and asks again for each new
//     connection, after a failed call and every 10 s. In an outage, callers share searches that are
//     100 ms apart.
//   - The function ClusterSlots: the search of go-redis asks one node after another, so a node that
//     hangs stops it, and its errors name no node. hasp asks another node after 200 ms. An address
//     may go to a server of another cluster. Therefore each new connection asks for the server's
//     ID, and a map of slots is used only if it has a server of the last map.
//   - Subscriptions, in package pubsub: PubSub subscribes to all channels again in one command, so
//     that one refused channel refuses all, and the refusal names none. Its Ping does not wait for
//     the answer, so a silent connection stays. It follows neither a slot nor a new master. A
//     message never grants a key. It can only wake a waiter.
//
// # Traps of go-redis
//
//   - An error of a dial becomes a connection whose first write fails. Otherwise go-redis would log
//     the error, and after some errors dial only once a second. It also unwraps such an error once.
//   - Process on a cluster sends COMMAND, before each call if the user has no right to it. So a
//     cluster gets pipelines only.
//   - A cluster's client removes the host from a loopback address that ClusterSlots returns, so
//     search marks it.
package redisstore
