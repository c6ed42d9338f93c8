package conformance

import (
	"testing"

	"github.com/anishathalye/porcupine"
)

func TestModelOfALock(t *testing.T) {
	op := func(s step, call, ret int64) porcupine.Operation {
		return porcupine.Operation{ClientId: s.client, Input: s, Call: call, Return: ret}
	}
	acquire := func(hold int, yes bool) step { return step{op: "acquire", hold: hold, yes: yes} }
	read := func(s step) step { s.shared = true; return s }
	withFence := func(s step, n uint64) step { s.fence = n; return s }
	for name, tt := range map[string]struct {
		ops           []porcupine.Operation
		loose, strict bool // want
	}{
		"one after another": {[]porcupine.Operation{
			op(acquire(1, true), 1, 2), op(step{op: "release", hold: 1, yes: true}, 3, 4), op(acquire(2, true), 5, 6)}, true, true},
		"two at once": {[]porcupine.Operation{
			op(acquire(1, true), 1, 2), op(acquire(2, true), 3, 4), op(step{op: "release", hold: 1, yes: true}, 5, 6)}, false, false},
		"two at once, never released": {[]porcupine.Operation{
			op(acquire(1, true), 1, 2), op(acquire(2, true), 3, 4)}, false, false},
		"two at once, of different keys": {[]porcupine.Operation{
			op(acquire(1, true), 1, 2), op(step{op: "acquire", key: 1, hold: 2, yes: true}, 3, 4)}, true, true},
		"the second while the first is released": {[]porcupine.Operation{
			op(acquire(1, true), 1, 2), op(acquire(2, true), 3, 6), op(step{op: "release", hold: 1, yes: true}, 4, 5)}, true, true},
		"refused by a holder": {[]porcupine.Operation{
			op(acquire(1, true), 1, 2), op(acquire(2, false), 3, 4)}, true, true},
		"refused by nobody": {[]porcupine.Operation{
			op(acquire(2, false), 1, 2), op(acquire(1, true), 3, 4)}, true, false},
		"refused by another of its Client": {[]porcupine.Operation{
			op(step{op: "acquire", hold: 2, maybe: true}, 1, 2)}, true, true},
		"a stranger's release": {[]porcupine.Operation{
			op(acquire(1, true), 1, 2), op(step{op: "release", hold: 2, yes: true}, 3, 4)}, false, false},
		"its own release refused": {[]porcupine.Operation{
			op(acquire(1, true), 1, 2), op(step{op: "release", hold: 1}, 3, 4)}, false, false},
		"renewal after the release": {[]porcupine.Operation{
			op(acquire(1, true), 1, 2), op(step{op: "release", hold: 1, yes: true}, 3, 4), op(step{op: "renew", hold: 1, yes: true}, 5, 6)}, false, false},
		"two readers at once, then a writer": {[]porcupine.Operation{
			op(read(acquire(1, true)), 1, 2), op(read(acquire(2, true)), 3, 4), op(read(step{op: "renew", hold: 1, yes: true}), 5, 6),
			op(read(step{op: "release", hold: 1, yes: true}), 7, 8), op(acquire(3, false), 9, 10),
			op(read(step{op: "release", hold: 2, yes: true}), 11, 12), op(acquire(4, true), 13, 14)}, true, true},
		"a writer beside a reader": {[]porcupine.Operation{
			op(read(acquire(1, true)), 1, 2), op(acquire(2, true), 3, 4)}, false, false},
		"a reader beside a writer": {[]porcupine.Operation{
			op(acquire(1, true), 1, 2), op(read(acquire(2, true)), 3, 4)}, false, false},
		"a reader refused by a reader": {[]porcupine.Operation{
			op(read(acquire(1, true)), 1, 2), op(read(acquire(2, false)), 3, 4)}, true, false},
		"the end of one reader ends another": {[]porcupine.Operation{
			op(read(acquire(1, true)), 1, 2), op(read(acquire(2, true)), 3, 4), op(read(step{op: "release", hold: 1, yes: true}), 5, 6),
			op(read(step{op: "renew", hold: 2}), 7, 8)}, false, false},
		"a reader with the fence of another": {[]porcupine.Operation{
			op(withFence(read(acquire(1, true)), 7), 1, 2), op(withFence(read(acquire(2, true)), 7), 3, 4)}, false, false},
		"two readers at the same moment, with one fence": {[]porcupine.Operation{
			op(withFence(read(acquire(1, true)), 7), 1, 3), op(withFence(read(acquire(2, true)), 7), 2, 4)}, true, true},
		"a fence that repeats": {[]porcupine.Operation{
			op(withFence(acquire(1, true), 7), 1, 2), op(step{op: "release", hold: 1, yes: true}, 3, 4),
			op(withFence(acquire(2, true), 7), 5, 6)}, false, false},
		"a fence that grows over a hold without": {[]porcupine.Operation{
			op(withFence(acquire(1, true), 7), 1, 2), op(step{op: "release", hold: 1, yes: true}, 3, 4),
			op(acquire(2, true), 5, 6), op(step{op: "release", hold: 2, yes: true}, 7, 8),
			op(withFence(step{op: "wait", hold: 3, yes: true}, 8), 9, 10)}, true, true},
	} {
		t.Run(name, func(t *testing.T) {
			h := &history{ops: tt.ops}
			if err := h.check(false); (err == nil) != tt.loose {
				t.Errorf("got %v, want explained: %v", err, tt.loose)
			}
			if err := h.check(true); (err == nil) != tt.strict {
				t.Errorf("strict: got %v, want explained: %v", err, tt.strict)
			}
		})
	}
}

// TestExplain marks refusals that overlap a call of the same Client, and no
// others.
func TestExplain(t *testing.T) {
	refused := step{op: "acquire", hold: 9}
	for name, tt := range map[string]struct {
		other     step
		call, ret int64
		ordered   bool
		want      bool
	}{
		"same Client, at the same time": {step{op: "release"}, 4, 6, false, true},
		"same Client, before":           {step{op: "release"}, 1, 2, false, false},
		"same Client, another key":      {step{op: "release", key: 1}, 4, 6, false, false},
		"another Client waits":          {step{op: "wait", client: 1}, 4, 6, false, false},
		"another Client waits in order": {step{op: "wait", client: 1}, 4, 6, true, true},
		"another Client has it":         {step{op: "acquire", client: 1}, 4, 6, true, false},
	} {
		s := &suite{}
		s.traits.Ordered = tt.ordered
		h := &history{e: &env{suite: s}, ops: []porcupine.Operation{
			{Input: refused, Call: 5, Return: 7}, {Input: tt.other, Call: tt.call, Return: tt.ret}}}
		h.explain()
		if got := h.ops[0].Input.(step).maybe; got != tt.want {
			t.Errorf("%s: explained %v, want %v", name, got, tt.want)
		}
	}
}
