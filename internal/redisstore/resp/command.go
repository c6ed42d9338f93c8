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

// Command is a command that go-redis does not repeat, whatever the settings of
// the client: not after a time-out, not in a pipeline, not on a cluster.
type Command struct{ *redis.Cmd }

func NewCommand(ctx context.Context, args []any) *Command {
	return &Command{redis.NewCmd(ctx, args...)}
}

// NoRetry is asked by go-redis.
func (*Command) NoRetry() bool { return true }

// Clone keeps NoRetry.
func (c *Command) Clone() redis.Cmder { return &Command{c.Cmd.Clone().(*redis.Cmd)} }

// Process sends one command. Its error is the command's.
func Process(ctx context.Context, rdb redis.UniversalClient, cmd *Command) {
	err := Survive(func() error { return rdb.Process(ctx, cmd) })
	if err != nil && cmd.Err() == nil {
		cmd.SetErr(err)
	}
}

// IsReply reports whether err is what a server said.
func IsReply(err error) bool {
	var reply redis.Error
	return errors.As(err, &reply)
}

// Unexpected is the error of a reply that no version of Redis gives: of a reply
// that may be long, the beginning, and of a secret, which may be in there, no part.
func Unexpected(reply any, secrets ...string) error {
	text := fmt.Sprintf("%v", reply)
	for _, secret := range secrets {
		text = strings.ReplaceAll(text, secret, "***")
	}
	if len(text) > 100 {
		text = text[:100] + "…"
	}
	return fmt.Errorf("unexpected reply %s", strings.ToValidUTF8(text, "\uFFFD"))
}

// Receive is PubSub's ReceiveTimeout, which takes it for granted that what
// comes is a message, and would end the program.
func Receive(ps *redis.PubSub, ctx context.Context, timeout time.Duration) (msg any, err error) {
	defer func() {
		if r := recover(); r != nil {
			msg, err = nil, fmt.Errorf("%w: %v", errProtocol, r)
		}
	}()
	return ps.ReceiveTimeout(ctx, timeout)
}

// Survive is f, which has a client that was handed in talk to its server. No
// guard is before that one, and what go-redis does not survive would end the
// program, since much is asked by goroutines of hasp's own.
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
