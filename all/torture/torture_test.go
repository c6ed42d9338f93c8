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
	runBoth(t, "-clocks=false", "-time", "12s", "-seed", "1")
}

// pglock and etcdlock keep their promises on hosts of their own.
func TestPromisesOnHosts(t *testing.T) {
	if os.Getenv("HASP_TEST_HOSTS") == "" {
		t.Skip(`makes network namespaces only if HASP_TEST_HOSTS is set, as "make hosts" does`)
	}
	runBoth(t, "-on", "hosts", "-time", "20s", "-seed", "1")
}

// runBoth runs both strategies.
func runBoth(t *testing.T, args ...string) {
	for strategy, need := range map[string]func(testing.TB){"pglock": func(t testing.TB) { pgtest.Need(t) }, "etcdlock": etcdtest.Need} {
		t.Run(strategy, func(t *testing.T) {
			t.Parallel()
			need(t)
			cmd := exec.CommandContext(t.Context(), os.Args[0], append(args, "-strategy", strategy)...)
			cmd.Env = append(os.Environ(), "HASP_TORTURE=1")
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}
