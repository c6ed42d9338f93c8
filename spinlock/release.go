package spinlock

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/internal/redisstore"
)

// Redis 8.4 and Valkey 9 have a command that deletes a key if it has a given value. It costs
// the server less than half of what the releasing script costs. The first release of a driver
// finds out whether there is such a command: the script asks the server. So a server without
// the command never gets it.
//
// The command compares the whole record, but only the token is a proof. So if the command
// deletes nothing, the script decides whether the hold is lost.

// deletion is what a driver knows of the command.
type deletion struct {
	// command is the name of the command, delex or delifeq. It is nil until a script has
	// asked the server, and byScript if releases do not use a command.
	command atomic.Pointer[string]

	// answered says that a server has answered the command once.
	answered atomic.Bool
}

// byScript is the command of a driver that releases by the script.
var byScript = new(string)

// found records the command that a script has found, or an empty string.
func (d *deletion) found(name string) {
	command := byScript
	if name == "delex" || name == "delifeq" {
		command = &name
	}
	d.command.CompareAndSwap(nil, command)
}

// release frees key, if c.Token holds it.
func (d *Driver) release(ctx context.Context, c backend.Claim, key string) error {
	record := c.Token + mark + c.Owner
	var args []any
	switch command := d.deletion.command.Load(); {
	case command == nil:
		return d.releaseAndFind(ctx, c, key)
	case command == byScript:
		return d.releaseByScript(ctx, c, key)
	case *command == "delex":
		args = []any{"delex", key, "ifeq", record}
	default:
		args = []any{"delifeq", key, record}
	}

	reply, refusal := d.store.Send(ctx, key, false, args...)
	switch {
	case refusal == nil && reply != int64(0):
		d.deletion.answered.Store(true)
		return d.store.Owned(reply, nil)
	case refusal == nil:
		d.deletion.answered.Store(true)
	case !errors.As(refusal, new(redis.Error)):
		// The outcome is unknown. A proxy may close the connection whenever it gets this
		// command, so a first command without an answer is also the last one.
		if !d.deletion.answered.Load() {
			d.deletion.command.Store(byScript)
		}
		return refusal
	}

	err := d.releaseByScript(ctx, c, key)
	// The script could free the key, and the command could not.
	if err == nil && isLasting(refusal) {
		d.deletion.command.Store(byScript)
	}
	return err
}

// isLasting reports whether the server will refuse a command again that it refused with err.
// A server that is only busy, or not the master any more, begins its error with another word.
func isLasting(err error) bool {
	var reply redis.Error
	return errors.As(err, &reply) && (strings.HasPrefix(reply.Error(), "ERR ") || strings.HasPrefix(reply.Error(), "NOPERM "))
}

// releaseByScript frees key by the script, if c.Token holds it.
func (d *Driver) releaseByScript(ctx context.Context, c backend.Claim, key string) error {
	return d.store.Owned(d.store.Run(ctx, releaseScript, redisstore.Call{Keys: []string{key}, Args: []any{c.Token + mark}}))
}

// releaseAndFind is releaseByScript, and also finds out which command there is.
func (d *Driver) releaseAndFind(ctx context.Context, c backend.Claim, key string) error {
	reply, err := d.store.Run(ctx, releaseScript, redisstore.Call{Keys: []string{key}, Args: []any{c.Token + mark, "", "find"}})
	if parts, _ := reply.([]any); len(parts) == 2 {
		if name, ok := parts[1].(string); ok {
			d.deletion.found(name)
			reply = parts[0]
		}
	}
	return d.store.Owned(reply, err)
}
