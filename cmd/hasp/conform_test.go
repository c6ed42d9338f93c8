package main

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/hasplock/hasp"
	"github.com/hasplock/hasp/internal/redistest"
)

func TestConform(t *testing.T) {
	t.Parallel()
	o := runHasp(t, store(t), "conform").want(t, 0)
	contains(t, o.out, "pass  acquire-excludes")
	contains(t, o.out, "pass  process-exclusion") // in processes of its own
	contains(t, o.out, " 0 failed, ")
	contains(t, o.out, "filelock: ")
	if o.err != "" {
		t.Errorf("stderr: %s", o.err)
	}
}

// unfenced claims that it has no fence, and lies.
func TestConformFails(t *testing.T) {
	t.Parallel()
	o := runHasp(t, "", "conform", "--url", "unfenced://", "--json").want(t, exitFailed)
	contains(t, o.err, "clauses failed: ")
	var all []clause
	if err := json.Unmarshal([]byte(o.out), &all); err != nil {
		t.Fatalf("%v in:\n%s", err, o.out)
	}
	failed := 0
	for _, c := range all {
		if c.Status == "fail" {
			failed++
			if c.Error == "" || c.Why == "" || !strings.Contains(o.err, c.Name) {
				t.Errorf("%+v", c)
			}
		}
	}
	if failed == 0 || failed == len(all) {
		t.Errorf("%d of %d clauses failed", failed, len(all))
	}
}

// On a server that is reached over TCP the clauses about a bad network run too,
// and those about the other strategies that lock keys there.
func TestConformOnRedis(t *testing.T) {
	t.Parallel()
	o := runHasp(t, "fairlock+"+redistest.Start(t, nil).URL()+"?window=4s&ttl=10s", "conform").want(t, 0)
	contains(t, o.out, "pass  link-outage")
	contains(t, o.out, "pass  order-of-arrival")
	contains(t, o.out, "pass  others-exclude")
	contains(t, o.out, " 0 failed, ")
}

// A strategy is checked with all others of its store, and their parameters are
// not mixed up.
func TestConformKnowsTheOthers(t *testing.T) {
	t.Parallel()
	url := redistest.Start(t, nil).URL()
	for _, c := range []hasp.Config{
		{Strategy: "spinlock", Nodes: []string{url}, Params: hasp.Params{"fence_ttl": "1h", "ttl": "10s"}},
		{Strategy: "pubsublock", Nodes: []string{url}, Params: hasp.Params{"channel": "c"}},
		{Strategy: "fairlock", Nodes: []string{url}, Params: hasp.Params{"window": "3s"}},
	} {
		names := []string{c.Strategy}
		for _, other := range harness(c).Others {
			names = append(names, other.Name)
			d, err := other.Open(t.Context(), "")
			if err != nil {
				t.Fatalf("%s beside %+v: %v", other.Name, c, err)
			}
			d.Close()
		}
		slices.Sort(names)
		if want := []string{"fairlock", "pubsublock", "spinlock"}; !slices.Equal(names, want) {
			t.Errorf("%s is checked with %q, want %q", c.Strategy, names, want)
		}
	}
	if h := harness(hasp.Config{Strategy: "filelock"}); h.Others != nil {
		t.Errorf("filelock is checked with %+v", h.Others)
	}
}

func TestHostOf(t *testing.T) {
	t.Parallel()
	for node, want := range map[string][3]string{
		"redis://u:p@ss/w@h:1/2": {"redis://u:p@ss/w@", "h:1", "/2"},
		"redis://h:1":            {"redis://", "h:1", ""},
		"redis://[::1]:1/0":      {"redis://", "[::1]:1", "/0"},
	} {
		before, host, after, ok := hostOf(node)
		if got := [3]string{before, host, after}; got != want || !ok {
			t.Errorf("%s: %q %v, want %q", node, got, ok, want)
		}
	}
	for _, node := range []string{"rediss://h:1", "redis://h", "redis://a:1,b:2", "unix:///h:1", "/var/lock", ""} {
		if _, host, _, ok := hostOf(node); ok {
			t.Errorf("%s: %q is no host", node, host)
		}
	}
}

func TestStrategies(t *testing.T) {
	t.Parallel()
	o := call("strategies").want(t, 0)
	for _, want := range []string{"filelock", "memlock://", "spinlock+redis://", "pubsublock+redis://", "fairlock+redis://", "redlock+redis://"} {
		contains(t, o.out, want)
	}
	var all []strategy
	if err := json.Unmarshal([]byte(call("strategies", "--json").want(t, 0).out), &all); err != nil {
		t.Fatal(err)
	}
	if len(all) < 3 {
		t.Errorf("%+v", all)
	}
}

func TestStrategiesAreAsDescribed(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t, nil).URL()
	nodes := map[string]string{"memlock": "", "filelock": t.TempDir(), "redlock": redistest.StartNodes(t, 3, nil).URL()}
	for _, s := range described {
		node, ok := nodes[s.Name]
		if !ok {
			node = redis
		}
		d, err := hasp.Config{Strategy: s.Name, Nodes: []string{node}}.Driver(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		if got := d.Traits(); got.Reach.String() != s.Reach || got.Fenced != s.Fence || got.Ordered != (s.Order != "none") {
			t.Errorf("%+v has the traits %+v", s, got)
		}
		if c, err := hasp.ParseURL(s.URL); err != nil || c.Strategy != s.Name {
			t.Errorf("%s: %+v, %v", s.URL, c, err)
		}
	}
}

func TestCompletion(t *testing.T) {
	t.Parallel()
	contains(t, call("completion", "bash").want(t, 0).out, "__start_hasp")
	for _, want := range []string{"spinlock+redis://", "pubsublock+redis://", "fairlock+redis://"} {
		contains(t, call("__complete", "inspect", "--url", "").want(t, 0).out, want)
	}
	contains(t, call("version").want(t, 0).out, "hasp ")
	contains(t, call("run", "--help").want(t, 0).out, "75     not acquired")
}
