package conformance

import (
	"testing"

	"github.com/anishathalye/porcupine"
)

func TestModelOfALock(t *testing.T) {
	// inTurn returns calls that do not overlap, in this order.
	inTurn := func(steps ...step) (ops []porcupine.Operation) {
		for i, s := range steps {
			ops = append(ops, porcupine.Operation{Input: s, Call: int64(10 * i), Return: int64(10*i + 5)})
		}
		return ops
	}
	// overlapping is inTurn, except that the last two calls overlap.
	overlapping := func(steps ...step) []porcupine.Operation {
		ops := inTurn(steps...)
		ops[len(ops)-2].Return += 7
		return ops
	}
	acquire := func(hold int) step { return step{op: "acquire", hold: hold, yes: true} }
	refused := func(hold int) step { return step{op: "acquire", hold: hold} }
	release := func(hold int) step { return step{op: "release", hold: hold, yes: true} }
	renew := func(hold int) step { return step{op: "renew", hold: hold, yes: true} }
	no := func(s step) step { s.yes = false; return s }
	read := func(s step) step { s.shared = true; return s }
	withFence := func(s step, n uint64) step { s.fence = n; return s }
	for name, tt := range map[string]struct {
		ops           []porcupine.Operation
		loose, strict bool // the wanted results of a loose and of a strict check
	}{
		"one after another": {inTurn(acquire(1), release(1), acquire(2)), true, true},
		"two at once":       {inTurn(acquire(1), acquire(2), release(1)), false, false},
		"two at once, of different keys": {
			inTurn(acquire(1), step{op: "acquire", key: 1, hold: 2, yes: true}), true, true},
		"the second while the first is released": {overlapping(acquire(1), acquire(2), release(1)), true, true},
		"refused by a holder":                    {inTurn(acquire(1), refused(2)), true, true},
		"refused by nobody":                      {inTurn(refused(2), acquire(1)), true, false},
		"refused by another of its Client":       {inTurn(step{op: "acquire", hold: 2, maybe: true}), true, true},
		"a stranger's release":                   {inTurn(acquire(1), release(2)), false, false},
		"its own release refused":                {inTurn(acquire(1), no(release(1))), false, false},
		"renewal after the release":              {inTurn(acquire(1), release(1), renew(1)), false, false},
		"two readers at once, then a writer": {inTurn(read(acquire(1)), read(acquire(2)), read(renew(1)),
			read(release(1)), refused(3), read(release(2)), acquire(4)), true, true},
		"a writer beside a reader":      {inTurn(read(acquire(1)), acquire(2)), false, false},
		"a reader beside a writer":      {inTurn(acquire(1), read(acquire(2))), false, false},
		"a reader refused by a reader":  {inTurn(read(acquire(1)), read(refused(2))), true, false},
		"one reader's end ends another": {inTurn(read(acquire(1)), read(acquire(2)), read(release(1)), read(no(renew(2)))), false, false},
		"a reader with the fence of another": {
			inTurn(withFence(read(acquire(1)), 7), withFence(read(acquire(2)), 7)), false, false},
		"two readers at the same moment, with one fence": {
			overlapping(withFence(read(acquire(1)), 7), withFence(read(acquire(2)), 7)), true, true},
		"a fence that repeats": {inTurn(withFence(acquire(1), 7), release(1), withFence(acquire(2), 7)), false, false},
		"a fence that grows over a hold without": {inTurn(withFence(acquire(1), 7), release(1), acquire(2), release(2),
			withFence(step{op: "wait", hold: 3, yes: true}, 8)), true, true},
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

func TestAnnotate(t *testing.T) {
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
		h := &history{e: &env{suite: s}, ofClients: true, ops: []porcupine.Operation{
			{Input: refused, Call: 5, Return: 7}, {Input: tt.other, Call: tt.call, Return: tt.ret}}}
		h.annotate()
		if got := h.ops[0].Input.(step).maybe; got != tt.want {
			t.Errorf("%s: explained %v, want %v", name, got, tt.want)
		}
	}
}
