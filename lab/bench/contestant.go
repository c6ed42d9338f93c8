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
	"github.com/hasplock/hasp/fairlock"
	"github.com/hasplock/hasp/pubsublock"
	"github.com/hasplock/hasp/spinlock"
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
	nodes int  // how many Redis servers it uses; 0 if it uses an etcd, or onPostgres
	waits bool // takes part in contests for a key that is not held
	fair  bool // takes part in contests for a key that is held
	alike bool // is not measured without contention, mostly because it would cost the same as another contestant
	alone bool // takes part in contests in which each waiter has a process
	again bool // takes part in the scenario in which one caller locks one key again and again
	most  int  // the largest number of leases that it is measured with; 0 if it does not renew by itself
	open  opener
}

const (
	all = 1 << 30
	few = 10_000
)

func contestants() []contestant {
	return []contestant{
		{name: "bare", group: bare, nodes: 1, again: true, waits: true, fair: true, open: openBare(false, polling)},
		{name: "bare-batched", group: bare, nodes: 1, open: openBare(true, polling)},
		{name: "bare-floor-spinlock", group: bare, nodes: 1, open: openFloor(spinlock.NewDriver)},
		{name: "bare-floor-pubsublock", group: bare, nodes: 1, open: openFloor(pubsublock.NewDriver)},
		{name: "bare-floor-fairlock", group: bare, nodes: 1, open: openFloor(fairlock.NewDriver)},
		{name: "bare-pipeline", group: bare, nodes: 1, alike: true, most: few, open: openRenewing},
		{name: "bare-linger", group: bare, nodes: 1, again: true, alike: true, open: openKeeper},
		{name: "bare-quorum", group: bare, nodes: 5, open: openQuorum},
		{name: "hasp-spinlock", group: ours, nodes: 1, again: true, waits: true, fair: true, most: all, open: openHasp("spinlock")},
		{name: "hasp-spinlock-client", group: ours, nodes: 1, open: openPassed},
		{name: "hasp-pubsublock", group: ours, nodes: 1, again: true, waits: true, fair: true, most: few, open: openHasp("pubsublock")},
		{name: "hasp-fairlock", group: ours, nodes: 1, again: true, waits: true, fair: true, most: all, open: openHasp("fairlock")},
		{name: "hasp-spinlock-linger", group: ours, nodes: 1, again: true, alike: true, open: openHasp("spinlock", linger)},
		{name: "hasp-pubsublock-linger", group: ours, nodes: 1, again: true, alike: true, open: openHasp("pubsublock", linger)},
		{name: "hasp-fairlock-linger", group: ours, nodes: 1, again: true, alike: true, open: openHasp("fairlock", linger)},
		{name: "hasp-redlock", group: ours, nodes: 5, waits: true, fair: true, most: few, open: openRedlock},
		{name: "hasp-etcdlock", group: ours, waits: true, alone: true, most: few, open: openEtcdlock},
		{name: "hasp-pglock", group: ours, nodes: onPostgres, alike: true, alone: true, open: openPglock},
		{name: "redislock", group: theirs, nodes: 1, waits: true, fair: true, open: openRedislock(false)},
		{name: "redislock-batched", group: theirs, nodes: 1, open: openRedislock(true)},
		{name: "redsync", group: theirs, nodes: 1, waits: true, fair: true, open: openRedsync(1, false)},
		{name: "redsync-5", group: theirs, nodes: 5, waits: true, fair: true, open: openRedsync(5, false)},
		{name: "redsync-5-failfast", group: theirs, nodes: 5, open: openRedsync(5, true)},
		{name: "rueidislock", group: theirs, nodes: 1, waits: true, fair: true, most: all, open: openRueidislock(true)},
		{name: "rueidislock-default", group: theirs, nodes: 1, open: openRueidislock(false)},
		{name: "etcd", group: theirs, waits: true, alone: true, most: few, open: openEtcd},
		{name: "postgres-advisory", group: theirs, nodes: onPostgres, alike: true, alone: true, open: openAdvisory},
		{name: ringName, group: bare, nodes: 1, alike: true, waits: true, fair: true, open: openRing},
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
	return took > term/2 || errors.Is(err, context.DeadlineExceeded) || errors.As(err, &timeout) && timeout.Timeout() ||
		errors.Is(err, rpctypes.ErrTimeout) || strings.Contains(err.Error(), "timeout")
}

// chosen returns the contestants whose names contain a given word, and the ring, to which the tables
// compare. If there are no words, it returns all.
func chosen(all []contestant, words []string) []contestant {
	return slices.DeleteFunc(all, func(c contestant) bool {
		return len(words) > 0 && c.name != ringName && !slices.ContainsFunc(words, func(w string) bool { return strings.Contains(c.name, w) })
	})
}
