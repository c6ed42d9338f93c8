package redisstore

import (
	"cmp"
	"context"
	"errors"
	"iter"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
)

// This file lists the locks of a Redis. SCAN returns the names of keys of one type, page by page.
// Most keys may belong to other programs. So for each page, hasp first reads a few bytes of each
// value, and then the records of only those keys that may be locks.

// These limit each call of a List. A server executes such a call in about half a millisecond, and
// its other clients wait meanwhile. With smaller calls, a List would take much longer.
const (
	namesAtOnce   = "500" // names that one SCAN examines
	peeksAtOnce   = 250   // values whose beginnings one pipeline reads
	recordsAtOnce = 25    // records that one pipeline reads
)

// rest sleeps for as long as a call has lasted, so that the server can serve other clients. The
// argument began is the start of that call. If ctx has ended, rest returns its error, although the
// call may have had its reply before anything noticed that.
func rest(ctx context.Context, began time.Time) error {
	select {
	case <-time.After(time.Since(began)):
	case <-ctx.Done():
	}
	return ctx.Err()
}

// Listing says how the records of a strategy are found.
type Listing struct {
	// Type is the Redis type of a record that is not shared.
	Type string

	// Peek is a command that reads the start of a value. List inserts the key after the first
	// element of Peek. From the reply to Peek, Ours reports whether the value may be a record.
	Peek []string
	Ours func(reply any) bool

	// Queue is the kind (see DerivedKey) of the key that exists while callers wait, or "".
	Queue string
}

// ByToken finds records of the form token#owner that are strings.
var ByToken = Listing{Type: "string", Peek: []string{"getrange", "0", strconv.Itoa(maxToken)}, Ours: func(reply any) bool {
	text, _ := reply.(string)
	return hasToken(text)
}}

// sharedRecords finds the records of shared holds. Each has a term, which PTTL returns. SCAN also
// returns queues in this pass, because queues are sorted sets as well.
var sharedRecords = Listing{Type: "zset", Peek: []string{"pttl"}, Ours: func(reply any) bool {
	left, ok := reply.(int64)
	return ok && left >= 0
}}

// Candidate is a key that may be held or waited for.
type Candidate struct {
	Key    string
	Queued bool // found by its queue; otherwise by its record
}

// List yields the keys that have records. It reads the records by the script sc. The keys of sc are
// the lock and the fence counter, and [Found] describes its reply.
func (s *Store) List(ctx context.Context, prefix string, timeout time.Duration, l Listing, sc *Script) iter.Seq2[backend.Entry, error] {
	call := func(c Candidate) Call { return Call{Keys: []string{LockKey(c.Key), DerivedKey("fence", c.Key)}} }
	return s.ListBy(ctx, prefix, timeout, l, sc, call, func(_ Candidate, reply any) (backend.Status, bool, error) {
		f, ok := Decode(reply)
		if !ok {
			return backend.Status{}, false, s.Unexpected(reply)
		}
		return f.Status(), f.IsOurs(), nil
	})
}

// IsOurs reports whether the key has a record of hasp. Such a record always has a term.
func (f Found) IsOurs() bool { return f.pttl >= 0 && (f.Shared() || hasToken(f.Record)) }

// ListBy is List for a script with other keys and another reply. Its argument call returns the Call
// for a key. The function status decodes the reply, and reports whether to list the key.
func (s *Store) ListBy(ctx context.Context, prefix string, timeout time.Duration, l Listing, sc *Script,
	call func(Candidate) Call, status func(c Candidate, reply any) (backend.Status, bool, error)) iter.Seq2[backend.Entry, error] {
	return func(yield func(backend.Entry, error) bool) {
		for page, err := range s.Scan(ctx, prefix, timeout, l) {
			if err != nil {
				yield(backend.Entry{}, err)
				return
			}
			for some := range slices.Chunk(page, recordsAtOnce) {
				began := time.Now()
				entries, err := s.records(ctx, timeout, sc, some, call, status)
				if err == nil {
					err = rest(ctx, began)
				}
				if err != nil {
					yield(backend.Entry{}, cmp.Or(ctx.Err(), err))
					return
				}
				for _, e := range entries {
					if !yield(e, nil) {
						return
					}
				}
			}
		}
	}
}

// records runs sc for several keys, in one pipeline for each server, and returns their entries.
func (s *Store) records(ctx context.Context, timeout time.Duration, sc *Script, some []Candidate,
	call func(Candidate) Call, status func(c Candidate, reply any) (backend.Status, bool, error)) ([]backend.Entry, error) {
	within, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	calls := make([]Call, len(some))
	for i, c := range some {
		calls[i] = call(c)
	}

	var entries []backend.Entry
	var failed error
	s.RunEach(within, sc, calls, func(i int, reply any, err error) {
		switch {
		case redis.HasErrorPrefix(err, "WRONGTYPE"):
			return // another program has replaced the record
		case err != nil:
			failed = cmp.Or(failed, err) // a pipeline that fails returns the same error for each record
			return
		}
		st, ok, err := status(some[i], reply)
		if err != nil {
			failed = err
		}
		if ok && (st.Held || len(st.Waiters) > 0) {
			entries = append(entries, backend.Entry{Key: some[i].Key, Status: st})
		}
	})
	return entries, failed
}

// isPrivate reports whether a server refused a command because this user may not use the key, or
// because the key now has another type.
func isPrivate(err error) bool {
	return redis.HasErrorPrefix(err, "WRONGTYPE") || redis.HasErrorPrefix(err, "NOPERM") && strings.Contains(err.Error(), " access ")
}

// Scan yields pages of the keys that begin with prefix and may be held or waited for. A page may be
// empty. After each call to a server, Scan sleeps for as long as the call took.
func (s *Store) Scan(ctx context.Context, prefix string, timeout time.Duration, l Listing) iter.Seq2[[]Candidate, error] {
	return func(yield func([]Candidate, error) bool) {
		within, cancel := context.WithTimeout(ctx, timeout)
		all, err := s.all(within)
		cancel()
		if err != nil {
			yield(nil, cmp.Or(ctx.Err(), s.fail(err)))
			return
		}
		sc := &scan{s: s, timeout: timeout, prefix: prefix, queue: l.Queue, master: s.master()}
		for _, sc.at = range all {
			for _, sc.records = range []Listing{l, sharedRecords} {
				for sc.cursor = "0"; ; {
					page, err := sc.page(ctx)
					if err != nil {
						yield(nil, cmp.Or(ctx.Err(), err))
						return
					}
					if !yield(page, nil) {
						return
					}
					if sc.cursor == "0" {
						break
					}
				}
			}
		}
	}
}

// scan is the state of one Scan.
type scan struct {
	s       *Store
	timeout time.Duration
	prefix  string
	queue   string // Listing.Queue
	master  string // what Store.master returned when the scan began

	at      *server
	records Listing // how the current pass finds records
	cursor  string  // "0" before the first page and after the last
}

// page returns the next page of the scan.
func (sc *scan) page(ctx context.Context) (page []Candidate, err error) {
	if sc.s.master() != sc.master {
		return nil, sc.s.fail(errors.New("the sentinels named a new master during the list; list again"))
	}
	command := []string{"scan", sc.cursor, "count", namesAtOnce, "type", sc.records.Type}
	if match := pattern(sc.prefix, sc.queue); match != "" {
		command = append(command, "match", match)
	}
	reply, err := sc.peek(ctx, []string{""}, func(string) []string { return command })
	if err != nil {
		return nil, err
	}
	next, names, ok := scanned(reply[0])
	if !ok {
		return nil, sc.s.Unexpected(reply[0])
	}
	sc.cursor = next

	var locks []string // Redis keys that may have a record
	keys := map[string]string{}
	for _, name := range names {
		key, kind, ok := keyOf(name)
		switch {
		case !ok || key == "" || !strings.HasPrefix(key, sc.prefix):
		case kind == "":
			locks, keys[name] = append(locks, name), key
		case kind == sc.queue:
			page = append(page, Candidate{key, true})
		}
	}

	begins, err := sc.peek(ctx, locks, func(name string) []string {
		return slices.Insert(slices.Clone(sc.records.Peek), 1, name)
	})
	if err != nil {
		return nil, err
	}
	for i, name := range locks {
		if sc.records.Ours(begins[i]) {
			page = append(page, Candidate{keys[name], false})
		}
	}
	return page, nil
}

// scanned decodes the reply of SCAN.
func scanned(reply any) (next string, names []string, ok bool) {
	parts, _ := reply.([]any)
	if len(parts) != 2 {
		return "", nil, false
	}
	next, ok = parts[0].(string)
	all, isArray := parts[1].([]any)
	for _, v := range all {
		name, isText := v.(string)
		names = append(names, name)
		ok = ok && isText
	}
	return next, names, ok && isArray && next != ""
}

// peek sends one command for each name to the server, in pipelines, and sleeps after each pipeline.
// If this user may not use a key, the reply for that key is nil.
func (sc *scan) peek(ctx context.Context, names []string, command func(name string) []string) ([]any, error) {
	var all []any
	for some := range slices.Chunk(names, peeksAtOnce) {
		began := time.Now()
		within, cancel := context.WithTimeout(ctx, sc.timeout)
		defer cancel()
		commands := make([][]string, len(some))
		for i, name := range some {
			commands[i] = command(name)
		}
		for i, r := range sc.at.ask(within, true, false, commands...) {
			var v any
			var err error
			if sc.s.isCluster && (redis.HasErrorPrefix(r.Err, "MOVED") || redis.HasErrorPrefix(r.Err, "ASK")) {
				// Let Send find the right server, because the slot is being moved, or this server
				// is no longer a master.
				v, err = sc.s.Send(within, some[i], false, commands[i]...)
			} else {
				v, err = sc.s.outcome(within, sc.at, r)
			}
			if err != nil && !isPrivate(err) {
				return nil, err
			}
			all = append(all, v)
		}
		if err := rest(ctx, began); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// keyOf returns the key of the lock to which a Redis key belongs. For the lock's own Redis key, the
// result kind is empty. If no key of hasp has this name, ok is false.
func keyOf(name string) (key, kind string, ok bool) {
	rest, derived := strings.CutPrefix(name, ours)
	if !derived {
		return name, "", true
	}
	_, rest, _ = strings.Cut(rest, "}:")
	kind, key, ok = strings.Cut(rest, ":")
	if !ok || DerivedKey(kind, key) != name {
		return "", "", false
	}
	if kind == "lock" {
		return key, "", LockKey(key) == name
	}
	return key, kind, true
}

// escaped puts a backslash before each special character of a glob.
var escaped = strings.NewReplacer(`*`, `\*`, `?`, `\?`, `[`, `\[`, `]`, `\]`, `\`, `\\`)

// pattern returns a glob for the Redis keys of locks whose keys begin with prefix, or "" for all.
func pattern(prefix, queue string) string {
	switch {
	case prefix == "":
		return ""
	case queue != "" || strings.HasPrefix(prefix, ours):
		return "*" + escaped.Replace(prefix) + "*" // a derived name ends with the key
	}
	return escaped.Replace(prefix) + "*"
}
