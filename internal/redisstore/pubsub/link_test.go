package pubsub

import (
	"context"
	"errors"
	"testing"
)

// While a subscription is in flight, its channel may move to another server. The answer of
// the old server then changes nothing.
func TestAnswerAfterTheChannelHasMoved(t *testing.T) {
	b := New(Config{})
	for name, answer := range map[string]func(k *link) bool{
		"refused": func(k *link) bool {
			return k.handle("", "", "", errors.New("LOADING Redis loads its data"))
		},
		"confirmed": func(k *link) bool { return k.handle("subscribe", "moved", "", nil) },
	} {
		from, to := &link{b: b}, &link{b: b}
		ch := &channel{name: "moved", link: to}
		from.sent = []command{{"subscribe", ch}}
		if !answer(from) || len(from.sent) != 0 {
			t.Errorf("%s: an unexpected reply", name)
		}
		if ch.state != isPending || ch.link != to {
			t.Errorf("%s: state %v", name, ch.state)
		}
	}
}

// A channel may come back before its old subscription has been ended.
func TestUnsubscribeComesFirst(t *testing.T) {
	b := New(Config{})
	old := &channel{name: "news"}
	k := &link{b: b}
	b.links[nil], b.channels["news"], old.link = k, old, k
	k.ctx, k.drop = context.WithCancelCause(b.open)
	b.removeUnused() // such as the channel, which has no listeners
	b.links[nil] = k
	b.placeLocked(&channel{name: "news"}, nil)
	cmds := k.take(false)
	if len(cmds) != 2 || cmds[0] != (command{"unsubscribe", old}) || cmds[1].name != "subscribe" {
		t.Errorf("got %v", cmds)
	}
}

const (
	DeadAfter    = deadAfter
	Lingering    = lingering
	TickEvery    = tickEvery
	WriteTimeout = writeTimeout
)

// Wait returns when no goroutine of b runs any more.
func (b *Subscriber) Wait() { b.wg.Wait() }
