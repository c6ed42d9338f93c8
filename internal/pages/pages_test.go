// Package pages checks what readers paste from the documentation. Programs must compile and run,
// commands must succeed, and configurations must name a strategy. Pages must be wrapped, their
// links must lead somewhere, and the tests that they name must exist.
package pages

import (
	"encoding/json"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"

	"github.com/hasplock/hasp"
	_ "github.com/hasplock/hasp/fairlock"
	_ "github.com/hasplock/hasp/filelock"
	"github.com/hasplock/hasp/internal/await"
	"github.com/hasplock/hasp/internal/redistest"
	_ "github.com/hasplock/hasp/memlock"
	_ "github.com/hasplock/hasp/pubsublock"
	_ "github.com/hasplock/hasp/redlock"
	_ "github.com/hasplock/hasp/spinlock"
)

func TestMain(m *testing.M) { os.Exit(redistest.Main(m)) }

const root = "../.."

// block is a fenced block of a page.
type block struct{ page, text string }

var fence = regexp.MustCompile("(?ms)^```([a-z]*)\n(.*?)^```$")

var must = await.Must

// pages returns the text of each page.
func pages(t *testing.T) map[string]string {
	texts := map[string]string{}
	for _, pattern := range []string{"*.md", "docs/*.md", "docs/*/*.md", "lab/*.md", "lab/*/*.md"} {
		names := await.Value(filepath.Glob(filepath.Join(root, filepath.FromSlash(pattern))))
		if len(names) == 0 {
			t.Fatalf("no page is called %s", pattern)
		}
		for _, name := range names {
			text := await.Value(os.ReadFile(name))
			texts[strings.TrimPrefix(filepath.ToSlash(name), root+"/")] = string(text)
		}
	}
	return texts
}

// blocks returns the blocks of all pages that are marked with language.
func blocks(t *testing.T, language string) []block {
	var all []block
	for page, text := range pages(t) {
		for _, m := range fence.FindAllStringSubmatch(text, -1) {
			if m[1] == language {
				all = append(all, block{page, m[2]})
			}
		}
	}
	if len(all) == 0 {
		t.Fatalf("no page has a block of %q", language)
	}
	return all
}

// shell runs a line of sh in the root of this module.
func shell(t *testing.T, line string, env ...string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "sh", "-c", "unset HASP_URL LOCKS; "+line)
	cmd.Dir = root
	cmd.Env = append(os.Environ(), env...)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%s: %v\n%s", line, err, out)
	}
}

// elsewhere has the pages whose programs need other modules. Tests of those modules run them.
var elsewhere = []string{
	"docs/from.md", "docs/integrations.md", "docs/recipes.md", "docs/drivers.md", "docs/telemetry.md",
}

func TestProgramsRun(t *testing.T) {
	redis := redistest.Start(t, nil).Addr
	for _, b := range blocks(t, "go") {
		if slices.Contains(elsewhere, b.page) {
			continue
		}
		t.Run(b.page, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()

			// The overlay makes the program a part of this module without a file in the working
			// tree.
			source := filepath.Join(dir, "main.go")
			overlay := filepath.Join(dir, "overlay.json")
			must(t, os.WriteFile(source, []byte(strings.ReplaceAll(b.text, "localhost:6379", redis)), 0o600))
			module := await.Value(filepath.Abs(root))
			replace := map[string]map[string]string{"Replace": {filepath.Join(module, "internal",
				"pages", "program", "main.go"): source}}
			text := await.Value(json.Marshal(replace))
			must(t, os.WriteFile(overlay, text, 0o600))
			program := filepath.Join(dir, "program")
			shell(t, "go build -overlay "+overlay+" -o "+program+" ./internal/pages/program && "+program)
		})
	}
}

// This test runs only lines that fetch and install nothing.
func TestCommandsSucceed(t *testing.T) {
	redis := strings.TrimPrefix(redistest.Start(t, nil).URL(), "redis://")
	var tried int
	for _, b := range blocks(t, "sh") {
		for line := range strings.Lines(b.text) {
			if !strings.HasPrefix(line, "go run ./cmd/hasp ") {
				continue
			}
			tried++
			line = strings.ReplaceAll(strings.TrimSpace(line), "localhost:6379", redis)
			t.Run(b.page, func(t *testing.T) {
				dir := t.TempDir()
				shell(t, strings.ReplaceAll(line, "/tmp/", dir+"/"), "XDG_STATE_HOME="+dir)
			})
		}
	}
	if tried == 0 {
		t.Fatal("no page has a command to try")
	}
}

func TestConfigurationsNameAStrategy(t *testing.T) {
	check := func(t *testing.T, c hasp.Config) {
		own := []string{"pglock", "etcdlock", "kube", "nats", "s3", "mysql", "sqlite"}
		all := append(hasp.Strategies(), own...) // these are in modules of their own
		if !slices.Contains(all, c.Strategy) {
			t.Errorf("%q is not the name of a strategy", c.Strategy)
		}
	}
	for _, b := range blocks(t, "yaml") {
		if strings.HasPrefix(b.text, "apiVersion:") {
			continue // a manifest of Kubernetes, which the tests of k8slease parse
		}
		var c hasp.Config
		d := yaml.NewDecoder(strings.NewReader(b.text))
		d.KnownFields(true)
		if err := d.Decode(&c); err != nil {
			t.Errorf("%s: %v\n%s", b.page, err, b.text)
		}
		check(t, c)
	}
	for _, b := range blocks(t, "") {
		for line := range strings.Lines(b.text) {
			c, err := hasp.ParseURL(strings.Fields(line)[0])
			if err != nil {
				t.Errorf("%s: %v\n%s", b.page, err, line)
			}
			check(t, c)
		}
	}
}

var generated = regexp.MustCompile(`(?s)<!-- (\w+): .*?<!-- /\w+ -->`)

// mayBeWide finds a row of a table, a line of code, or a picture.
var mayBeWide = regexp.MustCompile(`^(\||    |!)`)

// Tables, code, pictures and generated parts may be wider.
func TestPagesAreWrapped(t *testing.T) {
	const width = 100
	for page, text := range pages(t) {
		text = generated.ReplaceAllString(fence.ReplaceAllString(text, ""), "")
		for line := range strings.Lines(text) {
			line = strings.TrimSuffix(line, "\n")
			if utf8.RuneCountInString(line) > width && !mayBeWide.MatchString(line) {
				t.Errorf("%s: wrap at %d columns: %s", page, width, line)
			}
		}
	}
}

var (
	link     = regexp.MustCompile(`\]\(([^)\s:#]*)(#[^)\s]*)?\)`) // within the repository
	heading  = regexp.MustCompile(`(?m)^#+ (.*)$`)
	noAnchor = regexp.MustCompile(`[^\w\- ]`)
	testName = regexp.MustCompile(`\bTest[A-Z]\w+`)
	testFunc = regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	testFile = regexp.MustCompile("`([\\w/]+_test\\.go)`") // as a path from the root
)

func TestLinksLeadSomewhere(t *testing.T) {
	all := pages(t)
	for page, text := range all {
		for _, m := range link.FindAllStringSubmatch(text, -1) {
			to := page
			if m[1] != "" {
				to = path.Join(path.Dir(page), m[1])
			}
			if _, err := os.Stat(filepath.Join(root, to)); err != nil {
				t.Errorf("%s: %v", page, err)
			}
			found := m[2] == ""
			for _, h := range heading.FindAllStringSubmatch(all[to], -1) {
				anchor := noAnchor.ReplaceAllString(strings.ToLower(h[1]), "")
				found = found || "#"+strings.ReplaceAll(anchor, " ", "-") == m[2]
			}
			if !found {
				t.Errorf("%s: %s has no heading for %s", page, to, m[2])
			}
		}
	}
}

func TestNamedTestsExist(t *testing.T) {
	exist := map[string]bool{}
	must(t, filepath.WalkDir(root, func(name string, _ os.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(name, "_test.go") {
			return err
		}
		text, err := os.ReadFile(name)
		for _, m := range testFunc.FindAllSubmatch(text, -1) {
			exist[string(m[1])] = true
		}
		return err
	}))
	for page, text := range pages(t) {
		for _, test := range testName.FindAllString(text, -1) {
			if !exist[test] {
				t.Errorf("%s: there is no %s", page, test)
			}
		}
		for _, m := range testFile.FindAllStringSubmatch(text, -1) {
			if _, err := os.Stat(filepath.Join(root, m[1])); err != nil {
				t.Errorf("%s: %v", page, err)
			}
		}
	}
}
