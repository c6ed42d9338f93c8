package cli

import (
	"regexp"
	"strings"
	"testing"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/redistest"
)

// The strategy unfenced claims fewer abilities than its store has, so clauses fail.
func TestConformFails(t *testing.T) {
	t.Parallel()
	o := runHasp(t, "", "conform", "--url", "unfenced://").want(t, exitFailed)
	contains(t, o.err, "clauses failed: ")
	failed := regexp.MustCompile(`(?m)^fail  (\S+) .*\n      want: .+\n      got:  .+$`).FindAllStringSubmatch(o.out, -1)
	for _, c := range failed {
		contains(t, o.err, c[1])
	}
	if len(failed) == 0 || len(failed) != strings.Count(o.out, "\nfail  ") || !strings.Contains(o.out, "pass  ") {
		t.Errorf("%d clauses failed:\n%s", len(failed), o.out)
	}
}

// On a Redis server, conform also runs the clauses about links and about other strategies on the
// same store.
func TestConformOnRedis(t *testing.T) {
	t.Parallel()
	o := runHasp(t, "fairlock+"+redistest.Start(t, nil).URL()+"?window=4s&ttl=10s", "conform").want(t, 0)
	// process-exclusion shows that hasp can start itself as a child process.
	contains(t, o.out, "pass  acquire-excludes", "pass  process-exclusion", "pass  link-outage", "pass  order-of-arrival",
		"pass  others-exclude", " 0 failed, ", "fairlock: ")
	if o.err != "" {
		t.Errorf("stderr: %s", o.err)
	}
}

func TestServerOf(t *testing.T) {
	t.Parallel()
	for node, want := range map[string]string{
		"redis://u:p%40ss@h:1/2": "h:1", "redis://[::1]:1/0": "[::1]:1",
		"rediss://h:1": "", "redis://h": "", "redis://a:1,b:2": "", "unix:///h:1": "", "/var/lock": "", "": "",
	} {
		got := ""
		if u := serverOf(hasp.Config{Nodes: []string{node}}); u != nil {
			got = u.Host
		}
		if got != want {
			t.Errorf("%s: got %q, want %q", node, got, want)
		}
	}
}

func TestStrategiesAreAsDescribed(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t, nil).URL()
	nodes := map[string]string{"memlock": "", "filelock": t.TempDir(), "redlock": redistest.StartNodes(t, 3, nil).URL()}
	for _, name := range hasp.Strategies() {
		if describe(name).Name != name && name != "unfenced" {
			t.Errorf("%s is not described", name)
		}
	}
	for _, s := range strategyTable {
		node, ok := nodes[s.Name]
		if !ok {
			node = redis
		}
		d, err := hasp.Config{Strategy: s.Name, Nodes: []string{node}}.Driver(t.Context())
		must(t, err)
		defer d.Close()
		if got := d.Traits(); got.Reach != s.Reach || !got.Fenced || got.Ordered != (s.Order == InOrder) {
			t.Errorf("%+v has the traits %+v", s, got)
		}
		if c, err := hasp.ParseURL(s.URL); err != nil || c.Strategy != s.Name {
			t.Errorf("%s: %+v, %v", s.URL, c, err)
		}
	}
}

func TestCommandsThatNeedNoStore(t *testing.T) {
	t.Parallel()
	call("strategies").shows(t,
		"filelock", "memlock://", "spinlock+redis://", "pubsublock+redis://", "fairlock+redis://", "redlock+redis://")
	call("--version").shows(t, "hasp ")
	call("run", "--help").shows(t, "75     not acquired")
	if out := call("lead", "--help").want(t, 0).out; strings.Contains(out, "  75  ") {
		t.Errorf("hasp lead never exits with 75, but says:\n%s", out)
	}
	call("completion", "bash").shows(t, "__start_hasp")
}

func TestManPage(t *testing.T) {
	t.Parallel()
	page := call("man").want(t, 0).out
	contains(t, page, ".TH HASP 1", "\n.SH \"HASP UNLOCK\"\n", `\-\-no\-wait`, "75     not acquired", `\-\-config`)
	for line := range strings.Lines(page) { // a request that is not ours would hide text
		if strings.HasPrefix(line, "'") || strings.HasPrefix(line, ".") && !regexp.MustCompile(`^\.(TH|SH|nf|fi)\b`).MatchString(line) {
			t.Errorf("%q", line)
		}
	}
}

func TestCompletion(t *testing.T) {
	t.Parallel()
	url := store(t)
	hold(t, url)
	for _, command := range []string{"run", "lead", "lock", "inspect", "break"} {
		if o := runHasp(t, url, "__complete", command, "k").want(t, 0); !strings.HasPrefix(o.out, "key\n:4\n") {
			t.Errorf("%s: %s%s", command, o.out, o.err)
		}
	}
	call("__complete", "inspect", "--url", "").shows(t, "fairlock+redis://localhost:6379/0\tone Redis; first")
	for _, at := range []string{"spinlock+redis://:" + secret + "@127.0.0.1:1", "spin"} { // no store, and no URL
		if o := call("__complete", "inspect", "--url", at, ""); strings.Contains(o.out+o.err, secret) || !strings.HasPrefix(o.out, ":4\n") {
			t.Errorf("%s: %s%s", at, o.out, o.err)
		}
	}
}
