package main

import (
	"context"
	"errors"
	"net"
	"slices"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
)

// locker is what every contestant is made to look like. It is as thin as it
// can be: what a contestant costs is its own.
type locker interface {
	lock(ctx context.Context, key string) (held, error) // waits
	close()
}

// held is a key that its caller has.
type held interface {
	Unlock(ctx context.Context) error
}

// perCaller is a locker of which every caller who wants the same key needs
// one of its own.
type perCaller interface {
	caller(ctx context.Context) (locker, error)
}

// stores is where the locks are kept.
type stores struct {
	One  string   // URL of a Redis
	Five []string // URLs of five masters that know nothing of each other
	Etcd string   // where etcd serves its clients
}

// The groups of contestants.
const (
	limit  = "bare" // no library of locks: what one can hope for
	ours   = "hasp"
	theirs = "peer"
)

// contestant is one way to lock.
type contestant struct {
	name   string
	group  string
	module string // whose version counts
	set    string // what was set, beside the term
	nodes  int    // how many Redis it takes; 0 is an etcd
	waits  bool   // for a key that is held
	renews bool   // by itself
	alike  bool   // to the one before, without contention
	asked  bool   // takes part only where --only names it
	most   int    // leases that it is asked to hold at a time
	open   func(ctx context.Context, s stores, term time.Duration) (locker, error)
}

const (
	goRedis     = "github.com/redis/go-redis/v9"
	haspModule  = "github.com/hasplock/hasp"
	redislockAt = "github.com/bsm/redislock"
	redsyncAt   = "github.com/go-redsync/redsync/v4"
	rueidisAt   = "github.com/redis/rueidis"
	etcdAt      = "go.etcd.io/etcd/client/v3"
)

const (
	all = 1 << 30
	few = 10_000
)

func contestants() []contestant {
	const own = "its own delays between attempts, 50 to 250 ms, and no end of attempts"
	return []contestant{
		{name: "bare", group: limit, module: goRedis, set: "SET NX PX, and a script that compares and deletes", nodes: 1, open: openBare},
		{name: "bare-batched", group: limit, module: goRedis, set: "the same two through AutoPipeline", nodes: 1, open: openBatched},
		{name: "bare-quorum", group: limit, module: goRedis, set: "the same two on five nodes at once, done at three, laggards cleaned up", nodes: 5, open: openQuorum},
		{name: "hasp-spinlock", group: ours, module: haspModule, set: "by URL", nodes: 1, waits: true, renews: true, most: all, open: openHasp("spinlock", "")},
		{name: "hasp-pubsublock", group: ours, module: haspModule, set: "by URL", nodes: 1, waits: true, renews: true, most: few, open: openHasp("pubsublock", "")},
		{name: "hasp-fairlock", group: ours, module: haspModule, set: "by URL", nodes: 1, waits: true, renews: true, most: all, open: openHasp("fairlock", "")},
		{name: "hasp-fairlock-turns", group: ours, module: haspModule, set: "by URL, turns=32", nodes: 1, waits: true, alike: true, asked: true, open: openHasp("fairlock", "?turns=32")},
		{name: "hasp-redlock", group: ours, module: haspModule, set: "by URL", nodes: 5, waits: true, renews: true, most: few, open: openRedlock},
		{name: "redislock", group: theirs, module: redislockAt, set: "LinearBackoff(100 ms), as in its README", nodes: 1, waits: true, open: openRedislock(seldom)},
		{name: "redislock-eager", group: theirs, module: redislockAt, set: "attempts by hasp spinlock's backoff, 100 µs to 100 ms", nodes: 1, waits: true, alike: true, open: openRedislock(often)},
		{name: "redsync", group: theirs, module: redsyncAt, set: own, nodes: 1, waits: true, open: openRedsync(1, false)},
		{name: "redsync-5", group: theirs, module: redsyncAt, set: own, nodes: 5, waits: true, open: openRedsync(5, false)},
		{name: "redsync-5-failfast", group: theirs, module: redsyncAt, set: "WithFailFast, " + own, nodes: 5, waits: true, open: openRedsync(5, true)},
		{name: "rueidislock", group: theirs, module: rueidisAt, set: "NoLoopTracking, KeyMajority 1, TryNextAfter 10s, renewal at a third of the term", nodes: 1, waits: true, renews: true, most: all, open: openRueidislock(true)},
		{name: "rueidislock-default", group: theirs, module: rueidisAt, set: "as it comes: three keys a lock, TryNextAfter 20ms, renewal at half of the term", nodes: 1, waits: true, renews: true, most: 1000, open: openRueidislock(false)},
		{name: "etcd", group: theirs, module: etcdAt, set: "concurrency.Mutex, one session a process and, for one key, one a caller; one member without fsync", waits: true, renews: true, most: few, open: openEtcd},
	}
}

// term is how long every lease lasts that nobody renews, but in the scenario
// of many leases.
const term = 30 * time.Second

// patience is for what ends by itself on any machine but one that hangs.
const patience = 3 * time.Minute

// excused reports whether an error says no more than that the machine was
// slow, which is no failure of this program: a time-out, or whatever a library
// says when half of the term went by.
func excused(err error, took, term time.Duration) bool {
	var timeout net.Error
	return took > term/2 || errors.Is(err, context.DeadlineExceeded) || errors.As(err, &timeout) && timeout.Timeout() ||
		errors.Is(err, rpctypes.ErrTimeout) || strings.Contains(err.Error(), "timeout")
}

// chosen returns those whose names contain one of the words, or all but those
// that want to be named.
func chosen(all []contestant, words []string) []contestant {
	return slices.DeleteFunc(all, func(c contestant) bool {
		if len(words) == 0 {
			return c.asked
		}
		return !matches(c.name, words)
	})
}

func matches(name string, words []string) bool {
	return slices.ContainsFunc(words, func(w string) bool { return strings.Contains(name, w) })
}
