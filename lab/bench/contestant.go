package main

import (
	"context"
	"errors"
	"net"
	"slices"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"github.com/hasplock/hasp"
)

// locker is the interface that every contestant is adapted to. The adapters are thin, so that
// nearly all measured costs are costs of the contestant.
type locker interface {
	lock(ctx context.Context, key string) (held, error) // waits for the key
	close()
}

// held is a key that its caller holds.
type held interface {
	Unlock(ctx context.Context) error
}

// perCaller is a locker that callers of the same key must not share. Each of these callers needs a
// locker of its own, which the method caller returns.
type perCaller interface {
	caller(ctx context.Context) (locker, error)
}

// stores contains the addresses of the servers that store the locks.
type stores struct {
	One  string   // URL of a Redis
	Five []string // URLs of five independent masters
	Etcd string   // the address of an etcd

	Postgres string // the URL of a PostgreSQL
}

// The groups of contestants.
const (
	bare   = "bare" // no lock library, as a bound of what a lock library can reach
	ours   = "hasp"
	theirs = "peer"
)

// opener opens a contestant.
type opener func(ctx context.Context, s stores, term time.Duration) (locker, error)

// contestant is one way to lock.
type contestant struct {
	name  string
	group string
	nodes int    // how many Redis servers it uses; 0 if it uses an etcd, or onPostgres
	in    string // the scenarios in which it takes part, and apart
	// the largest number of leases that it is measured with; 0 if it does not renew by itself
	most int
	open opener
}

// apart is for contestants that take part in contests in which each waiter has a process.
const apart = "apart"

// takes reports whether a contestant takes part in a scenario.
func (c contestant) takes(scenario string) bool {
	return slices.Contains(strings.Fields(c.in), scenario)
}

const (
	all = 1 << 30
	few = 10_000
)

func contestants() []contestant {
	return []contestant{
		{name: "bare", group: bare, nodes: 1, in: "uncontended contended fair again",
			open: openBare(false, polling)},
		{name: "bare-batched", group: bare, nodes: 1, in: "uncontended",
			open: openBare(true, polling)},
		{name: "bare-quorum", group: bare, nodes: 5, in: "uncontended", open: openQuorum},
		{name: "hasp-spinlock", group: ours, nodes: 1, most: all,
			in: "uncontended contended fair again lockall apart", open: openHasp("spinlock")},
		{name: "hasp-spinlock-client", group: ours, nodes: 1, in: "uncontended lockall",
			open: openPassed},
		{name: "hasp-pubsublock", group: ours, nodes: 1, most: few,
			in: "uncontended contended fair again lockall", open: openHasp("pubsublock")},
		{name: "hasp-fairlock", group: ours, nodes: 1, most: all,
			in: "uncontended contended fair again lockall", open: openHasp("fairlock")},
		{name: "hasp-spinlock-linger", group: ours, nodes: 1, in: "again",
			open: openHasp("spinlock", linger)},
		{name: "hasp-pubsublock-linger", group: ours, nodes: 1, in: "again",
			open: openHasp("pubsublock", linger)},
		{name: "hasp-fairlock-linger", group: ours, nodes: 1, in: "again",
			open: openHasp("fairlock", linger)},
		{name: "hasp-redlock", group: ours, nodes: 5, most: few,
			in: "uncontended contended fair lockall", open: openRedlock},
		{name: "hasp-etcdlock", group: ours, most: few, in: "uncontended contended apart",
			open: openEtcdlock},
		{name: "hasp-pglock", group: ours, nodes: onPostgres, in: "uncontended apart",
			open: openPglock},
		{name: "redislock", group: theirs, nodes: 1, in: "uncontended contended fair",
			open: openRedislock(false)},
		{name: "redislock-batched", group: theirs, nodes: 1, in: "uncontended",
			open: openRedislock(true)},
		{name: "redsync", group: theirs, nodes: 1, in: "uncontended contended fair",
			open: openRedsync(1, false)},
		{name: "redsync-5", group: theirs, nodes: 5, in: "uncontended contended fair",
			open: openRedsync(5, false)},
		{name: "redsync-5-failfast", group: theirs, nodes: 5, in: "uncontended",
			open: openRedsync(5, true)},
		{name: "rueidislock", group: theirs, nodes: 1, most: all,
			in: "uncontended contended fair apart", open: openRueidislock(true)},
		{name: "rueidislock-default", group: theirs, nodes: 1, in: "uncontended",
			open: openRueidislock(false)},
		{name: "etcd", group: theirs, most: few, in: "uncontended contended apart", open: openEtcd},
		{name: "postgres-advisory", group: theirs, nodes: onPostgres,
			in: "uncontended apart", open: openAdvisory},
		{name: ringName, group: bare, nodes: 1, in: "contended fair", open: openRing},
	}
}

// linger is the option with which a Client keeps an unlocked key for its next caller.
var linger = hasp.WithLinger()

// term is the term of all leases, except in the scenario of many leases.
const term = 30 * time.Second

// patience is the time limit of steps that end by themselves unless the machine hangs.
const patience = 3 * time.Minute

// excused reports whether a slow machine may be the reason of an error. It may be the reason of a
// timeout, and of any error that came after half of the term.
func excused(err error, took, term time.Duration) bool {
	var timeout net.Error
	timedOut := errors.As(err, &timeout) && timeout.Timeout()
	return took > term/2 || timedOut || errors.Is(err, context.DeadlineExceeded) ||
		errors.Is(err, rpctypes.ErrTimeout) || strings.Contains(err.Error(), "timeout")
}

// chosen returns the contestants whose names contain a given word, and the ring, to which the tables
// compare. If there are no words, it returns all.
func chosen(all []contestant, words []string) []contestant {
	return slices.DeleteFunc(all, func(c contestant) bool {
		return len(words) > 0 && c.name != ringName &&
			!slices.ContainsFunc(words, func(w string) bool { return strings.Contains(c.name, w) })
	})
}
