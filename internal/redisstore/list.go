package redisstore

import (
	"cmp"
	"context"
	"errors"
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
// argument began is the start of that call. rest returns the error of ctx, so that a list ends with
// ctx even if the call has received its reply.
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
var ByToken = Listing{
	Type: "string",
	Peek: []string{"getrange", "0", strconv.Itoa(maxToken)},
	Ours: func(reply any) bool {
		text, _ := reply.(string)
		return hasToken(text)
	},
}

// sharedRecords finds the records of shared holds. Each has a term, which PTTL returns. SCAN also
// returns queues in this pass, because queues are sorted sets as well.
var sharedRecords = Listing{
	Type: "zset",
	Peek: []string{"pttl"},
	Ours: func(reply any) bool {
		left, ok := reply.(int64)
		return ok && left >= 0
	},
}

// Candidate is a key that may be held or waited for.
type Candidate struct {
	Key    string
	Queued bool // found by its queue; otherwise by its record
}

// Reading says how a list reads the records of candidates.
type Reading struct {
	Listing
	Script *Script

	// Call returns the call of the script for a key.
	Call func(Candidate) Call

	// Status decodes the reply of the script, and reports whether to list the key.
	Status func(c Candidate, reply any) (backend.Status, bool, error)
}

// entries runs the script for the candidates, in one pipeline for each server, and returns the
// entries of those that are held or waited for. If the script or the reading of its reply fails for
// a key, entries returns an error.
func (r Reading) entries(ctx context.Context, s *Store, timeout time.Duration,
	candidates []Candidate) ([]backend.Entry, error) {
	within, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	calls := make([]Call, len(candidates))
	for i, c := range candidates {
		calls[i] = r.Call(c)
	}

	var entries []backend.Entry
	var failure error
	s.RunEach(within, r.Script, calls, func(i int, reply any, err error) {
		switch {
		case redis.HasErrorPrefix(err, "WRONGTYPE"):
			return // another program has replaced the record
		case err != nil:
			// keep the first error, because a pipeline that fails gives all calls the same one
			failure = cmp.Or(failure, err)
			return
		}
		status, ok, err := r.Status(candidates[i], reply)
		if err != nil {
			failure = err
		}

		// The key may have become free since it was found.
		if ok && (status.Held || len(status.Waiters) > 0) {
			entries = append(entries, backend.Entry{Key: candidates[i].Key, Status: status})
		}
	})

	return entries, failure
}

// isPrivate reports whether a server refused a command because this user may not use the key, or
// because the key now has another type.
func isPrivate(err error) bool {
	if redis.HasErrorPrefix(err, "NOPERM") {
		// "no permissions to access a key", and not "to run the command"
		return strings.Contains(err.Error(), " access ")
	}
	return redis.HasErrorPrefix(err, "WRONGTYPE")
}

// scan is the state of one Scan.
type scan struct {
	s       *Store
	timeout time.Duration
	prefix  string
	queue   string // Listing.Queue
	master  string // what finder.master returned when the scan began

	at      *server
	records Listing // how the current pass finds records
	cursor  string  // "0" before the first page and after the last
}

// run yields the pages. It reads all names twice, because SCAN returns keys of one type: first for
// the records that l finds, and then for those of shared holds.
func (sc *scan) run(ctx context.Context, l Listing, yield func([]Candidate, error) bool) {
	within, cancel := context.WithTimeout(ctx, sc.timeout)
	all, err := sc.s.all(within)
	cancel()
	if err != nil {
		// if ctx has ended, that is why the call failed
		yield(nil, cmp.Or(ctx.Err(), sc.s.fail(err)))
		return
	}

	sc.master = sc.s.master()
	for _, at := range all {
		sc.at = at
		for _, records := range []Listing{l, sharedRecords} {
			sc.records = records
			if !sc.pass(ctx, yield) {
				return
			}
		}
	}
}

// pass yields the pages of one server and one type. It returns false if the scan must end.
func (sc *scan) pass(ctx context.Context, yield func([]Candidate, error) bool) bool {
	sc.cursor = "0"
	for {
		page, err := sc.page(ctx)
		if err != nil {
			yield(nil, cmp.Or(ctx.Err(), err))
			return false
		}
		if !yield(page, nil) {
			return false
		}
		if sc.cursor == "0" {
			return true
		}
	}
}

// page returns the candidates among the next names of the server, and moves the cursor.
func (sc *scan) page(ctx context.Context) (page []Candidate, err error) {
	if sc.s.master() != sc.master {
		return nil, sc.s.fail(errors.New("the sentinels named a new master during the list; list " +
			"again"))
	}
	command := []string{"scan", sc.cursor, "count", namesAtOnce, "type", sc.records.Type}
	if match := pattern(sc.prefix, sc.queue); match != "" {
		command = append(command, "match", match)
	}

	// peek also sleeps after the command. SCAN has no key, and the name "" is not used.
	reply, err := sc.peek(ctx, []string{""}, func(string) []string { return command })
	if err != nil {
		return nil, err
	}
	next, names, ok := scanned(reply[0])
	if !ok {
		return nil, sc.s.Unexpected(reply[0])
	}
	sc.cursor = next

	var locks []string          // Redis keys that may have a record
	keys := map[string]string{} // for each of the locks, the key as the user names it
	for _, name := range names {
		key, kind, ok := keyOf(name)
		switch {
		case !ok || key == "" || !strings.HasPrefix(key, sc.prefix):
			// The name is not that of a lock, or the list is not about this key.
		case kind == "":
			locks = append(locks, name)
			keys[name] = key
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

// scanned decodes the reply of SCAN, which has the next cursor and an array of names. ok reports
// whether the reply is valid.
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
func (sc *scan) peek(ctx context.Context, names []string,
	command func(name string) []string) ([]any, error) {
	var all []any
	for group := range slices.Chunk(names, peeksAtOnce) {
		began := time.Now()
		within, cancel := context.WithTimeout(ctx, sc.timeout)
		defer cancel()
		commands := make([][]string, len(group))
		for i, name := range group {
			commands[i] = command(name)
		}
		for i, r := range sc.at.ask(within, true, false, commands...) {
			var v any
			var err error
			if sc.s.isCluster && redirects(r.Err) {
				// Let Send find the right server, because the slot is being moved, or this server
				// is no longer a master.
				v, err = sc.s.Send(within, group[i], false, commands[i]...)
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
