// Package resp has hasp's additions to go-redis: commands that are sent only once, and errors for
// replies.
package resp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"

	"github.com/redis/go-redis/v9"
)

// Reply is the reply to one command, or its error.
type Reply struct {
	Value any
	Err   error
	Run   string // the run ID of the server that replied; empty unless the Store asks for it
}

// ReplyError is an error that a server replied, or that hasp found in its replies.
type ReplyError string

func (e ReplyError) Error() string { return string(e) }

// RedisError marks the error as a reply, as go-redis marks the replies that it receives.
func (ReplyError) RedisError() {}

// Command is a command that go-redis sends only once, whatever the settings of the client. It does
// not retry the command after a timeout, not even in a pipeline or on a cluster.
type Command struct{ *redis.Cmd }

// NoRetry reports to go-redis that it must not repeat the command.
func (Command) NoRetry() bool { return true }

// Clone returns a copy that keeps NoRetry.
func (c Command) Clone() redis.Cmder { return Command{c.Cmd.Clone().(*redis.Cmd)} }

// NewCommand returns a command with the arguments all, which must be texts or pointers to texts.
func NewCommand(all ...any) Command { return Command{redis.NewCmd(context.Background(), all...)} }

// Reply returns the reply to a command. The argument err is the error of the call.
func (c Command) Reply(err error) Reply {
	switch {
	case c.Err() == redis.Nil:
		return Reply{}
	case err != nil && c.Err() == nil && c.Val() == nil:
		// Nothing was stored in the command, because go-redis has panicked, or a hook has stopped
		// the pipeline.
		return Reply{Err: err}
	}
	return Reply{Value: c.Val(), Err: c.Err()}
}

// unsent is the error of a command that was certainly not sent.
type unsent struct{ error }

func (u unsent) Unwrap() error { return u.error }

// NotSent returns err, and says that the command was certainly not sent.
func NotSent(err error) error { return unsent{err} }

// IsUnsent reports whether err says that the command was certainly not sent. If the client is not
// hasp's own, this is known only if no connection could be made.
func IsUnsent(err error) bool {
	var op *net.OpError
	switch {
	case errors.As(err, new(unsent)),
		errors.Is(err, redis.ErrPoolTimeout), errors.Is(err, redis.ErrPoolExhausted):
		return true
	case errors.As(err, &op) && op.Op == "dial":
		return true
	}

	// A server that takes no more connections replies this, and executes no command.
	return redis.HasErrorPrefix(err, "max number of clients") // without "ERR ", which it strips
}

// IsReply reports whether err is a server's reply.
func IsReply(err error) bool { return errors.As(err, new(redis.Error)) }

// IsReadOnly reports whether err is the reply of a replica to a write. Redis 6.2 puts the word
// READONLY into the middle of the error of a script.
func IsReadOnly(err error) bool { return IsReply(err) && strings.Contains(err.Error(), "READONLY") }

// Unexpected returns the error for a reply that no version of Redis gives. It contains the
// beginning of the reply, without the secrets.
func Unexpected(reply any, secrets ...string) error {
	// Hide secrets before the text is cut, so that no part of a secret is left.
	text := Hide(fmt.Sprintf("%v", reply), secrets...)
	if len(text) > 100 {
		text = text[:100] + "…"
	}
	return fmt.Errorf("unexpected reply %s", strings.ToValidUTF8(text, "\uFFFD"))
}

// cutSecret is the length of the shortest part of a secret that Hide finds.
const cutSecret = 8

// Hide returns text without the secrets and without their beginnings, because a server may repeat
// only a part of a command. Redis cuts the arguments of an unknown command after 128 bytes.
func Hide(text string, secrets ...string) string {
	for _, secret := range secrets {
		if secret == "" { // there is no password
			continue
		}
		begin := secret[:min(len(secret), cutSecret)]
		rest := secret[min(len(secret), cutSecret):]
		parts := strings.Split(text, begin)
		for i := range parts[1:] {
			// Also remove as much of the rest of the secret as the text contains.
			after := parts[i+1]
			n := 0
			for n < min(len(rest), len(after)) && rest[n] == after[n] {
				n++
			}
			parts[i+1] = after[n:]
		}
		text = strings.Join(parts, "***")
	}

	return text
}

// Survive runs f, which calls a client of go-redis, and returns the error of f. If f panics,
// Survive returns an error. A reply can make go-redis panic, and so can a hook. In a goroutine of
// hasp, where many calls run, the panic would end the program.
func Survive(f func() error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("the client of Redis panicked: %v", r)
		}
	}()
	return f()
}
