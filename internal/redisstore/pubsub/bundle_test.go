package pubsub

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/hasplock/hasp/internal/redisstore/slot"
)

// On a cluster, the channels of a command are in one slot. No command has all channels
// at once.
func TestBundle(t *testing.T) {
	c := &link{node: &node{b: &Subscriber{}}}
	chs := []*channel{{name: "{a}1"}, {name: "b"}, {name: "{a}2"}, {name: "c", alone: true}}
	for kind, want := range map[int32]string{kindPlain: "[1 3]", kindSharded: "[1 1 2]"} {
		c.node.b.kind.Store(kind)
		var sizes []int
		for _, cmd := range c.bundleLocked("subscribe", chs) {
			sizes = append(sizes, len(cmd.chs))
			for _, ch := range cmd.chs {
				if kind == kindSharded && slot.Of(ch.name) != slot.Of(cmd.chs[0].name) {
					t.Errorf("%s and %s in one command", ch.name, cmd.chs[0].name)
				}
			}
		}
		slices.Sort(sizes)
		if got := fmt.Sprint(sizes); got != want {
			t.Errorf("kind %d: got commands of %s channels, want %s", kind, got, want)
		}
	}
	c.node.b.kind.Store(kindPlain)
	many := make([]*channel, 2*perCommand+1)
	for i := range many {
		many[i] = &channel{name: fmt.Sprint(i)}
	}
	if n := len(c.bundleLocked("subscribe", many)); n != 3 {
		t.Errorf("%d commands", n)
	}
}

// Two replies may report that the same channel has moved. Only the first one counts, and
// none after Close.
func TestChannelMovesOnce(t *testing.T) {
	for closed, wants := range map[bool]int{false: 1, true: 0} {
		b := New(Config{
			Server: func(context.Context, string) (redis.UniversalClient, error) { return nil, redis.ErrClosed },
			Reload: func() {},
		})
		n := &node{b: b}
		ch := &channel{name: "news", node: n}
		b.mu.Lock()
		b.closed = closed
		b.moveLocked(n, []*channel{ch})
		b.moveLocked(n, []*channel{ch})
		moves := ch.moves
		b.mu.Unlock()
		b.end()
		b.wg.Wait()
		if moves != wants {
			t.Errorf("closed %t: got %d moves, want %d", closed, moves, wants)
		}
	}
}

// A channel may move to another server while its subscription is in flight. An error of
// the old server then changes nothing.
func TestRefusalAfterTheChannelHasMoved(t *testing.T) {
	b := New(Config{
		Server: func(context.Context, string) (redis.UniversalClient, error) { return nil, redis.ErrClosed },
		Reload: func() {},
	})
	defer b.wg.Wait()
	defer b.end()
	for _, others := range []int{0, 1} {
		from, to := &node{b: b}, &node{b: b}
		moved := &channel{name: "moved", node: to, state: isConfirmed}
		chs := []*channel{moved}
		for range others {
			chs = append(chs, &channel{name: "stays", node: from, state: isSent})
		}
		c := &link{node: from, expect: []command{{name: "subscribe", chs: chs}}}
		if !c.refused(errors.New("LOADING Redis is loading the dataset in memory")) {
			t.Error("an unexpected reply")
		}
		b.mu.Lock()
		if moved.state != isConfirmed || slices.Contains(from.pending, moved) || len(c.expect) != 0 {
			t.Errorf("with %d others: state %v, pending %v, %d commands unanswered", others, moved.state, from.pending, len(c.expect))
		}
		b.mu.Unlock()
	}
}
