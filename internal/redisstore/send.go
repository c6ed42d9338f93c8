package redisstore

import (
	"context"
	"crypto/sha1"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore/resp"
	"github.com/hasplock/hasp/internal/redisstore/slot"
)

// This file sends commands and scripts, and has the names of their keys.

// ours is the beginning of each key that hasp derives.
const ours = "hasp:{"

// LockKey returns the Redis key of the lock on key, for all strategies: key itself, so that the
// strategies exclude each other and other programs. If a key looks like a derived key, it gets a
// derived name instead.
func LockKey(key string) string {
	if strings.HasPrefix(key, ours) {
		return DerivedKey("lock", key)
	}
	return key
}

// DerivedKey returns the name of a Redis key that belongs to the lock on key, such as its fence. It
// is in the cluster slot of LockKey(key), whatever bytes key contains. Different keys, or different
// kinds, have different names.
func DerivedKey(kind, key string) string {
	return ours + slot.Tag(key) + "}:" + kind + ":" + key
}

// Channel returns the name of one of hasp's channels, on which scripts on key can publish. On a
// cluster each slot has its own channel.
func (s *Store) Channel(name, key string) string {
	if s.isCluster {
		return ours + slot.Number(slot.Of(LockKey(key))) + "}:" + name
	}
	return "hasp:" + name
}

// Reply is the reply to one command, or its error.
type Reply = resp.Reply

// Do is Send for a command whose first argument after the name is its key.
func (s *Store) Do(ctx context.Context, args ...string) (any, error) {
	key := ""
	if len(args) > 1 {
		key = args[1]
	}
	return s.Send(ctx, key, false, args...)
}

// maxHops is how many redirections Send follows for one command.
const maxHops = 8

// Send sends one command, once, to the server that has key. It returns the reply: nil, an int64, a
// string or a []any. Errors name the server. Usually args stays on the caller's stack, because the
// command is encoded before another goroutine receives it.
//
// kept is true for a command that takes or extends a hold. If the Store waits for replicas, and too
// few of them confirm the command in time, Send returns an error, and the outcome is unknown.
// Replicas need not confirm a command that took nothing. The reply of such a command is nil, a
// number up to 0, or an array that begins with one of these.
func (s *Store) Send(ctx context.Context, key string, kept bool, args ...string) (any, error) {
	at, err := s.servers.find(ctx, key)
	if err != nil {
		return nil, s.fail(err)
	}

	asking := false
	for hops := 0; ; hops++ {
		r := s.sendTo(ctx, at, asking, kept, args)
		if r.Err == nil {
			return r.Value, nil
		}
		// Do not send the command to another server, because the caller has left, and the outcome
		// is unknown.
		if cancelled(ctx, r.Err) {
			return nil, s.named(at.name, ctx.Err())
		}

		// A server that redirects a command has not executed it. Limit the hops, because servers
		// that disagree about a slot may redirect to each other without end.
		to, ask := s.servers.follow(at, key, r.Err)
		if to == nil || hops == maxHops {
			return s.outcome(at, r)
		}
		at, asking = to, ask
	}
}

// If replicas must confirm a command, sendTo passes it to waits. Otherwise sendTo uses the wire if
// there are other callers, and a connection of the pool if there are none.
func (s *Store) sendTo(ctx context.Context, at *server, asking, kept bool, args []string) Reply {
	if at.pool == nil {
		return resp.Do(ctx, at.rdb, args)
	}
	others := at.callers.Add(1) > 1 || s.always
	defer at.callers.Add(-1)
	kept = kept && s.replicas > 0

	switch {
	// ASKING applies only to the next command on its connection, so use a connection that no other
	// caller uses.
	case asking:
		return s.pipeline(ctx, at, kept, []string{"asking"}, slices.Clone(args))[1]
	case kept && isLarge(args):
		return s.pipeline(ctx, at, kept, slices.Clone(args))[0]
	case kept:
		return at.waits.hold(ctx, s, at, slices.Clone(args))
	}
	var replies [1]Reply // on the stack
	if others && !isLarge(args) {
		s.share(ctx, at, replies[:], args)
	} else {
		at.pool.Do(ctx, replies[:], args)
	}
	return replies[0]
}

// cancelled reports whether err is the error of a call that was interrupted
// because ctx was cancelled.
func cancelled(ctx context.Context, err error) bool {
	return err != nil && ctx.Err() == context.Canceled && errors.Is(err, os.ErrDeadlineExceeded)
}

// outcome returns a reply, or its error with the name of the server. It reports the error to the
// topology, and a READONLY also to the Subscriber.
func (s *Store) outcome(at *server, r Reply) (any, error) {
	err := r.Err
	if err == nil {
		return r.Value, nil
	}

	// Callers check for NOSCRIPT, so do not change this error, even if the text contains a
	// password.
	if redis.HasErrorPrefix(err, unknownScript) {
		return nil, err
	}

	s.servers.failed(at, err)
	if resp.IsReadOnly(err) {
		// Let the Subscriber connect again: the address leads to another master now or soon, and
		// the new master's messages do not arrive on the old connection.
		s.Demoted(at.Server)
	}

	if s.servers == (single{at}) {
		if _, ok := redis.IsMovedError(err); ok {
			err = fmt.Errorf("%w (this is one server of a cluster: use redis-cluster://host:port)", err)
		} else if resp.IsReadOnly(err) {
			err = fmt.Errorf("%w (it is a replica: name the master, or the sentinels)", err)
		}
	}
	return nil, s.named(at.name, err)
}

// single is the topology of one server. It follows no redirection, and never searches.
type single struct{ *server }

func (s single) find(context.Context, string) (*server, error)           { return s.server, nil }
func (s single) follow(*server, string, error) (to *server, asking bool) { return nil, false }
func (s single) failed(*server, error)                                   {}

// Script is a Lua script. A Store runs it by its hash. The Store sends the source to a server that
// does not know the script, and in the first calls of Run.
type Script struct {
	src, sha string
	kept     bool // see Store.Send
}

//go:embed *.lua
var parts embed.FS

// Source returns the text of some parts of a script. A part is a file of the strategy, or one of
// this package that strategies share. In a part, the line "-- include NAME" stands for another
// part. Lua creates the functions of a part in each run. So a script includes a part where it is
// first needed, and the usual case creates none. In the usual case, scripts also pass texts to
// Redis, and not numbers, which Redis would have to format.
func Source(files embed.FS, names ...string) string {
	var text strings.Builder
	for _, name := range names {
		src, err := files.ReadFile(name + ".lua")
		if err != nil {
			src, err = parts.ReadFile(name + ".lua")
		}
		if err != nil {
			panic(err)
		}
		for line := range strings.Lines(string(src)) {
			if others, ok := strings.CutPrefix(strings.TrimSpace(line), "-- include "); ok {
				line = Source(files, strings.Fields(others)...)
			}
			text.WriteString(line)
		}
	}
	return text.String()
}

// NewScript returns a script with the source src.
func NewScript(src string) *Script {
	sum := sha1.Sum([]byte(src))
	return &Script{src: src, sha: hex.EncodeToString(sum[:])}
}

// NewHold returns a script that takes or extends a hold, and that replicas must confirm: see kept
// at [Store.Send].
func NewHold(src string) *Script {
	sc := NewScript(src)
	sc.kept = true
	return sc
}

// Call holds the arguments for one run of a script. There is at least one key, and all keys are in
// one cluster slot.
type Call struct {
	Keys []string
	Args []string
}

// appendArgs appends the command that runs s: with the source if whole is true, otherwise with the
// hash.
func (s *Script) appendArgs(all []string, c Call, whole bool) []string {
	if whole {
		all = append(all, "eval", s.src)
	} else {
		all = append(all, "evalsha", s.sha)
	}
	all = append(all, strconv.Itoa(len(c.Keys)))
	return append(append(all, c.Keys...), c.Args...)
}

// unknownScript begins the reply of a server that does not know a script. Then the script has not
// run, so it may be sent again.
const unknownScript = "NOSCRIPT"

// Run runs sc once and returns its reply as Send does.
func (s *Store) Run(ctx context.Context, sc *Script, c Call) (any, error) {
	// Send the source until a call has succeeded. If concurrent first calls sent the hash, the
	// server would refuse all of them, and each would be sent twice.
	_, ran := s.ran.Load(sc)
	var room [16]string // enough for the usual command, on the stack
	v, err := s.Send(ctx, c.Keys[0], sc.kept, sc.appendArgs(room[:0], c, !ran)...)
	switch {
	case err == nil && !ran:
		s.ran.Store(sc, nil)
	case err != nil && ran && redis.HasErrorPrefix(err, unknownScript):
		return s.Send(ctx, c.Keys[0], sc.kept, sc.appendArgs(room[:0], c, true)...)
	}
	return v, err
}

// Owned decodes the reply of a script that returns 1 if its token held the key, and otherwise 0.
// For 0 the error is backend.ErrLost. If err is not nil, Owned returns err.
func (s *Store) Owned(reply any, err error) error {
	switch {
	case err != nil:
		return err
	case reply == int64(1):
		return nil
	case reply == int64(0):
		return backend.ErrLost
	}
	return s.Unexpected(reply)
}

// Millis returns a term in milliseconds, rounded up.
func Millis(d time.Duration) string {
	return strconv.FormatInt((d + time.Millisecond - 1).Milliseconds(), 10)
}

// Rest returns the milliseconds until then, rounded up: the term of a key that is released with
// KeepUntil. It returns "" if then is zero or has passed. In that case the key must be freed.
func Rest(then time.Time) string {
	if then.IsZero() || time.Until(then) <= 0 { // usually then is zero, and the clock need not be read
		return ""
	}
	return Millis(max(time.Until(then), 1))
}

// Term returns a PTTL, which is in milliseconds, as a Duration. It is a hundred years at
// most, because a PTTL can be longer than a Duration.
func Term(pttl int64) time.Duration {
	const most = 100 * 365 * 24 * time.Hour / time.Millisecond
	return min(time.Duration(pttl), most) * time.Millisecond
}
