package main

import (
	"os"
	"os/exec"
	"testing"

	"github.com/hasplock/hasp/internal/crew"
	"github.com/hasplock/hasp/internal/etcdtest"
	"github.com/hasplock/hasp/internal/pgtest"
)

func TestMain(m *testing.M) {
	if crew.Role() != "" || os.Getenv("HASP_TORTURE") != "" {
		main()
		os.Exit(0) // the tests must not run once more
	}
	os.Exit(m.Run())
}

// Both keep their promises for some seconds of faults. A slow machine only injects fewer of
// them.
func TestPromises(t *testing.T) {
	for strategy, need := range map[string]func(testing.TB){"pglock": func(t testing.TB) { pgtest.Start(t) }, "etcdlock": etcdtest.Need} {
		t.Run(strategy, func(t *testing.T) {
			t.Parallel()
			need(t)
			cmd := exec.CommandContext(t.Context(), os.Args[0], "-strategy", strategy, "-clocks=false", "-time", "12s", "-seed", "1")
			cmd.Env = append(os.Environ(), "HASP_TORTURE=1")
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}
