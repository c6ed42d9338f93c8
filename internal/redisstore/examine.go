package redisstore

import (
	"cmp"
	"context"
	"fmt"
	"strconv"
	"time"
)

// These are the levels that Examine passes to the function found.
const (
	OK   = "ok"
	Warn = "warn" // a fault of the store may cost a lock
	Bad  = "bad"  // a key may have two holders even if nothing fails; Open refuses the server
)

// Examine examines the server of a URL, the master that the sentinels name, or each master of the
// cluster. It calls found for each property. The argument text says the state, the risk, and what
// to set. Examine accepts servers that Open refuses, and skips what the user has no right to read.
// The argument alone is false if several nodes vote on each lock, so that one may lose its data.
func Examine(ctx context.Context, node string, params map[string]string, alone bool, found func(level, what, text string)) error {
	s, _, err := prepare(node, params, 0, false)
	if err != nil {
		return err
	}
	defer s.Close()
	servers, err := s.servers.all(ctx)
	if err != nil {
		return s.fail(err)
	}
	a, _ := parse(node) // without an error, because prepare has parsed node
	_ = a.setParams(params)
	for _, at := range servers {
		began := time.Now()
		replies := at.ask(ctx, true, false, []string{"info"}, []string{"cluster", "info"},
			[]string{"config", "get", "appendfsync"}, []string{"config", "get", "min-replicas-to-write"})
		if err := replies[0].Err; err != nil {
			return s.prefix(at.label(), diagnose(err, lockHints(a), time.Since(began)))
		}
		sent := time.Now() // the connection is open now, so this call measures one round trip
		clock := at.ask(ctx, true, false, []string{"time"})[0].Value
		offset, known := ahead(clock, sent, time.Now())

		info, cluster := replies[0].Value, replies[1].Value
		fsync, least := setting(replies[2].Value), setting(replies[3].Value)
		slaves := cmp.Or(InfoField(info, "connected_slaves"), "0")
		say := func(level, what, format string, args ...any) {
			found(level, what+" of "+at.label(), fmt.Sprintf(format, args...))
		}
		say(OK, "version", "%s, %s", cmp.Or(InfoField(info, "valkey_version"), InfoField(info, "redis_version")), InfoField(info, "redis_mode"))
		switch reason := unfit(info, info, cluster, false); {
		case reason == nil:
			say(OK, "role and memory", "a master that evicts no key")
		case unfit(info, info, cluster, a.mayEvict) == nil:
			say(Warn, "memory", "%v", reason)
		default:
			say(Bad, "role or memory", "%v", reason)
		}
		switch {
		case !alone:
		case InfoField(info, "aof_enabled") != "1":
			say(Warn, "persistence", "no append-only file: after a restart all keys are free, and old holders work on until their next renewal. Set appendonly yes and appendfsync always, or use redlock")
		case fsync != "" && fsync != "always":
			say(Warn, "persistence", "appendfsync %s: a crash of the host may free the keys of the last second or more, while their holders work. Set appendfsync always", fsync)
		default:
			say(OK, "persistence", "an append-only file, appendfsync %s", cmp.Or(fsync, "unknown"))
		}
		switch {
		case !alone && slaves != "0":
			say(Warn, "replication", "%s replicas: if one takes over, it may lack locks, and a key may get a second holder. Let none take over the address of a node", slaves)
		case !alone:
		case slaves == "0":
			say(OK, "replication", "no replicas: there is no failover that could lose a lock, and without the server there are no locks")
		case s.replicas == 0:
			say(Warn, "replication", "a lock waits for none of the replicas, which are %[1]s: a failover may give a key to a second holder. Set replicas=%[1]s in the URL, or use fences or redlock", slaves)
		default:
			say(OK, "replication", "of %s replicas, %d must confirm each lock", slaves, s.replicas)
		}
		if alone && slaves != "0" && least == "0" {
			say(Warn, "min-replicas", "min-replicas-to-write is 0: a master that is cut off from its replicas still grants locks, beside the new master. Set min-replicas-to-write 1")
		}
		switch shown := offset.Round(time.Millisecond); {
		case !known:
		case offset.Abs() > time.Second:
			say(Warn, "clock", "%v from this host's: if the server's clock is set forward, terms end early by as much. Let NTP slew the clocks, not step them", shown)
		default:
			say(OK, "clock", "%v from this host's", shown)
		}
	}
	return nil
}

// setting returns the value in a reply to CONFIG GET, or "" if there is none.
func setting(reply any) string {
	if pair, _ := reply.([]any); len(pair) == 2 {
		return fmt.Sprint(pair[1])
	}
	return ""
}

// ahead returns by how much a server's clock is ahead of our clock. The server read its clock
// between our times sent and got. If the reply lies between these two times, the result is 0.
func ahead(reply any, sent, got time.Time) (d time.Duration, ok bool) {
	parts, _ := reply.([]any)
	if len(parts) != 2 {
		return 0, false
	}
	seconds, err := strconv.ParseFloat(fmt.Sprintf("%s.%06s", parts...), 64)
	at := time.UnixMicro(int64(seconds * 1e6))
	return max(at.Sub(got), 0) + min(at.Sub(sent), 0), err == nil
}
