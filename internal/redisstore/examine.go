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
func Examine(ctx context.Context, node string, params map[string]string, alone bool,
	found func(level, what, text string)) error {
	s, _, err := prepare(node, params, 0, false)
	if err != nil {
		return err
	}
	defer s.Close()
	servers, err := s.all(ctx)
	if err != nil {
		return s.fail(err)
	}
	for _, at := range servers {
		e := &examiner{at: at, alone: alone, found: found}
		if err := e.run(ctx); err != nil {
			return err
		}
	}
	return nil
}

// examiner examines one server.
type examiner struct {
	at    *server
	alone bool // no other server votes on a lock, so what this one loses is lost
	found func(level, what, text string)

	info     any    // the reply to INFO
	replicas string // how many there are
}

// say passes a text about the server to the function found.
func (e *examiner) say(level, what, format string, args ...any) {
	e.found(level, what+" of "+e.at.label(), fmt.Sprintf(format, args...))
}

// run asks the server for its settings, and reports on them. It returns an error only if the server
// does not answer INFO. If another reply is an error, its value is nil, and run reports only what
// it knows.
func (e *examiner) run(ctx context.Context) error {
	began := time.Now()
	replies := e.at.ask(ctx, true, false,
		[]string{"info"},
		[]string{"cluster", "info"},
		[]string{"config", "get", "appendfsync"},
		[]string{"config", "get", "min-replicas-to-write"})
	if err := replies[0].Err; err != nil {
		return e.at.prefix(e.at.label(), diagnose(err, e.at.hints, time.Since(began)))
	}
	e.info = replies[0].Value
	e.replicas = cmp.Or(InfoField(e.info, "connected_slaves"), "0")

	sent := time.Now() // the connection is open now, so this call measures one round trip
	clock := e.at.ask(ctx, true, false, []string{"time"})[0].Value
	offset, known := ahead(clock, sent, time.Now())

	number := cmp.Or(InfoField(e.info, "valkey_version"), InfoField(e.info, "redis_version"))
	e.say(OK, "version", "%s, %s", number, InfoField(e.info, "redis_mode"))
	e.fitness(replies[1].Value)
	if e.alone {
		e.persistence(setting(replies[2].Value))
	}
	e.replication(setting(replies[3].Value))
	if known {
		e.clock(offset)
	}
	return nil
}

// fitness reports whether the server may store locks. The argument cluster is the reply to CLUSTER
// INFO.
func (e *examiner) fitness(cluster any) {
	reason := unfit(e.info, cluster, false)
	switch {
	case reason == nil:
		e.say(OK, "role and memory", "a master that evicts no key")
	case unfit(e.info, cluster, e.at.mayEvict) == nil: // it evicts keys, and the URL allows that
		e.say(Warn, "memory", "%v", reason)
	default:
		e.say(Bad, "role or memory", "%v", reason)
	}
}

// persistence reports what a restart costs. The argument fsync is the setting appendfsync, or "".
func (e *examiner) persistence(fsync string) {
	switch {
	case InfoField(e.info, "aof_enabled") != "1":
		e.say(Warn, "persistence", "no append-only file: after a restart all keys are free, and "+
			"old holders work on until their next renewal. Set appendonly yes and "+
			"appendfsync always, or use redlock")
	case fsync != "" && fsync != "always":
		e.say(Warn, "persistence", "appendfsync %s: a crash of the host may free the keys of the "+
			"last second or more, while their holders work. Set appendfsync always", fsync)
	default:
		e.say(OK, "persistence", "an append-only file, appendfsync %s", cmp.Or(fsync, "unknown"))
	}
}

// replication reports what a failover costs. The argument minReplicas is the setting
// min-replicas-to-write, or "".
func (e *examiner) replication(minReplicas string) {
	if !e.alone { // no replica may replace a node that votes
		if e.replicas != "0" {
			e.say(Warn, "replication", "%s replicas: if one takes over, it may lack locks, and a "+
				"key may get a second holder. Let none take over the address of a node", e.replicas)
		}
		return
	}
	if e.replicas == "0" {
		e.say(OK, "replication", "no replicas: there is no failover that could lose a lock, and "+
			"without the server there are no locks")
		return
	}

	if confirm := e.at.settings.replicas; confirm == 0 {
		e.say(Warn, "replication", "a lock waits for none of the replicas, which are %[1]s: a "+
			"failover may give a key to a second holder. Set replicas=%[1]s in the URL, or "+
			"use fences or redlock", e.replicas)
	} else {
		e.say(OK, "replication", "of %s replicas, %d must confirm each lock", e.replicas, confirm)
	}
	if minReplicas == "0" {
		e.say(Warn, "min-replicas", "min-replicas-to-write is 0: a master that is cut off from "+
			"its replicas still grants locks, beside the new master. Set min-replicas-to-write 1")
	}
}

// clock reports by how much the server's clock is ahead, or behind if offset is negative.
func (e *examiner) clock(offset time.Duration) {
	shown := offset.Round(time.Millisecond)
	if offset.Abs() > time.Second {
		e.say(Warn, "clock", "%v from this host's: if the server's clock is set forward, terms "+
			"end early by as much. Let NTP slew the clocks, not step them", shown)
		return
	}
	e.say(OK, "clock", "%v from this host's", shown)
}

// setting returns the value in a reply to CONFIG GET, or "" if there is none.
func setting(reply any) string {
	if pair, _ := reply.([]any); len(pair) == 2 {
		return fmt.Sprint(pair[1])
	}
	return ""
}

// ahead returns by how much a server's clock is ahead of our clock. The argument reply is that to
// TIME, seconds and microseconds. The server read its clock between our times sent and got. If the
// reply lies between these two times, the result is 0, and if it is before them, negative. ok is
// false if the reply is not valid.
func ahead(reply any, sent, got time.Time) (d time.Duration, ok bool) {
	parts, _ := reply.([]any)
	if len(parts) != 2 {
		return 0, false
	}
	seconds, err := strconv.ParseFloat(fmt.Sprintf("%s.%06s", parts...), 64)
	at := time.UnixMicro(int64(seconds * 1e6))
	return max(at.Sub(got), 0) + min(at.Sub(sent), 0), err == nil // at most one is not 0
}
