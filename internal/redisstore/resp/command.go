package resp

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// Command is a command that go-redis sends once, whatever the settings of the
// client: it does not retry after a timeout, in a pipeline or on a cluster.
type Command struct{ *redis.Cmd }

// NewCommand returns a command that has not been sent.
func NewCommand(ctx context.Context, args []any) *Command {
	return &Command{redis.NewCmd(ctx, args...)}
}

// NoRetry reports to go-redis that it must not repeat the command.
func (*Command) NoRetry() bool { return true }

// Clone returns a copy that keeps NoRetry.
func (c *Command) Clone() redis.Cmder { return &Command{c.Cmd.Clone().(*redis.Cmd)} }

// Process sends one command. The command has the reply or the error.
func Process(ctx context.Context, rdb redis.UniversalClient, cmd *Command) {
	err := Survive(func() error { return rdb.Process(ctx, cmd) })
	if err != nil && cmd.Err() == nil {
		cmd.SetErr(err)
	}
}

// IsReply reports whether err is a server's reply.
func IsReply(err error) bool {
	var reply redis.Error
	return errors.As(err, &reply)
}

// Unexpected returns the error for a reply that no version of Redis gives. It has
// the beginning of the reply, without the secrets.
func Unexpected(reply any, secrets ...string) error {
	text := fmt.Sprintf("%v", reply)

	// Before the text is cut, so that no part of a secret is left.
	for _, secret := range secrets {
		text = strings.ReplaceAll(text, secret, "***")
	}
	if len(text) > 100 {
		text = text[:100] + "…"
	}
	return fmt.Errorf("unexpected reply %s", strings.ToValidUTF8(text, "\uFFFD"))
}

// Receive is ps.ReceiveTimeout, but returns an error where that panics:
// ReceiveTimeout assumes that every reply has the form of a message.
func Receive(ps *redis.PubSub, ctx context.Context, timeout time.Duration) (msg any, err error) {
	defer func() {
		if r := recover(); r != nil {
			msg, err = nil, fmt.Errorf("%w: %v", errProtocol, r)
		}
	}()
	return ps.ReceiveTimeout(ctx, timeout)
}

// Survive returns the error of f, and an error if f panics with a runtime.Error.
// f calls a client that the caller of hasp may have passed. Such a client has no
// guard, so a reply can make go-redis panic. Many calls run on goroutines of
// hasp's own, where the panic would end the program.
func Survive(f func() error) (err error) {
	defer func() {
		switch r := recover().(type) {
		case nil:
		case runtime.Error:
			err = fmt.Errorf("the client of Redis panicked: %w", r)
		default:
			panic(r)
		}
	}()
	return f()
}
