package pubsub

import (
	"fmt"
	"slices"
	"testing"

	"github.com/hasplock/hasp/internal/redisstore/slot"
)

// One command is for channels of one slot, and not for all of them at once.
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
