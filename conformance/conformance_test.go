package conformance_test

import (
	"context"
	"os"
	"strings"
	"testing"

	"github.com/hasplock/hasp/backend"
	"github.com/hasplock/hasp/conformance"
	"github.com/hasplock/hasp/filelock"
)

// modest is a driver that claims less than is true.
type modest struct{ *filelock.Driver }

func (modest) Traits() backend.Traits { return backend.Traits{Reach: backend.Process} }

// TestReachClaimedTooSmall is not parallel: it sets the arguments by which its
// child comes here.
func TestReachClaimedTooSmall(t *testing.T) {
	args := os.Args
	defer func() { os.Args = args }()
	os.Args = []string{args[0], "-test.run=^" + t.Name() + "$"}
	var got conformance.Result
	err := conformance.Check(t.Context(), conformance.Harness{
		Name:  t.Name(),
		Store: func(context.Context) (string, func(), error) { return t.TempDir(), nil, nil },
		Open: func(_ context.Context, dir string) (backend.Driver, error) {
			return modest{filelock.New(dir, nil)}, nil
		},
		Only: func(clause string) bool { return clause == "reach" },
	}, func(r conformance.Result) { got = r })
	if err == nil || got.Status != conformance.Fail || !strings.Contains(got.Err.Error(), "refused to another process") {
		t.Errorf("got %v (%v: %v), want a failure of reach", err, got.Status, got.Err)
	}
}
