package main

import (
	"context"
	"strings"
	"sync"

	"github.com/redis/go-redis/v9"
)

// votes watches what servers answer to those who ask for a key with SET NX.
// It is a hook of their clients.
type votes struct {
	mu   sync.Mutex // guards all below
	open map[any]*ballot
	seen tally
}

// ballot is one attempt: the answers to one value that was to be set.
type ballot struct{ yes, all int }

// tally counts attempts, and those that had a vote but no majority.
type tally struct{ all, split int }

func (t *tally) add(b *ballot) {
	t.all++
	if b.yes > 0 && b.yes <= nodes/2 {
		t.split++
	}
}

func (*votes) DialHook(next redis.DialHook) redis.DialHook { return next }

func (v *votes) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		v.cast(cmd, err)
		return err
	}
}

func (v *votes) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		err := next(ctx, cmds)
		for _, cmd := range cmds {
			v.cast(cmd, cmd.Err())
		}
		return err
	}
}

// cast notes the answer to a command.
func (v *votes) cast(cmd redis.Cmder, err error) {
	args := cmd.Args()
	if len(args) < 4 || !strings.EqualFold(cmd.Name(), "set") || !holds(args[3:], "nx") {
		return
	}
	yes := err == nil
	if b, ok := cmd.(*redis.BoolCmd); ok { // to which no is no error
		yes = yes && b.Val()
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	b := v.open[args[2]]
	if b == nil && v.open == nil {
		return // nobody counts yet
	}
	if b == nil {
		b = new(ballot)
		v.open[args[2]] = b
	}
	if b.all++; yes {
		b.yes++
	}
	if b.all == nodes { // redsync tries again with the same value
		v.seen.add(b)
		delete(v.open, args[2])
	}
}

func holds(args []any, word string) bool {
	for _, a := range args {
		if s, ok := a.(string); ok && strings.EqualFold(s, word) {
			return true
		}
	}
	return false
}

// begin forgets what was before.
func (v *votes) begin() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.open, v.seen = map[any]*ballot{}, tally{}
}

// count counts attempts since begin. One that did not ask all was refused by
// those that it did ask.
func (v *votes) count() tally {
	v.mu.Lock()
	defer v.mu.Unlock()
	t := v.seen
	for _, b := range v.open {
		t.add(b)
	}
	return t
}
