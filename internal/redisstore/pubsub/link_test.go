package pubsub

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/redis/go-redis/v9"
)

// Two replies may report that the same channel has moved. Only the first one counts, and
// none after Close.
func TestChannelMovesOnce(t *testing.T) {
	for closed, wants := range map[bool]int{false: 1, true: 0} {
		var moves atomic.Int64
		b := New(Config{
			Server: func(context.Context, string) (redis.UniversalClient, error) { return nil, redis.ErrClosed },
			Reload: func() { moves.Add(1) },
		})
		n := &node{b: b}
		ch := &channel{name: "news", node: n}
		b.mu.Lock()
		b.closed = closed
		b.moveLocked(n, []*channel{ch})
		b.moveLocked(n, []*channel{ch})
		b.mu.Unlock()
		b.end()
		b.wg.Wait()
		if moves := int(moves.Load()); moves != wants {
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

// A channel may come back before its old subscription has been ended.
func TestUnsubscribeComesFirst(t *testing.T) {
	b := New(Config{})
	n := &node{b: b, wake: make(chan struct{}, 1)}
	ch := &channel{name: "news", node: n}
	b.channels[ch.name] = ch
	n.addLocked(ch)
	c := &link{node: n, gone: []*channel{{name: ch.name}}}
	for _, want := range []string{"unsubscribe", "subscribe"} {
		if cmds := c.nextLocked(true); len(cmds) != 1 || cmds[0].name != want {
			t.Errorf("got %v, want %s", cmds, want)
		}
	}
}
