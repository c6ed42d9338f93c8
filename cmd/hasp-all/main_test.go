//go:build unix

package main

import (
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/cli"
	"github.com/hasplock/hasp/internal/etcdtest"
	"github.com/hasplock/hasp/internal/pgtest"
)

// If the environment variable role is set, the test binary is the command.
const role = "HASP_TEST_ROLE"

func TestMain(m *testing.M) {
	if os.Getenv(role) != "" {
		main()
	}
	os.Exit(m.Run())
}

func run(t *testing.T, url string, args ...string) string {
	t.Helper()
	exe := await.Value(os.Executable())
	cmd := exec.CommandContext(t.Context(), exe, args...)
	cmd.Env = append(os.Environ(), role+"=hasp", "HASP_URL="+url, "GORACE=atexit_sleep_ms=0")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("hasp %v: %v\n%s", args, err, out)
	}
	return string(out)
}

func TestStrategiesAreAsDescribed(t *testing.T) {
	for _, s := range strategies {
		if c, err := hasp.ParseURL(s.URL); err != nil || c.Strategy != s.Name || !slices.Contains(hasp.Strategies(), s.Name) {
			t.Errorf("%s: %+v, %v", s.URL, c, err)
		}
	}
	out := run(t, "", "strategies")
	for _, name := range hasp.Strategies() {
		if !strings.Contains(out, "\n"+name+" ") {
			t.Errorf("%s is not listed:\n%s", name, out)
		}
	}
}

func TestOnPostgreSQL(t *testing.T) { holds(t, "pglock", "pglock+"+pgtest.Start(t).URL()) }

func TestOnEtcd(t *testing.T) {
	holds(t, "etcdlock", "etcdlock+etcd://"+etcdtest.Start(t, 1)[0].Client)
}

func TestOnSQLite(t *testing.T) { holds(t, "sqlite", "sqlite://"+t.TempDir()+"/locks.db") }

// holds holds a lock in this process, and checks that commands show it.
func holds(t *testing.T, strategy, url string) {
	config := await.Value(hasp.ParseURL(url))
	d := await.Value(config.Driver(t.Context()))
	c := await.Value(hasp.New(d, nil))
	defer c.Close()
	traits := d.Traits()
	for _, s := range strategies {
		if s.Name == strategy && (traits.Reach != s.Reach || !traits.Fenced || traits.Ordered != (s.Order == cli.InOrder)) {
			t.Errorf("%+v has the traits %+v", s, traits)
		}
	}

	l := await.Value(c.Lock(t.Context(), "backup"))
	if out := run(t, url, "ls"); !strings.Contains(out, "backup") {
		t.Errorf("ls: %s", out)
	}
	if out := run(t, url, "inspect", "backup"); !strings.Contains(out, "held") {
		t.Errorf("inspect: %s", out)
	}
	await.Must(t, l.Unlock(t.Context()))
	if out := run(t, url, "run", "backup", "--", "echo", "locked"); out != "locked\n" {
		t.Errorf("run: %q", out)
	}
}
