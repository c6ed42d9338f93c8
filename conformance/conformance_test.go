package conformance_test

import (
	"context"
	"os"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/conformance"
)

// TestMemlockInVirtualTime takes no time to speak of.
func TestMemlockInVirtualTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := harness()
		h.Only = func(clause string) bool { return clause != "reach" } // starts a process
		err := conformance.Check(t.Context(), h, func(r conformance.Result) {
			if r.Status == conformance.Fail {
				t.Errorf("%s: %v", r.Name, r.Err)
			}
		})
		if err != nil {
			t.Error(err)
		}
	})
}

// TestRemote runs the suite with nearly every hook and with several processes, on a
// store behind a socket.
func TestRemote(t *testing.T) {
	t.Parallel()
	s := &server{}
	conformance.Run(t, conformance.Harness{
		Store: func(context.Context) (string, func(), error) {
			err := s.start(false)
			return s.addr, s.close, err
		},
		Open: func(_ context.Context, store string) (backend.Driver, error) { return &remote{addr: store}, nil },
		Stop: func(context.Context, string) error { s.stop(); return nil },
		Start: func(_ context.Context, _ string, data bool) error {
			return s.start(data)
		},
		Kick: func(context.Context, string) error { s.kick(); return nil },
		Link: func(_ context.Context, store string) (*conformance.Link, error) { return conformance.TCP(store) },
		Commands: func(context.Context, string) (int64, error) {
			s.mu.Lock()
			defer s.mu.Unlock()
			return s.commands, nil
		},
		Entries: func(context.Context, string) ([]string, error) { return s.entries(), nil },
		Cannot: map[string]string{
			"fence-data-loss": "the counter of fences is part of the data",
		},
	})
}

// modest is a remote driver that claims less than is true.
type modest struct{ remote }

func (*modest) Traits() backend.Traits {
	return backend.Traits{Ordered: true, Fenced: true, Reach: backend.Process}
}

// TestReachClaimedTooSmall is not parallel: it sets the arguments by which its
// child comes here.
func TestReachClaimedTooSmall(t *testing.T) {
	args := os.Args
	defer func() { os.Args = args }()
	os.Args = []string{args[0], "-test.run=^" + t.Name() + "$"}
	s := &server{}
	var got conformance.Result
	err := conformance.Check(t.Context(), conformance.Harness{
		Name: t.Name(),
		Store: func(context.Context) (string, func(), error) {
			err := s.start(false)
			return s.addr, s.close, err
		},
		Open: func(_ context.Context, store string) (backend.Driver, error) {
			return &modest{remote{addr: store}}, nil
		},
		Only: func(clause string) bool { return clause == "reach" },
	}, func(r conformance.Result) { got = r })
	if err == nil || got.Status != conformance.Fail || !strings.Contains(got.Err.Error(), "refused to another process") {
		t.Errorf("got %v (%v: %v), want a failure of reach", err, got.Status, got.Err)
	}
}

func BenchmarkMemlock(b *testing.B) { conformance.Bench(b, harness()) }
