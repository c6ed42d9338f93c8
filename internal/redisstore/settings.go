package redisstore

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/redisstore/resp"
)

// settings are what all parts of a Store know. They do not change once the Store was made.
type settings struct {
	name        string // the prefix of errors that do not name a single server
	plain       bool   // the client may have hooks, which expect texts as arguments
	isCluster   bool   // keys are in slots, and channels may be in slots
	bySentinels bool
	namesRun    bool     // replies contain the run ID of the server
	mayEvict    bool     // the server may evict keys
	connections int      // how many connections to one server Send replaces for one command
	replicas    int      // how many replicas must confirm a hold
	secrets     []string // no error may contain these
	hints       hints    // for errors of the check
}

// isDemoted reports whether a replica refused a command, and another connection may lead to the
// master, as after a failover behind one address. The connection to the replica is closed: go-redis
// closes that of a command which begins a pipeline, and hasp closes that of a wire.
func (s *settings) isDemoted(err error) bool { return !s.isCluster && resp.IsReadOnly(err) }

// unconfirmed checks the reply to WAIT. It returns an error if too few replicas have confirmed, or
// if this is not known. The master has the holds then, but a failover could lose them.
func (s *settings) unconfirmed(wait Reply) error {
	n, ok := wait.Value.(int64)
	switch {
	case resp.IsReply(wait.Err): // with the whole text as the reply, because diagnose shows only that
		return resp.ReplyError("replicas did not confirm: " + wait.Err.Error())
	case wait.Err != nil:
		return fmt.Errorf("replicas did not confirm: %w", wait.Err)
	case !ok:
		return resp.Unexpected(wait.Value, s.secrets...)
	case n < int64(s.replicas):
		return resp.ReplyError(fmt.Sprintf("%d of %d replicas confirmed in time", n, s.replicas))
	}

	return nil
}

// explain returns err, which says that no server was found, with a hint what to do. If ctx was
// cancelled, explain returns err unchanged, because then no server is at fault.
func (s *settings) explain(ctx context.Context, began time.Time, err error) error {
	if ctx.Err() == context.Canceled {
		return err
	}
	return diagnose(err, s.hints, time.Since(began))
}

// fail adds the name of the Store to an error.
func (s *settings) fail(err error) error { return s.prefix(s.name, err) }

// prefix adds a name to an error, and hides passwords, because a server's error may repeat the
// command. If err or the reply in it contains a password, prefix also drops the wrapped errors,
// which a program could print.
func (s *settings) prefix(name string, err error) error {
	texts := err.Error()
	if reply := redis.Error(nil); errors.As(err, &reply) {
		texts += reply.Error() // the text of err may contain only a part of the reply
	}
	if resp.Hide(texts, s.secrets...) != texts { // there is a password in the texts
		err = errors.New(resp.Hide(err.Error(), s.secrets...))
	}
	return fmt.Errorf("%s: %w", name, err)
}

// Unexpected returns the error for a reply that no version of Redis gives.
func (s *settings) Unexpected(reply any) error {
	return s.fail(resp.Unexpected(reply, s.secrets...))
}
