//go:build unix

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
)

// stage is some tests of one package, on one kind of Redis.
type stage struct {
	Dir, Run, Skip, Redis string
	Short                 bool // with -short
}

func (s stage) String() string {
	return fmt.Sprintf("HASP_TEST_REDIS=%s go test -short=%v -run '%s' -skip '%s' ./%s", s.Redis, s.Short, s.Run, s.Skip, s.Dir)
}

// stages returns the tests that should find a bug in a package, the quick ones first.
func (p pkg) stages() []stage {
	s := []stage{{p.dir, "", "Conformance", "inprocess", true}, {p.dir, "", "Conformance", "process", false}}
	if *own {
		return s
	}
	s = append(s, p.more...)
	if p.dir != "filelock" {
		s = append(s, stage{"lab/simulate", "", "", "inprocess", false})
	}
	return s
}

// broken and timedOut stand in place of a test's name.
const (
	broken   = "does not compile"
	timedOut = "time-out"
)

// try returns the name of the test that finds a mutant, or an empty string. root is the module's
// root.
func (m *mutant) try(ctx context.Context, root string) (found string, err error) {
	dir, err := os.MkdirTemp("", "mutate")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(root, m.File)
	edited, overlay := filepath.Join(dir, filepath.Base(path)), filepath.Join(dir, "overlay.json")
	replace, _ := json.Marshal(map[string]map[string]string{"Replace": {path: edited}})
	if err := errors.Join(os.WriteFile(edited, m.apply(), 0o666), os.WriteFile(overlay, replace, 0o666)); err != nil {
		return "", err
	}

	for _, s := range m.pkg.stages() {
		if found, err := findTwice(s, func(s stage) (string, error) { return test(ctx, root, overlay, s) }); found != "" || err != nil {
			return found, err
		}
	}
	return "", nil
}

// findTwice returns the test of a stage that fails twice, or an empty string. If a test fails once
// and then passes, findTwice runs the other tests without it.
func findTwice(s stage, test func(stage) (failed string, err error)) (string, error) {
	for {
		failed, err := test(s)
		if failed == "" || failed == broken || err != nil {
			return failed, err
		}
		again := s
		if strings.HasPrefix(failed, "Test") {
			name, _, _ := strings.Cut(failed, "/")
			again.Run, again.Skip = "^"+name+"$", ""
		}
		if more, err := test(again); more != "" || err != nil {
			return failed, err
		}
		fmt.Printf("fails now and then: %v: %s\n", s, failed)
		if again == s {
			return "", nil // all tests have passed
		}
		s.Skip = strings.TrimPrefix(s.Skip+"|"+again.Run, "|")
	}
}

var failure = regexp.MustCompile(`(?m)^\s*--- FAIL: (\S+)|^(panic: .*)|^(fatal error: .*)`)

// test runs the tests of a stage until one fails, and returns its name.
func test(ctx context.Context, root, overlay string, s stage) (failed string, err error) {
	limit := "15m"
	if s.Short {
		limit = "3m"
	}
	// A bug may allocate without end, so ulimit bounds the address space, in KiB.
	cmd := exec.CommandContext(ctx, "sh", "-c", `ulimit -v 16000000 && exec go "$@"`, "sh", "test", "-vet=off", "-failfast", "-count=1",
		"-overlay="+overlay, "-timeout="+limit, fmt.Sprint("-short=", s.Short), "-run="+s.Run, "-skip="+s.Skip, ".")
	cmd.Dir = filepath.Join(root, s.Dir)
	cmd.Env = append(os.Environ(), "HASP_TEST_REDIS="+s.Redis)
	text, err := cmd.CombinedOutput()
	switch out := string(text); {
	case err == nil, ctx.Err() != nil:
		return "", ctx.Err()
	case strings.Contains(out, "[build failed]"), strings.Contains(out, "[setup failed]"):
		return broken, nil
	case strings.Contains(out, "panic: test timed out"):
		return timedOut, nil
	default:
		if m := failure.FindStringSubmatch(out); m != nil {
			return m[1] + m[2] + m[3], nil
		}
		return err.Error(), nil
	}
}
