package redisstore

import (
	"context"
	"fmt"
	"strconv"
	"time"
)

// Finding is a property of a server that matters to its locks.
type Finding struct {
	Level string // OK, Warn, or Bad: a lock may have two holders although nothing fails
	What  string // the property, and the server
	Text  string // its state, what that may cost, and what to set
}

// Levels of a [Finding].
const (
	OK   = "ok"
	Warn = "warn"
	Bad  = "bad"
)

// Examine returns what it finds at each server that a URL names: the master that sentinels name, or
// all masters of a cluster. It accepts servers that Open refuses. If the user may not run CONFIG GET
// or TIME, Examine leaves out what they would tell. Unless alone is set, other nodes vote on each
// lock, so the loss of the server's data costs none.
func Examine(ctx context.Context, node string, params map[string]string, alone bool) ([]Finding, error) {
	s, _, err := prepare(node, params, 0, false)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	servers, err := s.servers.all(ctx)
	if err != nil {
		return nil, s.fail(err)
	}

	var all []Finding
	a, _ := parse(node) // without an error, as in prepare
	_ = a.setParams(params)
	for _, at := range servers {
		began := time.Now()
		replies := at.Pipeline(ctx, []string{"info"}, []string{"cluster", "info"},
			[]string{"config", "get", "appendfsync"}, []string{"config", "get", "min-replicas-to-write"})
		if err := replies[0].Err; err != nil {
			return all, s.named(at.name, diagnose(err, lockHints(a), time.Since(began)))
		}
		sent := time.Now() // the connection is open now, so this call is a round trip
		clock := at.Pipeline(ctx, []string{"time"})[0].Value
		offset, known := ahead(clock, sent, time.Now())

		info, replicas := replies[0].Value, s.replicas
		fsync, least := setting(replies[2].Value), setting(replies[3].Value)
		slaves, _ := strconv.Atoi(InfoField(info, "connected_slaves"))
		found := func(level, what, format string, args ...any) {
			all = append(all, Finding{level, what + " of " + at.name, fmt.Sprintf(format, args...)})
		}

		version := InfoField(info, "valkey_version")
		if version == "" {
			version = InfoField(info, "redis_version")
		}
		found(OK, "version", "%s, %s", version, InfoField(info, "redis_mode"))
		switch reason := unfit(info, info, replies[1].Value, false); {
		case reason == nil:
			found(OK, "role and memory", "a master that evicts no key")
		case unfit(info, info, replies[1].Value, a.mayEvict) == nil:
			found(Warn, "memory", "%v", reason)
		default:
			found(Bad, "role or memory", "%v", reason)
		}
		switch {
		case !alone:
		case InfoField(info, "aof_enabled") != "1":
			found(Warn, "persistence", "no append-only file: after a restart all keys are free, and old holders work on until their next renewal. Set appendonly yes and appendfsync always, or use redlock")
		case fsync != "" && fsync != "always":
			found(Warn, "persistence", "appendfsync %s: a crash of the host may free the keys of the last second or more, while their holders work. Set appendfsync always", fsync)
		default:
			found(OK, "persistence", "an append-only file, appendfsync %s", fsync)
		}
		switch {
		case !alone:
		case slaves == 0:
			found(OK, "replication", "no replicas: there is no failover that could lose a lock, and without the server there are no locks")
		case replicas == 0:
			found(Warn, "replication", "%d replicas, which no lock waits for: a failover may give a key to a second holder. Set replicas=%d in the URL, or use fences or redlock", slaves, slaves)
		default:
			found(OK, "replication", "%d replicas, of which %d must confirm each lock", slaves, replicas)
		}
		if alone && slaves > 0 && least == "0" {
			found(Warn, "min-replicas", "min-replicas-to-write is 0: a master that is cut off from its replicas still grants locks, beside the new master. Set min-replicas-to-write 1")
		}
		switch off := offset.Abs(); {
		case !known:
		case off > time.Second:
			found(Warn, "clock", "%v from this host's: if the server's clock is set forward, terms end early by as much. Let NTP slew the clocks, not step them", offset.Round(time.Millisecond))
		default:
			found(OK, "clock", "%v from this host's", offset.Round(time.Millisecond))
		}
	}
	return all, nil
}

// setting returns the value in a reply to CONFIG GET, or "" if there is none.
func setting(reply any) string {
	pair, _ := reply.([]any)
	if len(pair) != 2 {
		return ""
	}
	value, _ := pair[1].(string)
	return value
}

// ahead returns how far the clock of a server is ahead of ours. It has replied to TIME between sent
// and got; a difference within that time counts as none.
func ahead(reply any, sent, got time.Time) (d time.Duration, ok bool) {
	parts, _ := reply.([]any)
	if len(parts) != 2 {
		return 0, false
	}
	seconds, err1 := strconv.ParseInt(fmt.Sprint(parts[0]), 10, 64)
	micros, err2 := strconv.ParseInt(fmt.Sprint(parts[1]), 10, 64)
	switch at := time.Unix(seconds, micros*1000); {
	case err1 != nil || err2 != nil:
		return 0, false
	case at.Before(sent):
		return at.Sub(sent), true
	case at.After(got):
		return at.Sub(got), true
	}
	return 0, true
}
