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

// unlock is a held key, as the function that unlocks it.
type unlock func(context.Context) error

func (u unlock) Unlock(ctx context.Context) error { return u(ctx) }

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

// opener opens a contestant.
type opener func(ctx context.Context, s stores, term time.Duration) (locker, error)

// contestant is one way to lock. The names of those that are no other lock library begin with "hasp"
// or with "bare".
type contestant struct {
	name  string
	nodes int // how many Redis servers it uses; 0 if it uses an etcd, or onPostgres
	// the largest number of leases that it is measured with; 0 if it does not renew by itself
	most int
	in   string // the scenarios in which it takes part, besides leases
	open opener
}

// peer reports whether the contestant is another lock library.
func (c contestant) peer() bool {
	return !strings.HasPrefix(c.name, "hasp") && !strings.HasPrefix(c.name, "bare")
}

// takes reports whether a contestant takes part in a setting of a scenario.
func (c contestant) takes(scenario string, s setting) bool {
	switch s := s.(type) {
	case contest:
		if s.nodes != 0 && s.nodes != c.nodes {
			return false
		}
	case crowd:
		return c.most > 0 && s.leases <= c.most && s.five == (c.nodes == 5)
	}
	return slices.Contains(strings.Fields(c.in), scenario)
}

const (
	all = 1 << 30
	few = 10_000
)

// The columns are name, nodes, most, in and open.
func contestants() []contestant {
	return []contestant{
		{"bare", 1, 0, "uncontended contended fair again", openBare(false, polling)},
		{"bare-batched", 1, 0, "uncontended", openBare(true, polling)},
		{"bare-quorum", 5, 0, "uncontended", openQuorum},
		{"hasp-spinlock", 1, all, "uncontended contended fair again lockall apart",
			openHasp("spinlock")},
		{"hasp-spinlock-client", 1, 0, "uncontended lockall", openPassed},
		{"hasp-pubsublock", 1, few, "uncontended contended fair again lockall",
			openHasp("pubsublock")},
		{"hasp-fairlock", 1, all, "uncontended contended fair again lockall", openHasp("fairlock")},
		{"hasp-spinlock-linger", 1, 0, "again", openHasp("spinlock", linger)},
		{"hasp-pubsublock-linger", 1, 0, "again", openHasp("pubsublock", linger)},
		{"hasp-fairlock-linger", 1, 0, "again", openHasp("fairlock", linger)},
		{"hasp-redlock", 5, few, "uncontended contended fair lockall", openHasp("redlock")},
		{"hasp-etcdlock", 0, few, "uncontended contended apart", openHasp("etcdlock")},
		{"hasp-pglock", onPostgres, 0, "uncontended apart", openHasp("pglock")},
		{"redislock", 1, 0, "uncontended contended fair", openRedislock(false)},
		{"redislock-batched", 1, 0, "uncontended", openRedislock(true)},
		{"redsync", 1, 0, "uncontended contended fair", openRedsync(1, false)},
		{"redsync-5", 5, 0, "uncontended contended fair", openRedsync(5, false)},
		{"redsync-5-failfast", 5, 0, "uncontended", openRedsync(5, true)},
		{"rueidislock", 1, all, "uncontended contended fair apart", openRueidislock(true)},
		{"rueidislock-default", 1, 0, "uncontended", openRueidislock(false)},
		{"etcd", 0, few, "uncontended contended apart", openEtcd},
		{"postgres-advisory", onPostgres, 0, "uncontended apart", openAdvisory},
		{ringName, 1, 0, "contended fair", openRing},
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
