package redisstore

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"os"
	"reflect"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore/pubsub"
	"github.com/hasplock/hasp/internal/redisstore/resp"
	"github.com/hasplock/hasp/internal/redisstore/slot"
)

// Store is one Redis: a server, the master that sentinels name, or a cluster. Many goroutines may
// use it at once. A call ends when its context ends.
type Store struct {
	// Subscriber holds the subscriptions of the Store. Store.Close also closes the Subscriber.
	*pubsub.Subscriber

	*finder
	ran sync.Map // scripts that Run sends by their hash: *Script → nil
}

// maxHops is how many redirections Send follows for one command.
const maxHops = 8

// maxStale is how many connections of a passed client Send replaces for one command at most.
const maxStale = 64

// NewDriver returns the driver that newDriver makes of a Store over rdb, which the caller of hasp
// passed. Errors name the strategy.
func NewDriver[D backend.Driver, O any](strategy string, rdb redis.UniversalClient, o *O,
	newDriver func(*Store, *O) (D, error)) (backend.Driver, error) {
	if err := CheckClient(rdb); err != nil {
		return nil, fmt.Errorf("%s: %w", strategy, err)
	}
	d, err := newDriver(New(rdb), o)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", strategy, err)
	}
	return d, nil
}

// CheckClient refuses a client with which hasp cannot work.
func CheckClient(rdb redis.UniversalClient) error {
	// An interface that contains a nil pointer is not equal to nil, so ask reflect as well.
	v := reflect.ValueOf(rdb)
	if rdb == nil || v.Kind() == reflect.Pointer && v.IsNil() {
		return fmt.Errorf("%w: client is nil", backend.ErrInvalid)
	}
	if _, ok := rdb.(*redis.Ring); ok {
		return fmt.Errorf("%w: a Ring moves keys to other servers while one is down",
			backend.ErrInvalid)
	}
	return nil
}

// New returns a Store that uses a client of the caller. The client keeps its settings, and the
// Store's Close does not close the client.
func New(rdb redis.UniversalClient) *Store {
	o := &settings{name: "redis", plain: true, connections: maxStale, hints: clientHints}

	// Of any other type, such as a wrapper of the caller, hasp knows no address and no password.
	switch c := rdb.(type) {
	case *redis.Client:
		// A client of sentinels has no address, and go-redis reports "FailoverClient" instead.
		o.bySentinels = c.Options().Addr == "FailoverClient"
		if !o.bySentinels {
			o.name += " " + c.Options().Addr
		}
		o.secrets = []string{c.Options().Password}
	case *redis.ClusterClient:
		o.isCluster = true
		o.secrets = []string{c.Options().Password}
	}

	return newStore(o, rdb, nil)
}

// newStore returns a Store that uses rdb. The argument opened is the dialer of rdb if hasp made rdb
// for a URL. It is nil if the caller of hasp passed rdb.
func newStore(o *settings, rdb redis.UniversalClient, opened *dialer) *Store {
	servers := &finder{settings: o, tasks: &tasks{}, rdb: rdb, opened: opened}
	config := pubsub.Config{
		Server: func(ctx context.Context, slotKey string) (redis.UniversalClient, error) {
			at, err := servers.find(ctx, slotKey)
			if err != nil {
				return nil, err
			}
			return at.node, nil
		},
		Cluster: o.isCluster,
		Wrap:    o.fail,
	}

	if o.isCluster {
		config.Reload = servers.reload
	} else {
		servers.one = servers.newServer(rdb, "")
		if opened != nil {
			servers.sentinels = opened.sentinels
			calls := servers.one.calls
			for _, w := range opened.wires { // each wire belongs to one flight
				calls.idle = append(calls.idle, &flight{wire: w})
			}
		}
	}

	return &Store{Subscriber: pubsub.New(config), finder: servers}
}

// probe finds the servers, and runs the method check on the server or on each master of a cluster.
// Of the masters, only one must answer, because the others may be down for a short time. But if a
// master answers with an error, or with a reason why it must not store locks, probe returns that.
func (s *Store) probe(ctx context.Context) error {
	if end, ok := ctx.Deadline(); ok {
		// Let the dialer time out before ctx ends, because only the dialer's error has the cause.
		s.opened.timeout.Store(int64(time.Until(end) * 4 / 5))
		defer s.opened.timeout.Store(int64(dialTimeout))
	}

	servers, err := s.all(ctx)
	if err != nil {
		// The cause says why ctx was cancelled, and err does not. But if ctx has timed out, err
		// says more, such as which server did not answer.
		if ctx.Err() == context.Canceled {
			err = context.Cause(ctx)
		}
		return s.fail(err)
	}

	check := func(ctx context.Context, at *server) (struct{}, error) {
		err := s.check(ctx, at)
		if err != nil && ctx.Err() == context.Canceled {
			err = s.prefix(at.label(), context.Cause(ctx)) // as above
		}
		return struct{}{}, err
	}

	answers, errs := askAll(ctx, servers, 0, grace, check)
	if len(errs) == 0 {
		return nil
	}

	// Ignore the masters that did not answer if another one did. But do not ignore a ReplyError:
	// a master has replied with an error, or check found why it must not store locks.
	if err := worst(errs, "masters"); len(answers) == 0 || resp.IsReply(err) {
		return err
	}
	return nil
}

// Name returns the prefix of the Store's errors.
func (s *Store) Name() string { return s.name }

// Unanswered returns the error of a call that has no answer yet. It says why no connection could be
// made, if that is known. The error begins with the given name. The Store must have a single server.
func (s *Store) Unanswered(name string) error {
	err := s.one.calls.noReply()
	if err != errNoReply {
		err = said{diagnose(err, s.hints, 0).Error(), err}
	}
	return s.prefix(name, err)
}

// NamesRun reports whether the replies of DoAll contain the run ID of the server.
func (s *Store) NamesRun() bool { return s.namesRun }

// Replicas returns how many replicas must confirm a hold. If another client hands a key over, the
// strategy of the new holder must send a renewal, so that the replicas confirm the hold.
func (s *Store) Replicas() int { return s.replicas }

// Channel returns the name of one of hasp's channels. Scripts for key can publish on this channel.
// On a cluster, the name depends on the slot of key.
func (s *Store) Channel(name, key string) string {
	if s.isCluster {
		return ours + slot.Number(slot.Of(LockKey(key))) + "}:" + name
	}
	return "hasp:" + name
}

// Close ends all subscriptions. If Open or Prepare made the Store, Close closes all connections,
// and waits for the calls in progress.
func (s *Store) Close() error {
	// Close the Subscriber before the connections that it uses.
	s.Subscriber.Close()

	s.tasks.close()
	if s.opened != nil {
		s.opened.close()
		s.rdb.Close()
		s.tasks.wait()
	}

	return nil
}

// Do is Send for a command that replicas need not confirm, and whose first argument after the name
// is its key. A command without arguments goes to the server that has the empty key.
func (s *Store) Do(ctx context.Context, args ...string) (any, error) {
	key := ""
	if len(args) > 1 {
		key = args[1]
	}
	return s.Send(ctx, key, false, args...)
}

// Send sends one command, once, to the server that has key. It returns the reply: nil, an int64, a
// string or a []any. Errors name the server. The slice args usually stays on the caller's stack,
// because the command is encoded before another goroutine receives it.
//
// The argument confirm is true for a command that takes or extends a hold. If the Store waits for
// replicas, and too few of them confirm the command in time, Send returns an error, and the outcome
// is unknown. Replicas need not confirm a command that took nothing. The reply to such a command is
// nil, a number that is not positive, or an array that begins with nil or such a number.
func (s *Store) Send(ctx context.Context, key string, confirm bool, args ...string) (any, error) {
	at, err := s.ready(ctx, key)
	if err != nil {
		return nil, err
	}

	// Follow redirections here only for a pipeline with WAIT, because it goes to the client of one
	// server. For all other commands, the client of the cluster follows them.
	canFollow := s.isCluster && confirm && s.replicas > 0
	asking := false // ASKING must precede the command
	for hops := 0; ; hops++ {
		r := at.send(ctx, asking, confirm, args)
		if r.Err == nil {
			return r.Value, nil
		}

		// A server that redirects a command, or a replica that refuses it, has not executed it. So
		// the command may be sent again. Limit how often, because servers that disagree about a
		// slot may redirect to each other without end, and because the replica may stay a replica.
		var to *server // where to send the command again; nil to return the error
		switch {
		case canFollow && hops < maxHops && redirects(r.Err):
			to, asking = s.follow(at, r.Err)
		case s.isDemoted(r.Err) && hops < s.connections:
			to = at // another connection to the same address may lead to the master
		}
		if to == nil {
			return s.outcome(ctx, at, r)
		}
		at = to
	}
}

// DoAll sends commands, each once, over one connection. The Store must have a single server. The
// server executes the commands in the given order, but may execute commands of other clients in
// between. If Prepare made the Store, each reply contains the run ID of the server that sent it.
func (s *Store) DoAll(ctx context.Context, commands ...[]string) []Reply {
	replies := make([]Reply, len(commands))
	at, err := s.ready(ctx, "")
	if err != nil {
		for i := range replies {
			replies[i].Err = err
		}
		return replies
	}

	at.calls.do(ctx, replies, commands...)
	for i, r := range replies {
		replies[i].Value, replies[i].Err = s.outcome(ctx, at, r)
	}
	return replies
}

// Run runs sc once and returns its reply as Send does.
func (s *Store) Run(ctx context.Context, sc *Script, c Call) (any, error) {
	// Send the source until a call has succeeded. If concurrent first calls sent the hash, the
	// server would refuse all of them, and each would be sent twice.
	_, ran := s.ran.Load(sc)
	var room [16]string // enough for the usual command, on the stack
	v, err := s.Send(ctx, c.Keys[0], sc.confirm, sc.appendArgs(room[:0], c, !ran)...)
	switch {
	case err == nil && !ran:
		s.ran.Store(sc, nil)
	case ran && redis.HasErrorPrefix(err, unknownScript):
		// The server no longer knows the script, because it was restarted or replaced.
		return s.Send(ctx, c.Keys[0], sc.confirm, sc.appendArgs(room[:0], c, true)...)
	}

	return v, err
}

// RunEach runs sc once for each call, in one pipeline for each server, and passes each reply, or
// the error in its place, to the function done, on the caller's goroutine. A call ends when ctx
// ends.
func (s *Store) RunEach(ctx context.Context, sc *Script, calls []Call,
	done func(i int, v any, err error)) {
	b := batch{s: s, sc: sc, calls: calls, answers: make(chan answer, len(calls))}
	go b.run(ctx)
	for range calls {
		a := <-b.answers
		done(a.i, a.v, a.err)
	}
}

// ready returns the server that has the slot of a key, and checks a server that has not been
// checked.
func (s *Store) ready(ctx context.Context, key string) (*server, error) {
	at, err := s.find(ctx, key)
	if err != nil {
		return nil, s.fail(err)
	}
	return at, s.check(ctx, at)
}

// check refuses a server that must not store locks: a replica, a server that may evict keys, one
// that runs no scripts, and one of a cluster behind a client that knows only this server. Once it
// has accepted the server, it does nothing. It runs before the first command, whether the Store was
// opened by a URL or uses a client that the caller passed. It runs a script, which as many replicas
// must confirm as the parameter replicas says. The error names the server, and says what to do. It
// is an unfitError if the server must not store locks, and otherwise says why this is not known.
func (s *Store) check(ctx context.Context, at *server) error {
	if at.fit.Load() {
		return nil
	}

	began := time.Now()
	var reason, err error // why the server must not store locks; why this is not known
	select {
	case at.checking <- struct{}{}: // one caller checks, and the others wait
		defer func() { <-at.checking }()
	case <-time.After(hedgeAfter):
		// Check as well, because the other caller's check may wait on a dead connection.
	case <-ctx.Done():
		err = at.calls.noReply()
	}

	if at.fit.Load() { // another caller has checked the server meanwhile
		return nil
	}
	if err == nil {
		reason, err = at.fault(ctx)
	}

	// The errors say that the caller's command was not sent, because only the check was.
	switch {
	case err != nil:
		err = resp.NotSent(err)
	case reason != nil:
		return unfitError{resp.NotSent(at.prefix(at.label(), reason))}
	default:
		at.fit.Store(true)
		return nil
	}

	if !cancelled(ctx, err) {
		err = diagnose(err, s.hints, time.Since(began))
	}
	_, err = s.outcome(ctx, at, Reply{Err: err}) // adds the name of the server
	return err
}

// outcome returns a reply, or the reply's error with the name of the server. If the error may mean
// that another server has the key now, outcome starts a search for the servers. After a READONLY
// error, the Subscriber connects again.
func (s *Store) outcome(ctx context.Context, at *server, r Reply) (any, error) {
	err := r.Err
	switch {
	case err == nil:
		return r.Value, nil
	case cancelled(ctx, err):
		// Report that the caller cancelled the call, and not the timeout that err shows. As after
		// a timeout, the server may have executed the command.
		return nil, s.prefix(at.label(), ctx.Err())
	}

	// Callers check for NOSCRIPT, so do not change this error, even if the text contains a
	// password.
	if redis.HasErrorPrefix(err, unknownScript) {
		return nil, err
	}

	s.noteFailure(err)
	if resp.IsReadOnly(err) {
		// Let the Subscriber connect again, because the address leads to a new master now or soon,
		// and the messages of that master do not arrive on the old connection.
		s.Demoted(at.node)
	}

	// If the Store has the address of a single server, that address may be wrong.
	single := !s.isCluster && !s.bySentinels
	_, moved := redis.IsMovedError(err)
	switch {
	case single && moved:
		err = fmt.Errorf("%w (this is one server of a cluster: use redis-cluster://host:port)", err)
	case single && resp.IsReadOnly(err):
		err = fmt.Errorf("%w (it is a replica: name the master, or the sentinels)", err)
	case resp.IsReply(err), errors.Is(err, redis.ErrClosed) && s.opened == nil:
		err = said{diagnose(err, s.hints, 0).Error(), err}
	}

	return nil, s.prefix(at.label(), err)
}

// redirects reports whether a server of a cluster refused a command because another one has the
// slot.
func redirects(err error) bool {
	return redis.HasErrorPrefix(err, "MOVED") || redis.HasErrorPrefix(err, "ASK ")
}

// The function cancelled reports whether a call returned err because ctx was cancelled. The error
// of such a call is a timeout: see errNoReply.
func cancelled(ctx context.Context, err error) bool {
	return ctx.Err() == context.Canceled && errors.Is(err, os.ErrDeadlineExceeded)
}

// AcquireShared makes one attempt to take c.Key shared. fenceTTL is the term of a fence counter in
// ms.
func (s *Store) AcquireShared(ctx context.Context, c backend.Claim,
	fenceTTL string) (backend.Grant, error) {
	call := Call{
		Keys: []string{LockKey(c.Key), IntentKey(c.Key)},
		Args: []string{c.Token + Mark + c.Owner, Millis(c.TTL)},
	}

	if c.Fenced {
		// The script makes a fence only if it receives the counter's key.
		call.Keys = append(call.Keys, DerivedKey("fence", c.Key))
		call.Args = append(call.Args, fenceTTL)
	}

	reply, err := s.Run(ctx, sharedAcquireScript, call)
	if err != nil {
		return backend.Grant{}, err
	}
	return s.Granted(reply, c)
}

// ReleaseShared releases a shared hold. If the release is to be published, the last arguments are
// the message, the channel, and the command that publishes.
func (s *Store) ReleaseShared(ctx context.Context, c backend.Claim, publish ...string) error {
	return s.Owned(s.Run(ctx, sharedReleaseScript, Call{
		Keys: []string{LockKey(c.Key)},
		Args: append([]string{c.Token + Mark, c.Owner}, publish...),
	}))
}

// Renew runs sc once for each claim, and passes the results to the function done, as
// backend.Driver's Renew does. The script extends the hold on its key. Its arguments are the
// claim's token with the text mark after it, and the term in milliseconds. For a shared hold, the
// constant Mark follows the token, the owner is the third argument, and sharedrenew.lua extends the
// hold. The script returns 1, or 0 if the token does not hold the key.
func (s *Store) Renew(ctx context.Context, sc *Script, cs []backend.Claim, mark string,
	done func(i int, g backend.Grant, err error)) {
	calls := make([]Call, len(cs))
	for i, c := range cs {
		texts := []string{LockKey(c.Key), c.Token + mark, Millis(c.TTL)}
		if c.Shared {
			texts = []string{texts[0], c.Token + Mark, texts[2], c.Owner}
		}
		calls[i] = Call{Keys: texts[:1], Args: texts[1:]}
	}
	s.RunEach(ctx, sc, calls, func(i int, reply any, err error) {
		done(i, backend.Grant{}, s.Owned(reply, err))
	})
}

// Inspect runs a script that reports on a key; see [Found]. The keys of the script are the lock and
// the fence counter.
func (s *Store) Inspect(ctx context.Context, sc *Script, key string) (backend.Status, error) {
	reply, err := s.Run(ctx, sc, Call{Keys: []string{LockKey(key), DerivedKey("fence", key)}})
	if err != nil {
		return backend.Status{}, err
	}
	f, ok := Decode(reply)
	if !ok {
		return backend.Status{}, s.Unexpected(reply)
	}
	return f.Status(), nil
}

// Granted decodes the reply of a script that takes a hold. The reply is one of these:
//
//   - 1 is a grant without a fence. A text is a grant with that fence.
//   - {0, PTTL, start of the record} means that the key is held. If the record is shared,
//     a member of it follows.
//   - {-1} means that the value of the fence counter is not a number that hasp wrote.
//
// Any other reply is an error. So is a grant with a fence if c is not fenced, or without one if c
// is fenced.
func (s *Store) Granted(reply any, c backend.Claim) (backend.Grant, error) {
	switch r := reply.(type) {
	case int64:
		if r == 1 && !c.Fenced {
			return backend.Grant{}, nil
		}
	case string:
		if n, err := strconv.ParseUint(r, 10, 64); err == nil && n > 0 && c.Fenced {
			return backend.Grant{Fence: n}, nil
		}
	case []any:
		if found, ok := Refusal(reply); ok {
			return backend.Grant{}, found.Held()
		}
		if c.Fenced && len(r) == 1 && r[0] == int64(-1) {
			return backend.Grant{}, NoFence(DerivedKey("fence", c.Key))
		}
	}

	return backend.Grant{}, s.Unexpected(reply)
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

// List yields the keys that begin with prefix and have records, which l finds. It reads the records
// by the script sc. The keys of sc are the lock and the fence counter, and [Found] describes its
// reply. The argument timeout limits each call to a server.
func (s *Store) List(ctx context.Context, prefix string, timeout time.Duration, l Listing,
	sc *Script) iter.Seq2[backend.Entry, error] {
	return s.ListBy(ctx, prefix, timeout, Reading{
		Listing: l,
		Script:  sc,
		Call: func(c Candidate) Call {
			return Call{Keys: []string{LockKey(c.Key), DerivedKey("fence", c.Key)}}
		},
		Status: func(_ Candidate, reply any) (backend.Status, bool, error) {
			f, ok := Decode(reply)
			if !ok {
				return backend.Status{}, false, s.Unexpected(reply)
			}
			return f.Status(), f.IsOurs(), nil
		},
	})
}

// ListBy is List for a script with other keys and another reply. After each call to a server, it
// sleeps for as long as the call took.
func (s *Store) ListBy(ctx context.Context, prefix string, timeout time.Duration,
	r Reading) iter.Seq2[backend.Entry, error] {
	return func(yield func(backend.Entry, error) bool) {
		for page, err := range s.Scan(ctx, prefix, timeout, r.Listing) {
			if err != nil {
				yield(backend.Entry{}, err)
				return
			}
			for candidates := range slices.Chunk(page, recordsAtOnce) {
				began := time.Now()
				entries, err := r.entries(ctx, s, timeout, candidates)
				if err == nil {
					err = rest(ctx, began)
				}
				if err != nil {
					// if ctx has ended, that is why the call failed
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

// Scan yields pages of the keys that begin with prefix and may be held or waited for. A page may be
// empty. After each call to a server, Scan sleeps for as long as the call took.
func (s *Store) Scan(ctx context.Context, prefix string, timeout time.Duration,
	l Listing) iter.Seq2[[]Candidate, error] {
	return func(yield func([]Candidate, error) bool) {
		sc := &scan{s: s, timeout: timeout, prefix: prefix, queue: l.Queue}
		sc.run(ctx, l, yield)
	}
}
