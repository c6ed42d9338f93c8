package redisstore

import (
	"context"
	"crypto/sha1"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore/resp"
	"github.com/hasplock/hasp/internal/redisstore/slot"
)

// This file sends commands and scripts, and makes the names of Redis keys.

// The constant ours is the beginning of each key that hasp derives.
const ours = "hasp:{"

// LockKey returns the Redis key of the lock on key, for all strategies. This name is key itself, so
// that the strategies exclude each other and other programs. Only if key begins like a derived key
// does LockKey return a derived name.
func LockKey(key string) string {
	if strings.HasPrefix(key, ours) {
		return DerivedKey("lock", key)
	}
	return key
}

// DerivedKey returns the name of a Redis key that belongs to the lock on key, such as its fence
// counter. The name is in the cluster slot of LockKey(key), whatever bytes key contains. Different
// keys or kinds give different names.
func DerivedKey(kind, key string) string { return ours + slot.Tag(key) + "}:" + kind + ":" + key }

// Channel returns the name of one of hasp's channels. Scripts for key can publish on this channel.
// On a cluster, the name depends on the slot of key.
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

// maxStale is how many connections of a passed client Send replaces for one command at most.
const maxStale = 64

// Send sends one command, once, to the server that has key. It returns the reply: nil, an int64, a
// string or a []any. Errors name the server. The slice args usually stays on the caller's stack,
// because the command is encoded before another goroutine receives it.
//
// The argument kept is true for a command that takes or extends a hold. If the Store waits for
// replicas, and too few of them confirm the command in time, Send returns an error, and the outcome
// is unknown. Replicas need not confirm a command that took nothing. The reply to such a command is
// nil, a number that is not positive, or an array that begins with nil or such a number.
func (s *Store) Send(ctx context.Context, key string, kept bool, args ...string) (any, error) {
	at, err := s.ready(ctx, key)
	if err != nil {
		return nil, err
	}

	asking := false
	for hops := 0; ; hops++ {
		r := at.send(ctx, asking, kept, args)
		if r.Err == nil {
			return r.Value, nil
		}
		// A server that redirects or refuses a command has not executed it. go-redis follows
		// redirections, but not of a pipeline with WAIT, which goes to one server. Limit the hops,
		// because servers that disagree about a slot may redirect to each other without end, and
		// because a replica may stay one.
		var to *server
		switch {
		case s.isCluster && kept && s.replicas > 0 && redirects(r.Err) && hops < maxHops:
			to, asking = s.follow(ctx, at, key, r.Err)
		case s.isDemoted(r.Err) && hops < s.connections:
			to = at
		}
		if to == nil {
			return s.outcome(ctx, at, r)
		}
		at = to
	}
}

// isDemoted reports whether a replica refused a command, and another connection may lead to the
// master, as after a failover behind one address. The connection to the replica is closed: go-redis
// closes that of a command which begins a pipeline, and hasp closes that of a wire.
func (s *Store) isDemoted(err error) bool { return !s.isCluster && resp.IsReadOnly(err) }

// ready returns the server that has the slot of a key, and checks a server that has not been checked.
func (s *Store) ready(ctx context.Context, key string) (*server, error) {
	at, err := s.find(ctx, key)
	if err != nil {
		return nil, s.fail(err)
	}
	return at, s.checked(ctx, at)
}

// checked checks a server that has not been checked. Its error names the server, and says what to do.
func (s *Store) checked(ctx context.Context, at *server) error {
	began := time.Now()
	err := at.check(ctx)
	if err == nil || errors.As(err, new(unfitError)) {
		return err
	}
	if !cancelled(ctx, err) {
		err = diagnose(err, s.hints, time.Since(began))
	}
	_, err = s.outcome(ctx, at, Reply{Err: err})
	return err
}

// send passes a command to the gather of the server. ASKING applies only to the next command on its
// connection, so a command after it has a pipeline of its own.
func (at *server) send(ctx context.Context, asking, kept bool, args []string) Reply {
	var replies [2]Reply // on the stack
	g := at.gather(kept)
	if asking {
		g.doApart(ctx, true, replies[:], []string{"asking"}, args)
		return replies[1]
	}
	g.do(ctx, replies[:1], args)
	return replies[0]
}

// redirects reports whether a server of a cluster refused a command because another one has the slot.
func redirects(err error) bool {
	return redis.HasErrorPrefix(err, "MOVED") || redis.HasErrorPrefix(err, "ASK ")
}

// The function cancelled reports whether a call returned err because ctx was cancelled.
func cancelled(ctx context.Context, err error) bool {
	return err != nil && ctx.Err() == context.Canceled && errors.Is(err, os.ErrDeadlineExceeded)
}

// outcome returns a reply, or the reply's error with the name of the server. If the error may mean that
// another server has the key now, outcome starts a search for the servers. After a READONLY error, the
// Subscriber connects again.
func (s *Store) outcome(ctx context.Context, at *server, r Reply) (any, error) {
	err := r.Err
	switch {
	case err == nil:
		return r.Value, nil
	case cancelled(ctx, err):
		// The server may have executed the command, because the caller has left.
		return nil, s.named(at.label(), ctx.Err())
	}

	// Callers check for NOSCRIPT, so do not change this error, even if the text contains a
	// password.
	if redis.HasErrorPrefix(err, unknownScript) {
		return nil, err
	}

	s.failed(err)
	if resp.IsReadOnly(err) {
		// Let the Subscriber connect again, because the address leads to a new master now or soon,
		// and the messages of that master do not arrive on the old connection.
		s.Demoted(at.node)
	}

	if !s.isCluster && !s.bySentinels {
		if _, ok := redis.IsMovedError(err); ok {
			err = fmt.Errorf("%w (this is one server of a cluster: use redis-cluster://host:port)", err)
		} else if resp.IsReadOnly(err) {
			err = fmt.Errorf("%w (it is a replica: name the master, or the sentinels)", err)
		}
	}
	return nil, s.named(at.label(), err)
}

// Script is a Lua script. A Store usually sends only its hash. It sends the source until a call of
// Run has succeeded, and when a server does not know the script.
type Script struct {
	src, sha string
	kept     bool // see Store.Send
}

//go:embed *.lua
var parts embed.FS

// Source joins the named parts of a script. A part is a file of the strategy, or a file of this
// package that strategies share. The line "-- include NAME" is replaced by the part NAME. In each
// run, Lua creates the functions of the parts that the run reaches. Therefore a script includes a
// part where it first needs the part, and a usual run creates no function. A usual run also passes
// only texts to Redis, because numbers would have to be formatted.
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

// NewHold returns a script that takes or extends a hold, so replicas must confirm the hold (see the
// parameter kept of [Store.Send]).
func NewHold(src string) *Script {
	sc := NewScript(src)
	sc.kept = true
	return sc
}

// Call holds the arguments for one run of a script. There is at least one key, and all keys are in
// the same cluster slot.
type Call struct {
	Keys []string
	Args []string
}

// appendArgs appends the command that runs s. If whole is true, the command contains the source,
// and otherwise the hash.
func (s *Script) appendArgs(all []string, c Call, whole bool) []string {
	if whole {
		all = append(all, "eval", s.src)
	} else {
		all = append(all, "evalsha", s.sha)
	}
	all = append(all, strconv.Itoa(len(c.Keys)))
	return append(append(all, c.Keys...), c.Args...)
}

// unknownScript begins the reply of a server that does not know a script. After this reply, the
// script may be sent again, because it has not run.
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

// Rest returns the time that is left until KeepUntil, in milliseconds rounded up. This is the term
// of a key that is released with KeepUntil. If KeepUntil is zero or has passed, Rest returns "",
// and the key must be freed.
func Rest(then time.Time) string {
	if then.IsZero() || time.Until(then) <= 0 { // usually KeepUntil is zero, and the clock need not be read
		return ""
	}
	return Millis(max(time.Until(then), 1))
}

// Term returns a PTTL, which is in milliseconds, as a Duration. The result is at most a hundred
// years, because a PTTL can be longer than any Duration.
func Term(pttl int64) time.Duration {
	const most = 100 * 365 * 24 * time.Hour / time.Millisecond
	return min(time.Duration(pttl), most) * time.Millisecond
}
